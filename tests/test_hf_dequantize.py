"""`--dequantize`: a checkpoint that is quantized already is decoded to the numbers it stands for, or refused."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.export.command import export_model
from edkm_cli.export.formats.options import Options
from edkm_cli.hf import load, load_source
from edkm_cli.initialize.sharded import from_fp8, from_mxfp4, open_layers
from edkm_cli.models import load_config, resolve
from edkm_cli.preflight import plan_run
from families import family
from helpers import byte_tokenizer, cluster, compress_arguments, export, refused, run, settings, tiny_llama

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


def mxfp4(directory):
    """A gpt-oss whose experts are random MXFP4, stored as OpenAI does; returns what they stand for by name."""
    model = family("gpt_oss", intermediate_size=64)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    tensors, decoded = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, columns, rows = tensors.pop(name).shape  # of x @ matrix; blocks lie along the columns of its transpose
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(121, 125, blocks.shape[:-1], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded[name] = torch.zeros(count, columns, rows)
        for expert, row, block in itertools.product(range(count), range(rows), range(columns // 32)):
            bits = "".join(f"{byte & 15:04b}{byte >> 4:04b}" for byte in blocks[expert, row, block].tolist())
            for place in range(32):
                decoded[name][expert, 32 * block + place, row] = e2m1(bits[4 * place :][:4]) * 2.0 ** (
                    int(scales[expert, row, block]) - 127
                )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    quantized(directory, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "lm_head"])
    return decoded


def e2m1(bits):
    """A sign, two bits of exponent with a bias of one, one of mantissa."""
    sign, exponent, mantissa = int(bits[0]), int(bits[1:3], 2), int(bits[3])
    return (-1) ** sign * (mantissa / 2 if not exponent else (1 + mantissa / 2) * 2 ** (exponent - 1))


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_experts_in_mxfp4_are_decoded_to_the_bit(dtype, tmp_path):
    decoded = mxfp4(tmp_path)
    dense = load_source(resolve(str(tmp_path)), dequantize=True, dtype=dtype)
    split = dict(dense.named_parameters())
    for name, experts in decoded.items():
        for number, matrix in enumerate(experts):
            assert torch.equal(split[f"{name}.{number}.weight"].float(), matrix.T)
    ids = torch.randint(0, 256, (2, 9))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)  # on a CPU it decodes
    limit = 1e-5 if dtype == "float32" else 0.05
    assert (dense(ids).logits - theirs(ids).logits).norm() <= limit * theirs(ids).logits.norm()
    whole = load_source(replace(resolve(str(tmp_path)), splits=False), dequantize=True, dtype=dtype)
    assert all(torch.equal(whole.get_parameter(name).float(), matrix) for name, matrix in decoded.items())


def test_a_block_at_the_edge_may_be_smaller_and_scales_of_other_blocks_are_refused():
    weight, scale = torch.ones(5, 6).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    decoded = from_fp8("w", weight, scale, block=[4, 4])
    assert decoded.tolist() == [[1.0] * 4 + [2.0] * 2] * 4 + [[3.0] * 4 + [4.0] * 2]
    assert torch.equal(from_fp8("w", weight, torch.tensor(0.5), block=None), torch.full((5, 6), 0.5))
    for block in ([2, 4], None):
        with pytest.raises(UserError, match="w must have a scale for each block"):
            from_fp8("w", weight, scale, block=block)
    for block in ([4], [0, 4], ["4", "4"], [4.0, 4.0], 4, {"a": 1}):
        with pytest.raises(UserError, match="weight_block_size must be two positive numbers"):
            from_fp8("w", weight, scale, block=block)
    blocks, scales = torch.zeros(3, 2, 16, dtype=torch.uint8), torch.zeros(3, 1, dtype=torch.uint8)
    with pytest.raises(UserError, match="w must have a byte of scale for each block"):
        from_mxfp4("w", blocks, scales)


@pytest.mark.parametrize("make", [fp8, mxfp4])
def test_quantized_files_are_decoded_layer_by_layer_as_whole(make, text_file, tmp_path):
    make(tmp_path)
    layers = open_layers(resolve(str(tmp_path)), dtype=torch.float32, device="cpu", dequantize=True)
    assert layers.streamed
    whole = load_source(resolve(str(tmp_path)), dequantize=True, dtype="float32")
    for path in layers.paths:
        with layers.whole(path) as layer:
            wanted = whole.get_submodule(path).state_dict()
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in layer.state_dict().items())
    start = settings(tmp_path, text_file, tmp_path / "out", dequantize=True)
    plan = plan_run(replace(start, start="reconstructed", steps=0), World())
    assert plan.streams
    assert plan.parameters == sum(parameter.numel() for parameter in whole.parameters())  # not those of the files


@pytest.mark.parametrize("make", [own, fp8])
def test_a_decoded_model_is_compressed_like_any_other(text_file, tmp_path, make):
    make(tmp_path / "in")
    more = {"steps": 1, "start": "kmeans", "importance": "none", "save_every": 0}
    with pytest.raises(UserError, match="--dequantize"):
        compress(settings(tmp_path / "in", text_file, tmp_path / "out", **more))
    report = compress(settings(tmp_path / "in", text_file, tmp_path / "out", dequantize=True, bits=4, **more))
    assert report["perplexity"]["exported"] > 1
    assert load(tmp_path / "out").config.quantization_config.spec.bits == 4


def test_gpt_oss_as_it_comes_is_compressed(text_file, tmp_path):
    mxfp4(tmp_path / "in")
    asked = compress_arguments(tmp_path / "in", text_file, tmp_path / "out")
    asked[asked.index("--steps") + 1] = 0
    line = refused(*asked)
    assert "is (mxfp4); give the model it was made from, or --dequantize, to start from what is left of it" in line
    status, text, err = run(*asked, "--dequantize")
    assert status == 0, err
    assert "layer by layer" in text + err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert sum(".experts." in swap["name"] for swap in report["swapped"]) == 2 * 2 * 4
    assert load(tmp_path / "out").config.quantization_config.spec.split_experts


def test_what_cannot_be_decoded_here_is_refused_with_the_remedy(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    quantized(tmp_path, quant_method="gptq", bits=4)
    with pytest.raises(UserError, match=r"is \(gptq\); give the model it was made from.*which --dequantize cannot"):
        load_config(resolve(str(tmp_path)), dequantize=True)


def test_a_model_that_is_divided_is_not_decoded(tmp_path):
    own(tmp_path)
    with pytest.raises(UserError, match="--sharding full"):
        plan_run(CompressConfig(model=str(tmp_path), dequantize=True), World(size=2, sharded=True))


def test_what_is_computed_stays_as_it_is_where_weights_are_rounded(tmp_path):
    own(tmp_path)
    model = load_source(resolve(str(tmp_path)), dequantize=True, dtype="bfloat16")
    loaded = load(tmp_path, dtype=torch.float32).dequantize()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16} == {model.config.dtype}
    assert torch.equal(model.model.rotary_emb.inv_freq, loaded.model.rotary_emb.inv_freq)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name).bfloat16())  # rounded once


def test_what_transformers_keeps_in_float32_is_decoded_and_exported_so(tmp_path):
    model, name = family("deepseek_v3"), "model.layers.1.mlp.gate.e_score_correction_bias"
    corrections = 4 + torch.arange(4) / 100  # bfloat16 has the first and the third alone
    model.get_submodule("model.layers.1.mlp.gate").register_buffer("e_score_correction_bias", corrections)
    byte_tokenizer().save_pretrained(tmp_path / "packed")
    packed = export(*cluster(model), tmp_path / "packed")
    export_model(packed, "dense", tmp_path / "dense", options=Options(dtype="bfloat16"))
    written = load_file(tmp_path / "dense" / "model.safetensors")
    decoded = load_source(resolve(str(packed)), dequantize=True, dtype="bfloat16")
    for found in (written[name], decoded.get_buffer(name)):
        assert torch.equal(found, corrections)
    assert written["model.norm.weight"].dtype == decoded.model.norm.weight.dtype == torch.bfloat16


def test_layers_are_not_divided_by_transformers(tmp_path):
    own(tmp_path)
    config = load_config(resolve(str(tmp_path)), may_be_quantized=True)
    config.distributed_config = SimpleNamespace(tp_size=2)
    with pytest.raises(UserError, match="transformers divides no packed matrices"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
