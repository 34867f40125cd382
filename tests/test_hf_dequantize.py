"""`--dequantize`: a checkpoint that is quantized already is decoded to the numbers it stands for, or refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.hf import load, load_source
from edkm_cli.models import load_config, resolve
from edkm_cli.preflight import plan_run
from helpers import byte_tokenizer, cluster, export, settings, tiny_llama

BLOCK = 4


def own(directory):
    model, spec = cluster(tiny_llama())
    byte_tokenizer().save_pretrained(directory)
    return export(model, spec, directory)


def fp8(directory):
    """A LLaMA whose projections are float8 with a scale for each 4 x 4 block; returns the decoded weights by name."""
    tiny_llama().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    tensors, decoded = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name]:
        blocks = tensors[name].unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))  # (rows, 4, columns, 4)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        tensors[name] = (blocks / scale).to(torch.float8_e4m3fn)
        decoded[name] = (tensors[name].float() * scale).flatten(0, 1).flatten(1, 2)
        tensors[name] = tensors[name].flatten(0, 1).flatten(1, 2)
        tensors[name + "_scale_inv"] = scale[:, 0, :, 0].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    quantized(directory, quant_method="fp8", weight_block_size=[BLOCK, BLOCK], activation_scheme="dynamic")
    return decoded


def quantized(directory, **values):
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = values
    (directory / "config.json").write_text(json.dumps(config))


def test_our_own_checkpoint_is_decoded_to_the_model_it_holds(tmp_path, ids):
    own(tmp_path / "own")
    dense = load_source(resolve(str(tmp_path / "own")), dequantize=True, dtype="float32")
    packed = load(tmp_path / "own", dtype=torch.float32)
    torch.testing.assert_close(dense(ids).logits, packed(ids).logits)
    assert all(type(module).__module__.startswith(("torch", "transformers")) for module in dense.modules())
    assert not hasattr(dense.config, "quantization_config")


def test_fp8_in_blocks_is_decoded_with_its_scales(tmp_path):
    decoded = fp8(tmp_path)
    dense = load_source(resolve(str(tmp_path)), dequantize=True, dtype="float32")
    found = dict(dense.named_parameters())
    for name, wanted in decoded.items():
        torch.testing.assert_close(found[name].detach(), wanted, rtol=1e-6, atol=1e-7)
    assert getattr(dense.config, "quantization_config", None) is None


@pytest.mark.parametrize("make", [own, fp8])
def test_a_decoded_model_is_compressed_like_any_other(text_file, tmp_path, make):
    make(tmp_path / "in")
    more = {"steps": 1, "start": "kmeans", "importance": "none", "save_every": 0}
    with pytest.raises(UserError, match="--dequantize"):
        compress(settings(tmp_path / "in", text_file, tmp_path / "out", **more))
    report = compress(settings(tmp_path / "in", text_file, tmp_path / "out", dequantize=True, bits=4, **more))
    assert report["perplexity"]["exported"] > 1
    assert load(tmp_path / "out").config.quantization_config.spec.bits == 4


def test_what_cannot_be_decoded_here_is_refused_with_the_remedy(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    quantized(tmp_path, quant_method="gptq", bits=4)
    with pytest.raises(UserError, match=r"is \(gptq\); give the model it was made from.*which --dequantize cannot"):
        load_config(resolve(str(tmp_path)), dequantize=True)


def test_a_model_that_is_divided_is_not_decoded(tmp_path):
    own(tmp_path)
    with pytest.raises(UserError, match="--sharding full"):
        plan_run(CompressConfig(model=str(tmp_path), dequantize=True), World(size=2, sharded=True))
