"""Grids of other engines: what is trained is what they execute, bit by bit."""

import json

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from edkm_cli import hf
from edkm_cli.clustering import Grid
from edkm_cli.config import build_config
from edkm_cli.errors import UserError
from edkm_cli.export.command import export_model
from edkm_cli.export.formats import gguf, gguf_model
from edkm_cli.export.formats.options import Options
from edkm_cli.export.ownership import foreign
from edkm_cli.export.source import Compressed
from edkm_cli.granularity import PALETTES, Granularity
from edkm_cli.nn.clustered import hold
from edkm_cli.targets import TARGETS
from families import family
from helpers import PALETTED, byte_tokenizer, cluster, export, paletted, refused, run, tiny_llama


def weight(rows=48, columns=64, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return 0.05 * torch.randn(rows, columns, generator=generator), torch.rand(rows, columns, generator=generator)


@pytest.mark.parametrize("palette", PALETTED)
def test_the_start_is_nearly_the_best_of_a_fine_search(palette):
    w, importance = weight(rows=6, columns=32)
    dtype, bits = PALETTED[palette]
    grid = Grid(palette, bits, dtype, 2.0**-8 if palette == "e2m1" else None)
    start = grid.start(w, granularity=Granularity.parse("block:1x32"), importance=importance)

    def error(row, parameters):
        table = grid.tables(parameters[None])[0]
        return float((importance[row] * (table[:, None] - w[row]).abs().amin(0).square()).sum())

    found = least = 0.0
    for row in range(6):
        scale = start[row] * torch.linspace(0.6, 1.6, 41)[:, None]
        shifts = torch.linspace(-0.02, 0.02, 21) if palette == "affine" else torch.zeros(1)
        tried = [s + torch.tensor([0.0, shift])[: len(s)] for s in scale for shift in shifts]
        found, least = found + error(row, start[row]), least + min(error(row, one) for one in tried)
    assert found <= 1.15 * least


@pytest.mark.parametrize("palette", PALETTED)
def test_a_gradient_of_scale_and_offset_is_that_of_the_table_times_the_template(palette):
    dtype, bits = PALETTED[palette]
    grid = Grid(palette, bits, dtype)
    w, _ = weight()
    parameters = grid.start(w, granularity=Granularity.parse("block:1x32")).requires_grad_(True)
    upstream = torch.randn(len(parameters), 2**bits, generator=torch.Generator().manual_seed(1))
    (grid.tables(parameters) * upstream).sum().backward()
    torch.testing.assert_close(parameters.grad, upstream @ grid.basis().t())


@pytest.mark.parametrize("palette", PALETTED)
def test_tables_are_a_function_of_what_is_stored(palette):
    dtype, bits = PALETTED[palette]
    grid = Grid(palette, bits, dtype)
    w, _ = weight()
    parameters = grid.start(w, granularity=Granularity.parse("block:1x32"))
    scale, offset = grid.stored(parameters)
    factor = grid.factor(parameters)
    stored = scale if factor is None else scale / factor
    assert torch.equal(stored.to(getattr(torch, dtype)).float(), stored)
    assert torch.equal(grid.of_stored(scale, offset), grid.tables(parameters))
    assert torch.equal(grid.tables(grid.parameters(scale, offset)), grid.tables(parameters))


@pytest.mark.parametrize("palette", PALETTED)
def test_a_checkpoint_of_a_palette_is_the_model_that_trains(palette, ids, tmp_path):
    directory, model = paletted(tmp_path, palette)
    hold(model)
    loaded = hf.load(directory, dtype=torch.float32)
    source = Compressed(directory)
    name = "model.layers.1.mlp.down_proj"
    held = model.get_submodule(name)
    assert torch.equal(loaded.get_submodule(name).dequantize(), held.hard_weight())
    assert torch.equal(source.dense(f"{name}.weight"), held.hard_weight())
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-3)
    stored = load_file(directory / "model.safetensors")
    assert f"{name}.lut" not in stored
    assert stored[f"{name}.scales"].shape == (64, 4)
    size = sum(tensor.numel() * tensor.itemsize for key, tensor in stored.items() if key.startswith(f"{name}.")) * 8
    rest = 32 * (palette == "e2m1") + 16 * 64  # the factor, and the bias's 16 bits
    assert size - rest <= source.spec.linear_bits(64, 128, source.spec.bits) + 16 * 64


def mlx_weight(tensors, path, bits, group):
    """By the text of MLX's documentation, number by number."""
    words = tensors[f"{path}.weight"].numpy().view(np.uint8)
    stream = np.unpackbits(words, axis=1, bitorder="little").reshape(len(words), -1, bits)
    codes = torch.from_numpy((stream * (1 << np.arange(bits))).sum(2).astype(np.float32))
    scales, biases = (tensors[f"{path}.{leaf}"].float().repeat_interleave(group, 1) for leaf in ("scales", "biases"))
    return scales * codes + biases


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_reads_what_was_trained(bits, tmp_path):
    model, spec = cluster(
        tiny_llama(hidden=64, inner=128), bits=bits, granularity="block:1x32", lut_dtype="bfloat16", palette="affine",
        mixed={"palette": "affine", "embedding_group": 32, "module_bits": {"model.layers.0.mlp.up_proj": 4}},
    )  # fmt: skip
    byte_tokenizer().save_pretrained(tmp_path / "source")
    source = Compressed(export(model, spec, tmp_path / "source"))
    export_model(source.directory, "mlx", tmp_path / "out", options=Options())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    quantization = json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]
    for tensor in source.tensors.values():
        if tensor.module:
            own = {**quantization, **quantization.get(tensor.module, {})}
            found = mlx_weight(tensors, tensor.module, own["bits"], own["group_size"])
            assert torch.equal(found, source.dense(tensor.name)), tensor.name


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_compressed_tensors_reads_what_was_trained(bits, ids, tmp_path):
    more = {"palette": "integers"}
    model, spec = cluster(
        tiny_llama(hidden=64, inner=128), bits=bits, granularity="block:1x32", lut_dtype="bfloat16", embedding_bits=16,
        mixed=more, **more,
    )  # fmt: skip
    byte_tokenizer().save_pretrained(tmp_path / "source")
    source = Compressed(export(model, spec, tmp_path / "source"))
    export_model(source.directory, f"w{bits}a16", tmp_path / "out", options=Options())
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for tensor in source.linears:
        path = tensor.module
        stream = np.unpackbits(tensors[f"{path}.weight_packed"].numpy().view(np.uint8), axis=1, bitorder="little")
        codes = (stream.reshape(len(stream), -1, bits) * (1 << np.arange(bits))).sum(2)
        scales = tensors[f"{path}.weight_scale"].float().repeat_interleave(32, 1)
        found = scales * torch.from_numpy((codes - 2 ** (bits - 1)).astype(np.float32))
        assert torch.equal(found, source.dense(tensor.name)), tensor.name
        assert tensors[f"{path}.weight_shape"].tolist() == list(tensor.shape)


def fp4_numbers(codes):
    """Of four bits: sign, two of exponent, one of mantissa."""
    exponent, mantissa = codes >> 1 & 3, (codes & 1) / 2
    return np.where(codes & 8, -1.0, 1.0) * np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1.0))


def fp4_scales(scales, form):
    """Of bytes: powers of two, of which 127 is one; or four bits of exponent about 7, three of mantissa."""
    assert not (scales == 255).any() if form == "mxfp4" else not (scales & 128).any()
    if form == "mxfp4":
        return 2.0 ** (scales.astype(np.float64) - 127)
    exponent, mantissa = (scales >> 3).astype(np.float64), (scales & 7) / 8
    return np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))


def fp4_export(name, folder):
    """(source, tensors by name, configuration) of a tiny model in a target's format: with a row of zeros, a tile below
    E4M3's smallest scales, a scale that training turned round, and matrices that engines join."""
    settings = dict(TARGETS[name].settings)
    mixed = {key: settings.pop(key) for key in ("embedding_group",) if key in settings} | {"palette": "e2m1"}
    dense = tiny_llama(bias=True, hidden=64, inner=128)
    down = dense.get_submodule("model.layers.0.mlp.down_proj").weight
    with torch.no_grad():
        down[0], down[1, :32] = 0.0, down[1, :32] * 2.0**-14
    model, spec = cluster(dense, mixed=mixed, **settings)
    if not name.endswith("mxfp4"):
        model.get_submodule("model.layers.0.mlp.down_proj").centroids.data[5:9] *= -1
    byte_tokenizer().save_pretrained(folder / "source")
    source = Compressed(export(model, spec, folder / "source"))
    assert export_model(source.directory, name, folder / "out", options=Options())["format"] == name
    assert not foreign(folder / "out")
    config = json.loads((folder / "out" / "config.json").read_text())
    return source, load_file(folder / "out" / "model.safetensors"), config


FP4 = ["mxfp4", "nvfp4", "mlx:mxfp4", "mlx:nvfp4"]


@pytest.mark.parametrize("name", FP4)
def test_fp4_is_what_was_trained_and_has_no_minus_zero(name, tmp_path):
    source, tensors, config = fp4_export(name, tmp_path)
    engine, _, form = name.rpartition(":")
    weight, scale = ("weight", "scales") if engine else ("weight_packed", "weight_scale")
    width = TARGETS[name].settings["granularity"].rpartition("x")[2]
    if engine:
        assert (config["quantization"]["mode"], config["quantization"]["group_size"]) == (form, int(width))
        assert config["quantization"]["model.embed_tokens"] == {"bits": 8, "group_size": 64, "mode": "affine"}
        assert torch.equal(mlx_weight(tensors, "model.embed_tokens", 8, 64), source.dense("model.embed_tokens.weight"))
    else:
        assert config["quantization_config"]["format"] == f"{form}-pack-quantized"
    for tensor in source.linears:
        codes = tensors[f"{tensor.module}.{weight}"].numpy().view(np.uint8)
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1).astype(np.int64)
        assert not (codes == 8).any()
        scales = fp4_scales(tensors[f"{tensor.module}.{scale}"].view(torch.uint8).numpy(), form)
        divisor = tensors.get(f"{tensor.module}.weight_global_scale", torch.ones(1))
        assert divisor.tolist() == [256.0 if name == "nvfp4" else 1.0]
        read = fp4_numbers(codes) * scales.repeat(int(width), 1) / divisor.double().numpy()
        assert torch.equal(torch.from_numpy(read).float(), source.dense(tensor.name)), tensor.name


@pytest.mark.parametrize("name", FP4[:2])
def test_the_library_itself_reads_fp4_as_it_was_trained(name, ids, tmp_path):
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    source, tensors, config = fp4_export(name, tmp_path)
    group = config["quantization_config"]["config_groups"]["group_0"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**group["weights"]))
    reader = compressors.BaseCompressor.get_value_from_registry(f"{name}-pack-quantized")
    for tensor in source.linears:
        path = tensor.module
        state = {key: tensors[f"{path}.{key}"] for key in ("weight_packed", "weight_scale", "weight_global_scale")
                 if f"{path}.{key}" in tensors}  # fmt: skip
        read = reader.decompress(state, scheme)["weight"]
        assert torch.equal(read.float(), source.dense(tensor.name)), tensor.name


@pytest.mark.parametrize("name", FP4[2:])
def test_mlx_itself_reads_fp4_as_it_was_trained(name, tmp_path):
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    source, tensors, config = fp4_export(name, tmp_path)
    layout = {key: config["quantization"][key] for key in ("group_size", "bits", "mode")}
    for tensor in source.linears:
        arrays = [mx.array(tensors[f"{tensor.module}.{leaf}"].numpy()) for leaf in ("weight", "scales")]
        read = np.array(mx.dequantize(*arrays, dtype=mx.float32, **layout))
        assert torch.equal(torch.from_numpy(read), source.dense(tensor.name)), tensor.name


def test_fp4_that_an_engine_cannot_scale_is_refused_before_any_work(tmp_path):
    for wrong, message in [
        ({"target": "mlx:nvfp4", "lut_scale": 0.5}, "tables must have scale 1, got 0.5; use --lut-scale 1"),
        ({"target": "nvfp4", "granularity": "block:1x32"}, "nvfp4 holds tables of block:1x16, got block:1x32"),
        ({"target": "mxfp4", "lut_dtype": "float8_e4m3fn"}, "mxfp4 holds tables of float8_e8m0fnu, got float8_e4m3fn"),
        ({"target": "mxfp4", "bits": 3}, "palette e2m1 has 4 bits, got 3"),
    ]:
        with pytest.raises(UserError, match=message):
            build_config(None, {"model": "m", **wrong})
    model = tiny_llama(hidden=64, inner=128)
    model.model.layers[0].mlp.up_proj.weight.data *= 8  # each matrix has a scale of its own
    directory, _ = paletted(tmp_path / "source", "e2m1", tile=16, model=model)
    for name in ("nvfp4", "compressed-tensors", "mlx"):
        message = refused("export", directory, "--to", name, "-o", tmp_path / "out")
        assert "tables must have" in message
        assert "got several; use --lut-scale" in message
    assert not (tmp_path / "out").exists()


def test_mlx_itself_reads_what_was_trained(tmp_path):
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    directory, _ = paletted(tmp_path / "source", "affine")
    export_model(directory, "mlx", tmp_path / "out", options=Options())
    tensors, source = load_file(tmp_path / "out" / "model.safetensors"), Compressed(directory)
    for tensor in source.linears:
        words, *numbers = (tensors[f"{tensor.module}.{leaf}"] for leaf in ("weight", "scales", "biases"))
        arrays = [mx.array(words.numpy()), *(mx.array(n.float().numpy()) for n in numbers)]
        read = np.array(mx.dequantize(*arrays, group_size=32, bits=3))
        assert torch.equal(torch.from_numpy(read), source.dense(tensor.name))


@pytest.mark.parametrize(
    ("kind", "palette"),
    [
        ("llama", "integers"),
        ("mistral", "iq4_nl"),
        ("qwen2", "integers"),
        ("qwen3", "iq4_nl"),
        ("gemma3_text", "integers"),
    ],
)
def test_llama_cpp_and_transformers_read_what_was_trained(kind, palette, ids, tmp_path):
    from transformers import AutoModelForCausalLM

    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": {"qwen3": 128, "gemma3_text": 256}.get(kind, 16),  # what Gemma's scale of attention belongs to
        "num_attention_heads": 4,
    }
    directory, _ = paletted(tmp_path / "source", palette, model=family(kind, torch.float32, **sizes))
    result = export_model(directory, "gguf", tmp_path / "out", options=Options())  # decoded by gguf, and compared
    assert result["tensors"] == len(Compressed(directory).tensors)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32)
    ours = hf.load(directory, dtype=torch.float32)
    ids = ids % ours.config.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, ours(ids).logits, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", [name for name in TARGETS if name.startswith("gguf:")])
def test_every_type_of_llama_cpp_is_what_trains(name, tmp_path):
    settings = dict(TARGETS[name].settings)
    mixed = {"palette": settings["palette"], "embedding_group": settings.pop("embedding_group")}
    dense = tiny_llama(hidden=256, inner=512)
    first = dense.get_submodule("model.layers.0.mlp.down_proj").weight
    with torch.no_grad():
        first[0, :256], first[1], first[2] = 0.0, first[1].abs(), -first[2].abs()  # no scale, and offsets of one sign
        first[3, :256] *= 1e-4  # units below float16's normal numbers
    model, spec = cluster(dense, mixed=mixed, **settings)
    byte_tokenizer().save_pretrained(tmp_path / "source")
    directory = export(model, spec, tmp_path / "source")
    hold(model)
    result = export_model(directory, name, tmp_path / "out", options=Options())
    assert result["largest_difference"] == 0
    assert not foreign(tmp_path / "out")
    kinds = {tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert name.removeprefix("gguf:").upper() in kinds
    read = dict(gguf.read(tmp_path / "out", Options()))  # by the gguf package
    path = "model.layers.0.mlp.down_proj"
    assert torch.equal(read[f"{path}.weight"], model.get_submodule(path).hard_weight())
    loaded = hf.load(directory, dtype=torch.float32)
    assert torch.equal(read[f"{path}.weight"], loaded.get_submodule(path).dequantize())


def test_a_whole_run_makes_what_its_target_holds(model_directory, text_file, tmp_path):
    arguments = ["compress", "--model", model_directory, "--data", text_file, "--steps", 2, "--sequence-length", 32,
                 "--context", 32, "--eval-windows", 1, "--calibration-tokens", 64, "--start-tokens", 256]  # fmt: skip
    assert "block:1x16" in refused(*arguments, "--target", "gguf:q4_0", "--granularity", "block:1x16", "-o", "x")
    assert "integers" in refused(*arguments, "--target", "gguf:q4_0", "--palette", "free", "-o", "x")
    assert "rows of 24 are no multiple of 32" in refused(*arguments, "--target", "gguf:q4_0", "-o", "x")
    wider = tmp_path / "wider"
    tiny_llama(hidden=64, inner=72).save_pretrained(wider)
    byte_tokenizer().save_pretrained(wider)
    arguments[2] = wider
    for target, flag, number, why in (  # what an export would refuse is refused before training
        ("mlx:4", "--embedding-bits", 7, "has 7 bits in groups of 64"),
        ("mlx:4", "--embedding-group", 16, "has 8 bits in groups of 16"),
        ("gguf:q4_0", "--embedding-group", 16, "but 16 columns of model.embed_tokens share a scale"),
    ):
        for dry in ((), ("--dry-run",)):
            assert why in refused(*arguments, "--target", target, flag, number, "-o", tmp_path / "none", *dry)
    status, out, err = run(*arguments, "--target", "gguf:q4_0", "-o", tmp_path / "c", "--dry-run")
    assert status == 0, err
    assert "rows of 72 are no multiple of 32: gguf:q4_0 stores it as F16" in out
    status, _, err = run(*arguments, "--target", "gguf:q4_0", "-o", tmp_path / "c")
    assert status == 0, err
    status, _, err = run("report", tmp_path / "c")
    assert status == 0, err
    status, _, err = run("export", tmp_path / "c", "--to", "gguf:q4_0", "-o", tmp_path / "g")
    assert status == 0, err
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "g" / "model.gguf").tensors}
    assert kinds["blk.1.ffn_down.weight"] == "F16"
    assert kinds["blk.1.attn_q.weight"] == "Q4_0"
    assert kinds["token_embd.weight"] == "Q8_0"


def test_an_added_token_behind_the_embedding_is_left_out():
    added = [{"id": number, "content": f"<{number}>", "special": True} for number in (1, 2)]
    assert gguf_model._tokens({"vocab": {"a": 0}}, added, 2) == (["a", "<1>"], [1, 3])


def test_super_blocks_are_trained_where_rows_are_wide_enough(text_file, tmp_path):
    tiny_llama(hidden=64, inner=256).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    arguments = ["compress", "--model", tmp_path / "model", "--data", text_file, "--steps", 2, "--sequence-length", 32,
                 "--context", 32, "--eval-windows", 1, "--calibration-tokens", 64, "--start-tokens", 256,
                 "--target", "gguf:q2_k", "-o", tmp_path / "c"]  # fmt: skip
    status, out, err = run(*arguments, "--dry-run")
    assert status == 0, err
    assert "rows of 64 are no multiple of 256: gguf:q2_k stores it as F16" in out
    status, _, err = run(*arguments)
    assert status == 0, err
    result = export_model(tmp_path / "c", "gguf", tmp_path / "g", options=Options())
    kinds = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(tmp_path / "g" / "model.gguf").tensors}
    assert kinds["blk.1.ffn_down.weight"] == "Q2_K"
    assert kinds["blk.1.ffn_up.weight"] == "F16"
    assert result["type"] == "Q2_K"
    assert "int8 is for affine with 2 bits in block:1x16" in refused(*arguments, "--lut-dtype", "int8", "--bits", 7)


def test_each_target_fills_its_settings():
    for name, target in TARGETS.items():
        settings = {"bits", "granularity", "lut_dtype", "lut_scale", "palette", "embedding_group", "embedding_bits"}
        assert set(target.settings) <= settings
        assert target.settings.get("palette", "free") in PALETTES, name


def test_bits_that_mlx_lacks_are_refused_before_any_work():
    assert build_config(None, {"model": "m", "target": "mlx:4", "bits": 3.5}).palette == "affine"
    with pytest.raises(UserError, match="mixes 2 to 6 bits"):
        build_config(None, {"model": "m", "target": "mlx:2", "bits": 2.5})
    with pytest.raises(UserError, match="for mode straight-through"):
        build_config(None, {"model": "m", "palette": "affine", "granularity": "block:1x32", "mode": "soft"})


def test_a_palette_that_the_format_lacks_is_refused(tmp_path):
    directory, _ = paletted(tmp_path / "source", "affine")
    with pytest.raises(UserError, match="integers"):
        export_model(directory, "gguf:q4_0", tmp_path / "out", options=Options())
    with pytest.raises(UserError, match="squeezellm holds free tables"):
        export_model(directory, "squeezellm", tmp_path / "out", options=Options())
