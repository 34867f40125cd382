"""Where models come from, and what is said when they cannot be had."""

import pytest
import torch

from edkm_cli import models
from edkm_cli.config import UserError
from helpers import tiny_llama


def test_aliases_resolve_to_the_hub_or_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path))
    assert models.resolve("llama-7b").location == "huggyllama/llama-7b"
    smol = models.resolve("smollm2-135m")
    assert smol.path == tmp_path / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert models.resolve("owner/name").is_local is False


def test_every_alias_knows_its_architecture():
    from transformers import AutoConfig

    for name, entry in models.aliases().items():
        assert AutoConfig.for_model(**entry["architecture"]).num_hidden_layers > 0, name


@pytest.mark.parametrize("name", ["", "gpt", "/no/such/place", "a/b/c", "no.gguf"])
def test_what_is_no_model_is_refused(name):
    with pytest.raises(UserError, match="--model"):
        models.resolve(name)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        models.resolve(str(tmp_path))


def test_a_damaged_gguf_file_gets_one_line(tmp_path):
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF and then nonsense")
    with pytest.raises(UserError, match="could not be read") as caught:
        models.load_dense(models.resolve(str(file)), dtype="float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_gives_the_dtype_asked_for_and_exact_rotary_frequencies(tmp_path, dtype):
    dense = tiny_llama()
    dense.save_pretrained(tmp_path)
    loaded = models.load_dense(models.resolve(str(tmp_path)), dtype=dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype)}
    assert torch.equal(loaded.model.rotary_emb.inv_freq, dense.model.rotary_emb.inv_freq)
    assert not loaded.training


def test_without_weights_an_alias_still_has_a_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path))
    assert models.load_config(models.resolve("smollm2-135m")).hidden_size == 576
    assert models.load_config(models.resolve("llama-7b")).num_hidden_layers == 32
    with pytest.raises(UserError, match=r"get_smollm2\.sh"):
        models.load_dense(models.resolve("smollm2-135m"), dtype="float32")
