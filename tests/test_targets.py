"""What export formats can hold of a model, known from its configuration and shapes alone."""

import pytest
import torch
from transformers import AutoConfig

from edkm_cli.clustering.grids import Grid
from edkm_cli.config import build_config
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.preflight import plan_run
from edkm_cli.targets import TARGETS, check_model, closest, falls_back, full_positions, repeated_layers
from families import family

LAYERS = {"model.layers.0.mlp.up_proj": (64, 128), "model.layers.1.mlp.up_proj": (64, 128)}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {**DYNAMIC, "rope_type": "yarn"}
LLAMA3 = {
    **DYNAMIC,
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def architecture(kind="llama", **more):
    return AutoConfig.for_model(kind, **more)


def gemma(*kinds):
    return architecture(
        "gemma3_text", num_hidden_layers=len(kinds), layer_types=[f"{kind}_attention" for kind in kinds]
    )


@pytest.mark.parametrize("name", ["gguf:q8_0", "mlx:4"])
def test_gemma_fits_with_windows_where_the_engine_has_them(name):
    check_model(name, gemma(*["sliding"] * 5, "full", "sliding"), LAYERS, lut_scale=1.0)
    check_model(name, architecture("gemma3_text"), LAYERS, lut_scale=1.0)
    check_model(name, architecture(hidden_act="swish"), LAYERS, lut_scale=1.0)


@pytest.mark.parametrize("name", ["squeezellm", "any-precision", "coreml", "lut-b"])
def test_an_ordinary_decoder_fits_every_target(name):
    check_model(name, architecture(num_hidden_layers=len(LAYERS)), LAYERS, lut_scale=0.0625)


@pytest.mark.parametrize(
    ("name", "model", "layers", "message"),
    [
        ("squeezellm", architecture(), {"a": (64, 40)}, "columns are a multiple of 32, but a has 40; leave it"),
        ("any-precision", architecture(), {"model.layers.0.a": (24, 64)}, "rows are a multiple of 16"),
        ("coreml", architecture("gemma2"), LAYERS, "knows decoders of llama, mistral and qwen2, got gemma2"),
        ("coreml", architecture(hidden_act="gelu"), LAYERS, "knows activation silu, got gelu"),
        ("coreml", architecture(rope_parameters=DYNAMIC), LAYERS, "got dynamic"),
        ("lut-b", architecture("qwen3"), LAYERS, "not of qwen3; compress with --lut-scale 1"),
        ("gguf:q4_0", architecture("gemma2"), LAYERS, "gguf knows decoders of llama, mistral, .* got gemma2"),
        ("gguf:q4_0", architecture(rope_parameters=DYNAMIC), LAYERS, "gguf knows rotary angles .* got dynamic"),
        ("gguf:q8_0", architecture(hidden_act="relu"), LAYERS, "gguf knows activation silu, got relu"),
        ("mlx:4", architecture("qwen2", hidden_act="gelu"), LAYERS, "mlx knows activation silu, got gelu"),
        (
            "gguf:q8_0",
            gemma("full", "sliding", "full"),
            LAYERS,
            "gguf knows sliding windows of the family's own layers",
        ),
        ("gguf:q8_0", gemma("sliding", "full"), LAYERS, "gguf knows sliding windows"),
        ("mlx:4", gemma("full", "sliding", "full"), LAYERS, "mlx knows sliding windows"),
        ("gguf:q8_0", architecture("qwen2", layer_types=["sliding_attention"] * 32), LAYERS, "knows sliding windows"),
        (
            "gguf:q8_0",
            architecture("gemma3_text", query_pre_attn_scalar=99),
            LAYERS,
            "query_pre_attn_scalar 256, got 99",
        ),
        ("gguf:q8_0", architecture("gemma3_text", final_logit_softcapping=5.0), LAYERS, "final_logit_softcapping None"),
        ("mlx:4", architecture("qwen3", attention_bias=True), LAYERS, "mlx knows attention_bias False, got True"),
        ("mlx:4", architecture("mixtral"), LAYERS, "holds no experts, but the model has some"),
        ("w4a16", architecture("qwen2_moe"), LAYERS, "holds no experts, but the model has some"),
        ("mlx:4", architecture("glm4_moe"), LAYERS, "holds no experts, but the model has some"),
        ("mlx:4", architecture("gpt_neox"), LAYERS, "mlx knows decoders of llama, .* got gpt_neox"),
        ("mlx:4", architecture("glm"), LAYERS, "mlx knows decoders of llama, .* got glm"),
        ("mlx:4", architecture(rope_parameters=DYNAMIC), LAYERS, "mlx knows rotary angles .* got dynamic"),
        ("mlx:4", architecture("glm4", rope_parameters=YARN), LAYERS, "angles of glm4: default, got yarn"),
        ("mlx:4", architecture("nemotron", rope_parameters=YARN), LAYERS, "nemotron: default and linear, got yarn"),
        ("gguf:q8_0", architecture("qwen3", rope_parameters=LLAMA3), LAYERS, "qwen3: default and linear, got llama3"),
    ],
)
def test_what_does_not_fit_is_named_with_a_remedy(name, model, layers, message):
    with pytest.raises(UserError, match=message):
        check_model(name, model, layers, lut_scale=0.0625)


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "lut-b"])
def test_packed_experts_are_refused_before_any_work(name):
    with pytest.raises(
        UserError, match="holds no packed experts, but the model has some; compress with --experts dense"
    ):
        check_model(name, architecture(), LAYERS, lut_scale=0.0625, experts=True)


def test_a_scale_of_one_fits_every_family():
    check_model("lut-b", architecture("qwen3"), LAYERS, lut_scale=1.0)


def test_layers_that_differ_are_named():
    with pytest.raises(UserError, match=r"but model\.layers\.1 differs from the first"):
        repeated_layers(["model.layers.0.a", "model.layers.0.b", "model.layers.1.a"])
    with pytest.raises(UserError, match="but head is none; add --skip head"):
        repeated_layers(["model.layers.0.a", "head"])


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.form])
def test_the_closest_target_of_a_format_is_the_one_that_was_trained(name):
    tables = {key: TARGETS[name].settings[key] for key in ("bits", "lut_dtype", "palette")}
    assert closest(TARGETS[name].form, **tables) == name


def test_tables_that_no_target_of_a_format_holds_are_told_the_nearest():
    assert closest("compressed-tensors", bits=8, lut_dtype="float16", palette="free") == "w4a16"
    assert closest("gguf", bits=4, lut_dtype="bfloat16", palette="iq4_nl") == "gguf:iq4_nl"


def test_engines_without_windows_are_told_of_the_positions_in_one():
    assert full_positions(architecture("mistral", sliding_window=16)) == 16
    assert full_positions(architecture("mistral", sliding_window=None, max_position_embeddings=99)) == 99
    assert full_positions(architecture("qwen2", use_sliding_window=False, max_position_embeddings=99)) == 99


def test_rows_of_embeddings_need_not_be_super_blocks():
    assert "no multiple of 256" in falls_back("gguf:q4_k", 576, 32)
    assert falls_back("gguf:q4_k", 576, 32, linear=False) == ""
    assert "no multiple of 32" in falls_back("gguf:q4_k", 40, 32, linear=False)


@pytest.mark.parametrize("target", ["gguf:q4_0", "mlx:4"])
def test_embeddings_of_a_target_may_stay_as_they_are(target, text_file, tmp_path):
    family("llama", hidden_size=64, intermediate_size=128).save_pretrained(tmp_path)
    flags = {"model": str(tmp_path), "data": [str(text_file)], "target": target, "embedding_bits": "16"}
    plan = plan_run(build_config(None, flags), World())
    assert plan.spec.embedding_group is None
    assert plan.spec.embedding_bits == 16
    with pytest.raises(UserError, match="embedding_group is for compressed embeddings"):
        build_config(None, flags | {"embedding_group": 32})  # which somebody has given


@pytest.mark.parametrize(("bits", "tile", "limit"), [(4, 32, 0.05), (2, 16, 0.16)])
def test_tiles_far_above_zero_have_multiples_that_reach_them(bits, tile, limit):
    """llama.cpp's super-blocks have no offset above zero."""
    grid = Grid("affine", bits, "int8")
    for sign in (1, -1):
        w = sign * (0.05 + 0.01 * torch.randn(4, 512, generator=torch.Generator().manual_seed(0)))
        granularity = Granularity.parse(f"block:1x{tile}")
        table = grid.tables(grid.start(w, granularity=granularity))
        values = w.view(-1, tile)
        nearest = table.gather(1, (table[:, None] - values[..., None]).abs().argmin(2))
        assert (nearest - values).norm() < limit * values.norm()


@pytest.mark.parametrize("bits", [4, 5])
def test_super_blocks_of_the_smallest_numbers_keep_them(bits):
    grid, w = Grid("affine", bits, "int8"), 1e-5 * torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    table = grid.tables(grid.start(w, granularity=Granularity.parse("block:1x32")))
    nearest = table.gather(1, (table[:, None] - w.view(-1, 32, 1)).abs().argmin(2))
    assert (nearest - w.view(-1, 32)).norm() < 0.2 * w.norm()


@pytest.mark.parametrize("given", [{"palette": "free"}, {"lut_dtype": "float32"}], ids=str)
def test_a_fraction_of_a_bit_hides_no_misfit(given):
    with pytest.raises(UserError, match="mlx:4 holds"):
        build_config(None, {"model": "m", "target": "mlx:4", "bits": 3.5, **given})


@pytest.mark.parametrize(("target", "field"), [("w4a16", "embedding_bits"), ("gguf:q4_k", "lut_dtype")])
def test_auto_is_what_leaving_it_out_means(target, field):
    plain, told = (build_config(None, {"model": "m", "target": target, **more}) for more in ({}, {field: "auto"}))
    assert plain == told
    assert getattr(told, field) != "auto"


def test_a_decoder_layer_without_packed_linears_is_refused_where_each_has_some():
    layers = {f"model.layers.{index}.mlp.up_proj": (256, 256) for index in range(2)}
    check_model("any-precision", architecture(num_hidden_layers=2), layers, lut_scale=1.0)
    with pytest.raises(UserError, match="in all decoder layers, but some have none"):
        check_model("any-precision", architecture(num_hidden_layers=3), layers, lut_scale=1.0)
