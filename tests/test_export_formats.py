"""Every format of `edkm export`: what it holds is the source, and what is damaged does not pass."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from edkm_cli import hf
from edkm_cli.clustering import lookup
from edkm_cli.errors import UserError
from edkm_cli.export.command import export_model, require_parity, require_same_perplexity
from edkm_cli.export.formats import any_precision, dense, find, lut_b
from edkm_cli.export.formats.folder import codes_in
from edkm_cli.export.formats.options import Options
from edkm_cli.export.ownership import foreign
from edkm_cli.export.source import Compressed
from edkm_cli.packing import pack
from families import family
from helpers import byte_tokenizer, cluster, export, refused, run, tiny_llama


def checkpoint(folder, **options):
    """A tiny compressed LLaMA with biases, of widths that all formats can hold."""
    model, spec = cluster(tiny_llama(bias=True, hidden=64, inner=128), **options)
    byte_tokenizer().save_pretrained(folder)
    return export(model, spec, folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """3 bits, a float16 table for each row: what most formats hold."""
    return checkpoint(tmp_path_factory.mktemp("rows"))


def test_a_plain_model_is_what_transformers_loads_from_the_checkpoint(rows, ids, text_file, tmp_path):
    from transformers import AutoModelForCausalLM

    status, out, err = run("export", rows, "--to", "dense", "--dtype", "float32", "--output", tmp_path / "out",
                           "--json", tmp_path / "j.json", "--verify", "perplexity", "--data", text_file,
                           "--context", 64)  # fmt: skip
    assert status == 0, err
    assert "equal to the source" in out
    result = json.loads((tmp_path / "j.json").read_text())
    assert (result["tensors"], result["rounded"]) == (len(Compressed(rows).tensors), 0)
    assert result["perplexity"]["export"] == pytest.approx(result["perplexity"]["source"], rel=1e-5)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    packed = hf.load(rows, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, packed(ids).logits, atol=1e-4, rtol=1e-4)
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(plain.get_submodule(name).weight, packed.get_submodule(name).dequantize())
    assert (tmp_path / "out" / "tokenizer.json").is_file()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_weight_of_a_plain_model_is_rounded_once(rows, dtype, tmp_path):
    result = export_model(rows, "dense", tmp_path / "out", options=Options(dtype=dtype))
    assert (result["largest_difference"] == 0) is (dtype == "float32")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    source = Compressed(rows)
    for name, tensor in stored.items():
        assert torch.equal(tensor, source.dense(name).to(getattr(torch, dtype)))


def test_fused_experts_are_written_as_their_family_stores_them(tmp_path):
    model, spec = cluster(family("mixtral", torch.float32))
    source = export(model, spec, tmp_path / "source")
    result = export_model(source, "dense", tmp_path / "out", options=Options(dtype="float32"))
    assert result["largest_difference"] == 0
    names = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert any(name.endswith("experts.3.w2.weight") for name in names)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "llama4_text"])
def test_experts_that_stayed_dense_are_written_and_read_back(kind, tmp_path):
    source = export(*cluster(family(kind), experts=False), tmp_path / "source")
    assert export_model(source, "dense", tmp_path / "out", options=Options(dtype="float32"))["largest_difference"] == 0


@pytest.mark.parametrize(("kind", "scale"), [("mixtral", 2.0**-4), ("qwen3_moe", 1.0)])
def test_experts_are_tiles_of_lut_b_under_the_names_of_their_family(kind, scale, text_file, tmp_path):
    model = family(kind, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, head_dim=16)
    options = {"granularity": "block:8x64", "lut_dtype": "float8_e4m3fn", "lut_scale": scale}
    model, spec = cluster(model, **options, skip=("*.experts.down_proj.1",))
    source = export(model, spec, tmp_path / "source")
    byte_tokenizer().save_pretrained(source)
    measured = Options(verify="perplexity", data=str(text_file), context=64, max_windows=2)
    result = export_model(source, "lut-b", tmp_path / "out", options=measured)
    assert (result["rounded"], result["largest_difference"]) == (0, 0)
    assert result["perplexity"]["export"] == pytest.approx(result["perplexity"]["source"], rel=1e-5)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    block, down = ("block_sparse_moe", "w2") if kind == "mixtral" else ("mlp", "down_proj")
    tile = {name.rpartition("experts.")[2]: t for name, t in stored.items() if f"layers.1.{block}.experts" in name}
    assert tile[f"3.{down}.weight_packed"].shape[2] + tile[f"3.{down}.weight_codebook"].shape[2] == 200
    assert tile[f"1.{down}.weight"].shape == model.model.layers[1].mlp.experts.down_proj[1].weight.shape
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert f"model.layers.1.{block}.experts.1.{down}" in ignored


def test_experts_that_files_keep_in_one_tensor_are_refused_by_lut_b_before_anything_is_trained(text_file, tmp_path):
    options = {"granularity": "block:8x64", "lut_dtype": "float8_e4m3fn", "lut_scale": 1.0}
    model = family("gpt_oss", hidden_size=64, intermediate_size=64, head_dim=16)
    model.save_pretrained(tmp_path / "dense")
    byte_tokenizer().save_pretrained(tmp_path / "dense")
    run = ("--target", "lut-b", "--lut-scale", "1", "--data", text_file, "--output", tmp_path / "out")
    trained = refused("compress", "--model", tmp_path / "dense", *run)
    source = export(*cluster(model, **options), tmp_path / "source")
    for message in (trained, refused("export", source, "--to", "lut-b", "--output", tmp_path / "out")):
        assert re.search(r"experts\.\w+\.0\.\w+ of gpt_oss is not; compress with --experts dense, or", message)


def test_a_file_that_changes_after_writing_leaves_nothing_behind(rows, tmp_path, monkeypatch):
    written = dense.write

    def write(source, folder, options, track):
        written(source, folder, options, track)
        damage(folder, "model.layers.1.self_attn.q_proj.bias", lambda tensor: tensor + 1)

    monkeypatch.setattr(dense, "write", write)
    with pytest.raises(UserError, match=r"1\.self_attn\.q_proj\.bias differs from the source in 64 of 64 numbers"):
        export_model(rows, "dense", tmp_path / "out", options=Options())
    assert list(tmp_path.iterdir()) == []


def damage(folder, name, change):
    """Change a tensor of an export, or drop it where `change` gives None."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed.contiguous()}, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    """3 bits, E4M3 tables of 8 x 64 tiles with one scale: what lut-b holds."""
    options = {"granularity": "block:8x64", "lut_dtype": "float8_e4m3fn", "lut_scale": 2.0**-4}
    return checkpoint(tmp_path_factory.mktemp("tiles"), **options)


def source_of(name, rows, tiles):
    return tiles if name == "lut-b" else rows


PACKED = ["squeezellm", "any-precision", "lut-b"]


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_format_holds_the_source_exactly(name, rows, tiles, text_file, tmp_path):
    result = export_model(
        source_of(name, rows, tiles),
        name,
        tmp_path / "out",
        options=Options(verify="perplexity", data=str(text_file), context=64, max_windows=2),
    )
    assert (result["rounded"], result["largest_difference"]) == (0, 0)
    assert result["perplexity"]["export"] == pytest.approx(result["perplexity"]["source"], rel=1e-5)


@pytest.mark.parametrize(("bits", "names"), [(4, PACKED[:2]), (6, PACKED[1:2])])
def test_rows_that_share_a_table_are_exact_at_other_bits(bits, names, tmp_path):
    source = checkpoint(tmp_path / "source", bits=bits, granularity="row:8")
    for name in names:
        assert export_model(source, name, tmp_path / name, options=Options())["rounded"] == 0
        assert not foreign(tmp_path / name)


def test_a_word_of_squeezellm_is_what_its_packing_loop_makes():
    """Three words of 32 indices, written out as squeezellm/quant.py does: ten, one over the border, ten, one, ten."""
    index = [(7 * i + i * i) % 8 for i in range(32)]
    value = sum(one << (3 * place) for place, one in enumerate(index))
    words = torch.tensor([[value >> shift & 0xFFFFFFFF] for shift in (0, 32, 64)]).to(torch.int32)
    assert codes_in(words.t(), 3, 32)[0].tolist() == index


@pytest.mark.parametrize("columns", [32, 96, 1024, 1056, 2080])
def test_planes_of_any_precision_are_decoded_at_every_width(columns):
    form = any_precision
    indices = torch.randint(0, 8, (4, columns), generator=torch.Generator().manual_seed(columns), dtype=torch.uint8)
    assert torch.equal(form._decoded(form._planes(indices, 3)), indices.long())


def test_tiles_of_lut_b_keep_leading_dimensions_such_as_experts():
    form = lut_b
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(0, 8, (3, 16, 128), generator=generator, dtype=torch.uint8)
    codebook = torch.randn(3, 2, 2, 8, generator=generator).to(torch.float8_e4m3fn)
    packed = torch.stack([pack(expert, 3) for expert in indices])
    weight = form.decoded(form.tiled_bytes(packed), codebook)
    for expert in range(3):
        table = codebook[expert].float().view(4, 8)
        assert torch.equal(weight[expert], lookup(indices[expert], table, granularity="block:8x64"))


QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
DAMAGE = {
    "a table entry": {
        "squeezellm": (f"{QUERY}.lookup_table", lambda t: t + torch.eye(*t.shape) / 512),
        "any-precision": (f"{QUERY}.lut3", lambda t: t + torch.eye(*t.shape, dtype=t.dtype) / 512),
        "lut-b": (f"{QUERY}.weight_codebook", lambda t: (t.view(torch.uint8) ^ 1).view(t.dtype)),
    },
    "a row of indices": {
        "squeezellm": (f"{DOWN}.qweight", lambda t: t[:, torch.arange(t.shape[1]).roll(1)]),
        "any-precision": (f"{DOWN}.qweight", lambda t: t.roll(1, 1)),
        "lut-b": (f"{DOWN}.weight_packed", lambda t: t.view(*t.shape[:2], 8, 24).roll(1, 2).reshape(t.shape)),
    },
    "the order of tiles, words or planes": {
        "squeezellm": (f"{DOWN}.qweight", lambda t: t.flip(0)),
        "any-precision": (f"{DOWN}.qweight", lambda t: t.flip(0)),
        "lut-b": (f"{DOWN}.weight_packed", lambda t: t.transpose(0, 1).reshape(t.shape)),
    },
    "a lost bias": dict.fromkeys(PACKED, (f"{DOWN}.bias", lambda t: None)),
    "a bias for another": dict.fromkeys(PACKED, (f"{DOWN}.bias", lambda t: t.flip(0))),
}


@pytest.fixture(scope="module")
def exports(rows, tiles, tmp_path_factory):
    """Of each packed format, the opened source and the folder of a whole export."""
    made = {}
    for name in PACKED:
        source, folder = Compressed(source_of(name, rows, tiles)), tmp_path_factory.mktemp(name)
        find(name).write(source, folder, Options())
        require_parity(source, folder, find(name), Options())
        made[name] = source, folder
    return made


@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("name", PACKED)
def test_damage_is_found_and_named(name, what, exports, tmp_path):
    tensor, change = DAMAGE[what][name]
    source, folder = exports[name]
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy", tensor, change)
    with pytest.raises(UserError, match=re.escape(tensor.rpartition(".")[0])):
        require_parity(source, tmp_path / "copy", find(name), Options())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("squeezellm", {"bits": 5}, "squeezellm holds 3 and 4 bits, got 5; use --bits 4"),
        ("any-precision", {"bits": 2}, "use --bits 3"),
        ("any-precision", {"lut_dtype": "bfloat16"}, "got bfloat16; use --lut-dtype float16"),
        ("lut-b", {}, "lut-b holds tables of block:8x64, got row:1; use --granularity block:8x64"),
        ("lut-b", {"granularity": "block:8x64", "lut_dtype": "float8_e4m3fn"}, "must have one scale for all matrices"),
        ("squeezellm", {"granularity": "block:8x64"}, "use --granularity row:1 or tensor"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_with_what_would_fit(name, options, message, tmp_path):
    source = checkpoint(tmp_path / "source", **options)
    assert message in refused("export", source, "--to", name, "--output", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "onnx"], "--to must be one of dense"),
        (["--to", "dense", "--dtype", "int8"], "dtype must be one of auto, float16"),
        (["--to", "dense", "--verify", "all"], "verify must be one of weights, perplexity, got 'all'"),
        (["--to", "dense", "--verify", "perplexity", "--data", "no-such-file.txt"], "no-such-file.txt"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(rows, tmp_path, arguments, message):
    assert message in refused("export", rows, "--output", tmp_path / "out", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_number_beyond_the_dtype_is_named_and_nothing_is_left(tmp_path):
    source = checkpoint(tmp_path / "source", lut_dtype="float32")
    model = hf.load(source)
    model.model.norm.weight.data[3] = 1e6
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(UserError, match=r"model\.norm\.weight holds 1e\+06, more than 65504"):
        export_model(tmp_path / "large", "dense", tmp_path / "out", options=Options(dtype="float16"))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "large"}


def test_the_output_is_kept_and_is_not_the_source(rows, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    assert "exists and is not empty" in refused("export", rows, "--to", "dense", "--output", tmp_path)
    assert "must be apart from the source" in refused("export", rows, "--to", "dense", "--output", rows, "--overwrite")


def test_a_perplexity_that_drifts_is_refused():
    require_same_perplexity(30.0, 30.002, exact=True)
    with pytest.raises(UserError, match=r"within 0\.01%, but has 30\.01"):
        require_same_perplexity(30.0, 30.01, exact=True)
    require_same_perplexity(30.0, 30.01, exact=False)
    with pytest.raises(UserError, match="nothing was put in place"):
        require_same_perplexity(30.0, float("nan"), exact=False)


def test_codes_of_many_rows_are_those_of_a_few():
    words = torch.randint(-(2**31), 2**31, (4100, 3), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    parts = torch.cat([codes_in(words[:9], 3, 32), codes_in(words[9:], 3, 32)])
    assert torch.equal(codes_in(words, 3, 32), parts)
