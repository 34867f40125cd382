"""Text that a model writes: sampled from its own distribution, the same for a seed, written once."""

import pytest
import torch

from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.precision import bfloat16_linears, bfloat16_products
from edkm_cli.preflight import Setting, plan_run
from edkm_cli.self_text import SEQUENCE_TOKENS, first_tokens, sample, self_text, store_of, write_text
from helpers import byte_tokenizer, tiny_llama


def test_tokens_are_drawn_from_the_models_distribution():
    model = tiny_llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # far from uniform
    text = write_text(model, [3], sequences=2000, length=2, seed=0)
    wanted = model(input_ids=torch.tensor([[3]])).logits[0, 0].softmax(0)
    found = torch.bincount(text[:, 1], minlength=257) / 2000
    assert (found - wanted).abs().max() < 0.04
    assert wanted.max() > 0.05


def test_the_cache_of_keys_and_values_changes_nothing():
    model = tiny_llama()
    text = write_text(model, [1, 2], sequences=3, length=20, seed=5)
    generator = torch.Generator().manual_seed(5)
    ids = torch.tensor([[1], [2], [1]])
    with torch.no_grad(), bfloat16_products(), bfloat16_linears(model):
        while ids.shape[1] < 20:
            cumulative = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1).double().cumsum(-1)
            drawn = torch.rand(3, 1, generator=generator) * cumulative[:, -1:]
            ids = torch.cat((ids, (cumulative > drawn).int().argmax(-1, keepdim=True)), 1)
    assert (text == ids).float().mean() > 0.9  # a rounding may turn one draw, and all that follow it in a row


def test_what_has_no_probability_is_never_drawn():
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf, 0.0, -torch.inf]]).repeat(4000, 1)
    counts = torch.bincount(sample(logits, torch.Generator().manual_seed(0))[:, 0], minlength=5)
    assert counts[[1, 2, 4]].sum() == 0
    assert abs(int(counts[0]) - 2000) < 200


def test_a_seed_gives_one_text_and_training_mode_is_given_back():
    model = tiny_llama().train()
    first, again, other = (write_text(model, [0], sequences=2, length=8, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert model.training


def test_what_was_written_is_read_the_second_time(tmp_path, monkeypatch):
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path))
    model, tokenizer = tiny_llama(), byte_tokenizer()
    options = {"tokens": SEQUENCE_TOKENS + 1, "seed": 0, "weights_sha256": "a"}
    first = self_text(model, tokenizer, **options)
    assert first.shape == (2, SEQUENCE_TOKENS)
    assert torch.equal(self_text(None, tokenizer, **options), first)  # no model needed
    (file,) = (tmp_path / "self-text").iterdir()
    file.write_bytes(b"damaged")
    assert torch.equal(self_text(model, tokenizer, **options), first)
    monkeypatch.setenv("EDKM_CACHE", "/proc/nowhere")
    assert torch.equal(self_text(model, tokenizer, **options), first)


def test_a_store_of_it_has_a_document_for_each_sequence():
    text = torch.arange(12).view(3, 4)
    store = store_of(text)
    assert (len(store), store.ends.tolist(), store.counts.trained) == (12, [4, 8, 12], 12)
    assert store.ids(4, 8).tolist() == [4, 5, 6, 7]


def test_first_tokens_are_the_tokenizers_own():
    tokenizer = byte_tokenizer()
    found = first_tokens(tokenizer)
    assert found
    assert set(found) <= {tokenizer.bos_token_id, tokenizer.eos_token_id}


def test_a_run_trains_on_what_the_model_wrote(model_directory, tmp_path, monkeypatch):
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path / "cache"))
    config = CompressConfig(
        model=str(model_directory),
        data=("self",),
        output=str(tmp_path / "out"),
        steps=1,
        sequence_length=32,
        context=32,
        eval_windows=1,
        calibration_tokens=64,
        start_tokens=256,
        save_every=0,
    )
    result = compress(config)
    assert result["perplexity"]["exported"] > 0
    assert list((tmp_path / "cache" / "self-text").iterdir())


def test_a_sharded_model_cannot_write(model_directory):
    with pytest.raises(UserError, match="--data self"):
        plan_run(CompressConfig(model=str(model_directory), data=("self",)), Setting(processes=2, sharded=True))
