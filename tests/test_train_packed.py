"""Packed documents: each has the loss it has alone, in every family whose attention can stay within documents."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers

from edkm_cli.data import Blocks
from edkm_cli.data.encode import Counts, Encoded
from edkm_cli.data.store import in_memory
from edkm_cli.errors import UserError
from edkm_cli.train.losses import Beside, Objective
from edkm_cli.train.packed import require_attention_within_documents

SMALL = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 256,
}
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 6},
    "Mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1},
    "Phi3": {"pad_token_id": 0},
    "Gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "Olmo2": {},
    "Granite": {},
    "GPTNeoX": {"rotary_pct": 0.5},
}
LENGTHS = [7, 19, 3, 11, 24, 5, 2, 16]


def family(name, implementation="sdpa"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **FAMILIES[name]})
    config._attn_implementation = "eager" if name == "Gemma2" else implementation  # softcapped scores
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def documents():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 256, length) for length in LENGTHS]


def packed_blocks(size=24):
    lengths, total = np.array(LENGTHS), sum(LENGTHS)
    ids = np.concatenate(documents()).astype(np.uint16)
    encoded = Encoded(ids, lengths, np.ones(total, bool), np.empty(0, np.uint64), Counts(len(lengths), total, total))
    return Blocks(in_memory([encoded], np.uint16), size, seed=0, packing=True)


def losses_alone(model):
    """Summed negative log-likelihood of each document by itself."""
    found = []
    for document in documents():
        ids = torch.from_numpy(document)[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
        found.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item())
    return found


def losses_packed(model, blocks, batch_size):
    """The same, of the documents as they lie in packed batches; found by their tokens."""
    by_tokens = {}
    for index in range(-(-len(blocks) // batch_size)):
        batch = blocks.examples(index, batch_size)
        logits = model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False).logits.double()
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch.labels, ignore_index=-1, reduction="none")
        for row in range(batch_size):
            starts = [*(batch.positions[row] == 0).nonzero()[:, 0].tolist(), batch.ids.shape[1]]
            for start, stop in pairwise(starts):
                by_tokens[tuple(batch.ids[row, start:stop].tolist())] = nll[row, start:stop].sum().item()
    return [by_tokens[tuple(document.tolist())] for document in documents()]


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_a_packed_document_has_the_loss_it_has_alone(name):
    model, blocks = family(name), packed_blocks()
    assert len(blocks) < len(LENGTHS)
    wanted = losses_alone(model)
    for batch_size in (1, 2):
        assert losses_packed(model, blocks, batch_size) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    require_attention_within_documents(model)


@torch.no_grad()
def test_eager_attention_keeps_within_documents_too():
    model = family("Llama", "eager")
    assert losses_packed(model, packed_blocks(), 1) == pytest.approx(losses_alone(model), rel=1e-4, abs=1e-4)


def test_the_objective_of_packed_batches_is_the_mean_over_all_tokens_learnt():
    model, teacher, blocks = family("Llama"), family("Llama"), packed_blocks()
    batch = blocks.examples(0, len(blocks))
    assert batch.learnt == sum(LENGTHS) - len(LENGTHS)
    with torch.no_grad():
        found = Objective().loss(model, batch).item()
        assert found == pytest.approx(sum(losses_alone(model)) / batch.learnt, rel=1e-5)
        assert Objective(Beside(teacher)).loss(model, batch).item() == pytest.approx(0, abs=1e-6)


def test_gradients_of_packed_training_are_those_of_documents_alone():
    model, blocks = family("Llama"), packed_blocks()
    batch = blocks.examples(0, len(blocks))
    Objective().loss(model, batch).backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for document in documents():
        ids = torch.from_numpy(document)[None]
        (Objective().loss(model, ids) * (ids.numel() - 1) / batch.learnt).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(packed[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_model_whose_state_runs_on_is_refused():
    config = transformers.MambaConfig(vocab_size=257, hidden_size=16, state_size=4, num_hidden_layers=1, pad_token_id=0)
    torch.manual_seed(0)

    class Positionless(transformers.MambaForCausalLM):  # takes positions, as many do, and does nothing with them
        def forward(self, input_ids, position_ids=None, **options):
            return super().forward(input_ids, **options)

    with pytest.raises(UserError, match="--packing needs a model whose attention stays within documents"):
        require_attention_within_documents(Positionless(config).eval())
