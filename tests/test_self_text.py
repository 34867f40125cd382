"""Text that a model writes: sampled from its own distribution, the same for a seed, written once."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from edkm_cli import self_text as self_text_module
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.data import store_of
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.precision import bfloat16_linears
from edkm_cli.preflight import plan_run
from edkm_cli.self_text import (
    SEQUENCE_TOKENS,
    first_tokens,
    keep_text,
    kept_text,
    rehearse_text,
    sample,
    self_text,
    write_text,
)
from families import family
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
    draws = torch.rand(3, 20, generator=torch.Generator().manual_seed(5))
    ids = torch.tensor([[1], [2], [1]])
    with torch.no_grad(), bfloat16_linears(model):
        while ids.shape[1] < 20:
            cumulative = model(input_ids=ids, use_cache=False).logits[:, -1].softmax(-1).double().cumsum(-1)
            drawn = draws[:, ids.shape[1], None] * cumulative[:, -1:]
            ids = torch.cat((ids, (cumulative > drawn).int().argmax(-1, keepdim=True)), 1)
    assert (text == ids).float().mean() > 0.9  # a rounding may turn one draw, and all that follow it in a row


@pytest.mark.parametrize("kernel", [True, False])
def test_a_cache_in_bfloat16_beside_a_float32_model_changes_logits_by_roundings(kernel, monkeypatch):
    model, ids = tiny_llama(head_dim=32), torch.randint(0, 257, (40, 12))
    if not kernel:
        monkeypatch.setattr(self_text_module, "attend", lambda *_: None)
    plain = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", partial(self_text_module._attention, plain))
    cache = self_text_module._cache(12, torch.bfloat16)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        steps = [model(input_ids=one, past_key_values=cache).logits for one in ids.split(1, 1)]
    error = (torch.cat(steps, 1) - whole).std() / whole.std()
    assert cache.layers[1].keys.dtype == torch.bfloat16
    assert 0 < error < 0.01


def test_the_cache_is_in_bfloat16_where_the_kernel_reads_it(monkeypatch):
    monkeypatch.setattr(self_text_module, "multiplies_bfloat16", lambda device: True)
    monkeypatch.setattr(self_text_module, "library", lambda: object())
    wide = tiny_llama(head_dim=32)
    assert self_text_module.cache_dtype(wide, "cpu") == torch.bfloat16
    assert self_text_module.cache_dtype(wide, "cuda") == torch.float32
    assert self_text_module.cache_dtype(tiny_llama(), "cpu") == torch.float32
    assert self_text_module.cache_dtype(family("minicpm3", qk_rope_head_dim=32), "cpu") == torch.float32
    assert self_text_module.cache_dtype(family("falcon_h1"), "cpu") is None
    theirs = type("Theirs", (type(wide),), {"__module__": "files_of_a_model"})(wide.config)
    assert self_text_module.cache_dtype(theirs, "cpu") == torch.float32
    wide.set_attn_implementation("eager")
    assert self_text_module.cache_dtype(wide, "cpu") == torch.float32


def test_what_a_sequence_draws_does_not_depend_on_those_beside_it(monkeypatch):
    model = tiny_llama()
    together = write_text(model, [1, 2], sequences=5, length=20, seed=5)
    monkeypatch.setattr(self_text_module, "_CACHE_BYTES", 0)
    assert self_text_module.at_once(model, 4000, torch.float32) == 1
    monkeypatch.setattr(self_text_module, "at_once", lambda *_: 2)
    assert (together == write_text(model, [1, 2], sequences=5, length=20, seed=5)).float().mean() > 0.9


def test_what_has_no_probability_is_never_drawn():
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf, 0.0, -torch.inf]]).repeat(4000, 1)
    counts = torch.bincount(
        sample(logits, torch.rand(len(logits), 1, generator=torch.Generator().manual_seed(0)))[:, 0], minlength=5
    )
    assert counts[[1, 2, 4]].sum() == 0
    assert abs(int(counts[0]) - 2000) < 200


def test_logits_that_are_no_numbers_are_told_at_the_first_token():
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[7] = torch.inf
    with pytest.raises(UserError, match="logits that are numbers"):
        write_text(model, [0], sequences=2, length=8, seed=0)


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
    assert first.shape == (4, 128)  # the model's positions, fewer than SEQUENCE_TOKENS
    other = tiny_llama(seed=1)
    assert torch.equal(self_text(other, tokenizer, **options), first)  # the weights are not asked
    (file,) = (tmp_path / "self-text").iterdir()
    file.write_bytes(b"damaged")
    assert torch.equal(self_text(model, tokenizer, **options), first)
    monkeypatch.setenv("EDKM_CACHE", "/proc/nowhere")
    assert torch.equal(self_text(model, tokenizer, **options), first)


def test_a_store_of_it_has_a_document_for_each_sequence():
    text = torch.arange(12).view(3, 4)
    store = store_of(text.numpy())
    assert (len(store), store.ends.tolist(), store.counts.trained) == (12, [4, 8, 12], 12)
    assert store.ids(4, 8).tolist() == [4, 5, 6, 7]


def test_a_model_of_the_same_weights_and_another_configuration_writes_another_text(tmp_path, monkeypatch):
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path))
    options = {"tokens": 256, "seed": 0, "weights_sha256": "a"}
    model, other = tiny_llama(), tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 20.0})
    first, second = (self_text(one, byte_tokenizer(), **options) for one in (model, other))
    assert not torch.equal(first, second)
    assert len(list((tmp_path / "self-text").iterdir())) == 2


def test_first_tokens_are_the_tokenizers_own_as_far_as_the_embedding_has_them():
    tokenizer = byte_tokenizer()
    assert first_tokens(tokenizer, 257) == [tokenizer.eos_token_id]
    line_break = tokenizer.encode("\n")[0]
    assert first_tokens(tokenizer, 256) == [line_break]  # an added token beyond the embedding
    assert first_tokens(tokenizer, 3) == [0]
    tokenizer.bos_token = "A"  # Gemma, say, writes nonsense behind what ends a text
    assert first_tokens(tokenizer, 257) == [tokenizer.bos_token_id]
    tokenizer.bos_token = tokenizer.eos_token = None
    assert first_tokens(tokenizer, 257) == [line_break]


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "minicpm3"])
def test_transformers_own_generate_writes_the_same_text_as_our_cache(model_type, monkeypatch):
    model = family(model_type)
    model.generation_config.update(repetition_penalty=3.0, return_dict_in_generate=True, eos_token_id=[1, 2, 3])
    ours = write_text(model, [3, 4], sequences=3, length=20, seed=0)
    monkeypatch.setattr(self_text_module, "cache_dtype", lambda *_: None)
    assert torch.equal(write_text(model, [3, 4], sequences=3, length=20, seed=0), ours)
    assert model.generation_config.repetition_penalty == 3.0


def test_writing_is_rehearsed_without_memory():
    with torch.device("meta"):
        rehearse_text(tiny_llama().to("meta"), tokens=4000, device="cpu")
        rehearse_text(family("falcon_h1").to("meta"), tokens=100, device="cpu")


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
    with monkeypatch.context() as patch:
        patch.setattr(self_text_module, "write_text", None)  # refused before it is called
        with pytest.raises(UserError, match="--long-records drop"):
            compress(replace(config, long_records="drop"))
    result = compress(config)
    assert result["perplexity"]["exported"] > 0
    assert list((tmp_path / "cache" / "self-text").iterdir())


def test_a_sharded_model_cannot_write(model_directory):
    with pytest.raises(UserError, match="--data self"):
        plan_run(CompressConfig(model=str(model_directory), data=("self",)), World(size=2, sharded=True))


def test_a_kept_text_that_is_damaged_is_none(tmp_path):
    text = torch.arange(960).view(2, 480)
    keep_text(tmp_path / "text", text)
    assert torch.equal(kept_text(tmp_path / "text"), text)
    data = bytearray((tmp_path / "text").read_bytes())
    data[-8] ^= 1  # another token, which is as good as any
    (tmp_path / "text").write_bytes(data)
    assert kept_text(tmp_path / "text") is None
    save_file({"tokens": text}, tmp_path / "text")  # as earlier versions kept it
    assert torch.equal(kept_text(tmp_path / "text"), text)
