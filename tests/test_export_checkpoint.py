"""Export, reload, save again: the reloaded model is the in-memory hard model bit for bit, and files stay the same."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import edkm_cli
from edkm_cli.errors import UserError
from edkm_cli.evaluate.size import footprint
from edkm_cli.export.source import Compressed
from edkm_cli.format import QuantizationSpec
from edkm_cli.hf import load
from edkm_cli.integrity import check_checkpoint
from edkm_cli.nn.swap import is_tied
from edkm_cli.packing import packed_width, stored_dtype
from edkm_cli.report.inspection import describe, verify
from edkm_cli.runtime.embeddings import PalettizedEmbedding, PalettizedHead
from edkm_cli.runtime.palettized import PalettizedLinear
from edkm_cli.summaries import summary
from helpers import cluster, export, tiny_llama, tiny_qwen


def files_of(directory):
    return {
        path.name: path.read_bytes()
        for path in directory.iterdir()
        if path.suffix in (".safetensors", ".json") and path.name not in ("checksums.json", "tensors.json")
    }


def assert_round_trip(model, spec, ids, tmp_path, **options):
    directory = export(model, spec, tmp_path / "one", **options)
    loaded = load(directory)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "two", **options)
    assert files_of(tmp_path / "two") == files_of(directory)
    return loaded


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_width_round_trips(bits, ids, tmp_path):
    model, spec = cluster(tiny_llama(hidden=24, inner=37), bits=bits)
    assert_round_trip(model, spec, ids, tmp_path)


@pytest.mark.parametrize("granularity", ["tensor", "row:1", "row:4", "block:4x8", "block:1x8", "block:2x4"])
def test_every_geometry_round_trips(granularity, ids, tmp_path):
    model, spec = cluster(tiny_llama(), granularity=granularity)
    loaded = assert_round_trip(model, spec, ids, tmp_path)
    measured = footprint(loaded).decoder_bits_per_weight
    assert measured == pytest.approx(describe(Compressed(tmp_path / "one"))["decoder_bits_per_weight"])


@pytest.mark.parametrize("lut_dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e3m4"])
def test_every_lut_dtype_round_trips(lut_dtype, ids, tmp_path):
    model, spec = cluster(tiny_llama(), lut_dtype=lut_dtype)
    loaded = assert_round_trip(model, spec, ids, tmp_path)
    assert loaded.model.layers[0].mlp.up_proj.lut.dtype == stored_dtype(lut_dtype)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("embedding_bits", [8, 5, 16])
def test_tied_and_untied_embeddings_round_trip(tied, embedding_bits, ids, tmp_path):
    model, spec = cluster(tiny_llama(tied=tied), embedding_bits=embedding_bits)
    loaded = assert_round_trip(model, spec, ids, tmp_path)
    assert is_tied(loaded) is tied
    names = describe(Compressed(tmp_path / "one"))["layers"]
    assert isinstance(loaded.model.embed_tokens, PalettizedEmbedding) is (embedding_bits != 16)
    if tied and embedding_bits != 16:
        assert isinstance(loaded.lm_head, PalettizedHead)
        assert loaded.lm_head.tied_to is loaded.model.embed_tokens
        assert sum(layer["name"] == "lm_head" and bool(layer["bytes"]) for layer in names) == 0


@pytest.mark.parametrize("lut_dtype", ["float16", "float8_e4m3fn"])
def test_matrices_of_different_bits_and_scales_for_groups_round_trip(lut_dtype, ids, tmp_path):
    own = {"model.layers.0.self_attn.k_proj": 2, "model.layers.1.mlp.down_proj": 5}
    mixed = {"embedding_group": 8, "module_bits": own}
    model, spec = cluster(tiny_llama(), embedding_bits=4, lut_dtype=lut_dtype, mixed=mixed)
    loaded = assert_round_trip(model, spec, ids, tmp_path)
    assert loaded.model.embed_tokens.scale.shape == (257, 3)
    layers = {layer["name"]: layer for layer in describe(Compressed(tmp_path / "one"))["layers"]}
    assert {name: layers[name]["bits"] for name in own} == own
    assert layers["model.layers.0.self_attn.q_proj"]["bits"] == 3
    assert ", 2 to 5 bits, row:1" in summary("inspect", describe(Compressed(tmp_path / "one")))
    every = {name: 4 for name, layer in layers.items() if layer["luts"]}
    none_of_three = export(*cluster(tiny_llama(), mixed={"module_bits": every}), tmp_path / "every")
    assert ", 4 bits, row:1" in summary("inspect", describe(Compressed(none_of_three)))
    assert verify(Compressed(tmp_path / "one"))["tensors"] > 20
    assert json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]["format_version"] == 3


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_whose_rows_differ_in_bits_round_trip(tied, ids, tmp_path):
    mixed = {"embedding_rows": [[64, 6], [128, 5], [250, 4]], "embedding_factors": True}
    model, spec = cluster(tiny_llama(tied=tied), embedding_bits=6, mixed=mixed)
    loaded = assert_round_trip(model, spec, ids, tmp_path)
    shapes = [tuple(part.indices.shape) for part in loaded.model.embed_tokens.parts()]
    assert shapes == [(64, 18), (64, 15), (122, 12), (7, 18)]
    source = Compressed(tmp_path / "one")
    assert torch.equal(source.dense("model.embed_tokens.weight"), loaded.model.embed_tokens.dequantize())
    assert {layer["bits"] for layer in describe(source)["layers"] if not layer["luts"]} == {"4 to 6"}
    assert "LUTs, embeddings 4 to 6 bits (" in summary("inspect", describe(source))
    assert verify(source)["tensors"] > 20
    said = json.loads((tmp_path / "one" / "config.json").read_text())["quantization_config"]
    assert (said["format_version"], said["embedding_rows"]) == (9, mixed["embedding_rows"])
    with pytest.raises(UserError, match="embedding_rows must end before row 250"):
        PalettizedEmbedding(torch.nn.Embedding(250, 24), spec)


def test_biases_round_trip(ids, tmp_path):
    model, spec = cluster(tiny_llama(bias=True))
    assert model.model.layers[0].mlp.down_proj.bias is not None
    assert_round_trip(model, spec, ids, tmp_path)


def test_another_family_round_trips(ids, tmp_path):
    model, spec = cluster(tiny_qwen())
    assert_round_trip(model, spec, ids, tmp_path)


def test_skipped_modules_stay_dense(ids, tmp_path):
    model, spec = cluster(tiny_llama(), skip=("*.down_proj", "model.embed_tokens"))
    assert spec.skipped[0] == "model.embed_tokens"
    loaded = assert_round_trip(model, spec, ids, tmp_path)
    assert type(loaded.model.layers[1].mlp.down_proj) is torch.nn.Linear
    assert is_tied(loaded)


def test_shards_equal_those_of_save_pretrained(ids, tmp_path):
    model, spec = cluster(tiny_llama(tied=False))
    assert_round_trip(model, spec, ids, tmp_path, max_shard_size="4KB")
    assert len(list((tmp_path / "one").glob("model-*.safetensors"))) > 2
    edkm_cli.load(tmp_path / "one")


def test_bfloat16_models_round_trip_and_keep_their_tables(ids, tmp_path):
    dense = tiny_llama()
    for parameter in dense.parameters():  # as loading does: rotary frequencies stay in float32
        parameter.data = parameter.data.bfloat16()
    model, spec = cluster(dense)
    loaded = assert_round_trip(model, spec, ids, tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert loaded.model.layers[0].mlp.up_proj.lut.dtype == torch.float16


def test_casts_change_activations_but_neither_tables_nor_scales(ids, tmp_path):
    model, spec = cluster(tiny_llama())
    directory = export(model, spec, tmp_path / "one")
    loaded = load(directory, dtype=torch.bfloat16)
    assert loaded(ids).logits.dtype == torch.bfloat16
    assert torch.equal(
        loaded.model.to(torch.float64).layers[0].mlp.up_proj.dequantize(),
        model.model.layers[0].mlp.up_proj.hard_weight(),
    )
    assert loaded.model.embed_tokens.scale.dtype == torch.float32


def test_weights_stay_packed_in_memory_and_dequantize_on_request(ids, tmp_path):
    model, spec = cluster(tiny_llama())
    loaded = load(export(model, spec, tmp_path / "one"))
    layer = loaded.model.layers[0].mlp.up_proj
    assert isinstance(layer, PalettizedLinear)
    assert layer.indices.shape == (40, packed_width(24, 3))
    assert not list(layer.parameters())
    before = loaded(ids).logits
    loaded.dequantize()
    assert type(loaded.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert is_tied(loaded)
    torch.testing.assert_close(loaded(ids).logits, before)  # sums in another order
    loaded.save_pretrained(tmp_path / "dense")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    torch.testing.assert_close(dense(ids).logits, before)


def test_a_loaded_model_generates(ids, tmp_path):
    model, spec = cluster(tiny_llama())
    loaded = load(export(model, spec, tmp_path / "one"))
    written = loaded.generate(ids[:1], max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert written.shape == (1, 22)


def test_from_pretrained_after_the_import_and_edkm_load_agree(ids, tmp_path):
    model, spec = cluster(tiny_llama())
    directory = export(model, spec, tmp_path / "one")
    plain = AutoModelForCausalLM.from_pretrained(directory)
    assert torch.equal(plain(ids).logits, edkm_cli.load(directory)(ids).logits)


def test_a_trained_but_unsorted_lut_exports_the_same_weights(ids, tmp_path):
    model, spec = cluster(tiny_llama())
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.centroids.copy_(layer.centroids.flip(1))
        layer.weight[0, 0] = layer.lut()[0, 2:4].mean()  # a tie: the lower index wins, whatever its value
    loaded = assert_round_trip(model, spec, ids, tmp_path)
    lut = loaded.model.layers[0].self_attn.q_proj.lut.float()
    assert torch.equal(lut, lut.sort(1).values)


class TestDamage:
    """Each damage is found by the check that every command of ours runs, with one line that names it."""

    @pytest.fixture
    def directory(self, tmp_path):
        model, spec = cluster(tiny_llama())
        return export(model, spec, tmp_path / "one")

    def refuse(self, directory, message):
        with pytest.raises(UserError, match=message) as caught:
            check_checkpoint(directory)
        assert "\n" not in str(caught.value)
        with pytest.raises(UserError):
            load(directory)

    def test_truncated(self, directory):
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
        self.refuse(directory, "truncated")
        (directory / "checksums.json").unlink()
        self.refuse(directory, "not a whole safetensors file")

    def test_altered_byte(self, directory):
        data = bytearray((directory / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (directory / "model.safetensors").write_bytes(data)
        self.refuse(directory, "sha256")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"bits": 4}, "must be uint8"),
            ({"granularity": "row:2"}, "must be float16"),
            ({"granularity": "row:5"}, "does not divide"),
            ({"lut_dtype": "float32"}, "must be float32"),
            ({"embedding_bits": None}, "must skip"),
            ({"format_version": 9}, "format_version"),
            ({"format_version": 3, "embedding_group": 5}, "must divide the embeddings' 24 columns"),
            ({"format_version": 3, "embedding_group": 8}, r"must be float32 \(257, 3\)"),
            ({"format_version": 3, "module_bits": {"model.layers.0.mlp.up_proj": 4}}, "must be uint8"),
            ({"format_version": 3, "module_bits": {"model.norm": 4}}, "must name linears"),
        ],
    )
    def test_altered_config(self, directory, change, message):
        (directory / "checksums.json").unlink()
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"].update(change)
        (directory / "config.json").write_text(json.dumps(config))
        self.refuse(directory, message)

    def test_missing_weights(self, directory):
        (directory / "checksums.json").unlink()
        (directory / "model.safetensors").unlink()
        self.refuse(directory, "no model.safetensors")

    def test_missing_shard(self, tmp_path):
        model, spec = cluster(tiny_llama())
        directory = export(model, spec, tmp_path / "sharded", max_shard_size="4KB")
        (directory / "checksums.json").unlink()
        next(iter(sorted(directory.glob("model-*.safetensors")))).unlink()
        self.refuse(directory, "which model.safetensors.index.json names")

    def test_a_nan_in_a_table_is_refused(self, directory, tmp_path):
        from safetensors.torch import load_file, save_file

        (directory / "checksums.json").unlink()
        tensors = load_file(directory / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.lut"][0, 0] = float("nan")
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match="must be finite"):
            load(directory)

    def test_a_missing_tensor_is_refused_not_filled_at_random(self, directory):
        from safetensors.torch import load_file, save_file

        (directory / "checksums.json").unlink()
        tensors = load_file(directory / "model.safetensors")
        del tensors["model.layers.1.mlp.up_proj.indices"]
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        self.refuse(directory, "got nothing")

    def test_a_dense_model_is_not_taken_for_ours(self, model_directory, tmp_path):
        shutil.copytree(model_directory, tmp_path / "dense")
        with pytest.raises(UserError, match="must be a checkpoint written by edkm"):
            check_checkpoint(tmp_path / "dense")


def test_another_head_stays_dense_where_the_checkpoint_knows_none(ids, tmp_path):
    from transformers import AutoModelForSequenceClassification

    model, spec = cluster(tiny_llama())
    directory = export(model, spec, tmp_path / "one")
    classifier = AutoModelForSequenceClassification.from_pretrained(directory, num_labels=3)
    assert type(classifier.score) is torch.nn.Linear
    assert isinstance(classifier.model.layers[0].mlp.up_proj, PalettizedLinear)
    with torch.no_grad():
        wanted = model.model(ids).last_hidden_state
        assert torch.equal(classifier.model(ids).last_hidden_state, wanted)
        classifier.save_pretrained(tmp_path / "again")
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
        classifier.config.pad_token_id = again.config.pad_token_id = 0
        assert torch.equal(again(ids).logits, classifier(ids).logits)


def test_tables_with_a_scale_train_after_inference_mode_and_are_compiled(ids, tmp_path):
    model = edkm_cli.load(
        export(*cluster(tiny_llama(), lut_dtype="float8_e3m4"), tmp_path / "one"), dtype=torch.float32
    )
    with torch.inference_mode():
        wanted = model(ids).logits
    logits = model(ids).logits
    logits.sum().backward()
    assert torch.equal(logits, wanted)
    layer, x = model.model.layers[0].mlp.up_proj, torch.randn(3, 24)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj.lut", "model.layers.0.self_attn.q_proj.indices", "model.embed_tokens.scale",
     "model.norm.weight", "lm_head.indices"],
)  # fmt: skip
def test_from_pretrained_refuses_a_directory_that_lacks_a_tensor(name, tmp_path):
    """transformers alone uses uninitialised memory: logits of -1.7e22 and no word."""
    from safetensors.torch import load_file, save_file

    model, spec = cluster(tiny_llama(tied=False))
    directory = export(model, spec, tmp_path / "one")
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{name} is missing"):
        AutoModelForCausalLM.from_pretrained(directory)


def test_float8_tables_of_the_first_version_have_no_scale():
    spec = QuantizationSpec(3, "row:1", "float8_e4m3fn", 8, format_version=1)
    assert "lut_scale" not in spec.linear_tensors(4, 8, layer="a")
    assert "lut_scale" in QuantizationSpec(3, "row:1", "float8_e4m3fn", 8).linear_tensors(4, 8, layer="a")


@pytest.mark.parametrize(
    ("bits", "mixed", "options"),
    [
        (8, {"format_version": 1}, {"lut_dtype": "float8_e4m3fn", "lut_scale": 1.0}),
        (4, {"format_version": 6, "embedding_factors": True}, {}),
        (6, {"format_version": 7, "embedding_rows": [[64, 5]]}, {}),
    ],
    ids=str,
)
def test_checkpoints_of_earlier_versions_load(bits, mixed, options, ids, tmp_path):
    model, spec = cluster(tiny_llama(), embedding_bits=bits, mixed=mixed, **options)
    assert spec.format_version == mixed["format_version"]
    assert_round_trip(model, spec, ids, tmp_path)


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.up_proj"])
def test_a_dense_module_in_a_packed_one_s_place_is_not_saved_as_one(tmp_path, name):
    """The configuration says that it is packed, so that what was saved would not load."""
    model = load(export(*cluster(tiny_llama(tied=False)), tmp_path / "one"))
    packed = model.get_submodule(name)
    model.set_submodule(name, torch.nn.Linear(packed.in_features, packed.out_features, bias=False))
    with pytest.raises(UserError, match=rf"{name} must be packed to be saved, but is a Linear; dequantize\(\)"):
        model.save_pretrained(tmp_path / "again")
    model.dequantize()
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again").get_submodule(name)
    assert torch.equal(again.weight, model.get_submodule(name).weight)
