"""Overrides: some matrices get the bits and tables that are asked for; and results of a size that is asked for."""

import pytest
import torch

import edkm_cli
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig, build_config
from edkm_cli.distributed import World
from edkm_cli.dryrun.plan import dry_run, weights_bytes
from edkm_cli.errors import UserError
from edkm_cli.export.source import Compressed
from edkm_cli.granularity import Granularity, Override
from edkm_cli.preflight import plan_run
from edkm_cli.report.inspection import describe, verify
from edkm_cli.summaries import summary
from families import family
from helpers import byte_tokenizer, tiny_llama

SHORT = {
    "sequence_length": 32,
    "context": 32,
    "eval_windows": 1,
    "calibration_tokens": 64,
    "start_tokens": 128,
    "save_every": 0,
    "steps": 0,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    directory = tmp_path_factory.mktemp("moe")
    family("qwen3_moe").save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def test_the_last_override_that_matches_says_what_holds():
    texts = ("*.q_proj: bits=2, granularity=row:2", "*.0.*: bits=5")
    assert Override.of(texts, "layers.0.q_proj")[1:] == (5, Granularity(2))
    assert Override.of(texts, "layers.1.q_proj")[1:] == (2, Granularity(2))
    assert Override.of(texts, "layers.1.k_proj")[1:] == (None, None)


@pytest.mark.parametrize("text", ["*.q_proj", ": bits=3", "*.q_proj: bits=9", "*.q: bits=x", "*: width=3", "*: bits"])
def test_what_is_no_override_is_refused(text):
    with pytest.raises(UserError, match="overrides must be PATTERN"):
        CompressConfig(model="m", overrides=(text,))


def test_a_pattern_that_matches_nothing_is_refused_before_any_work(moe):
    with pytest.raises(UserError, match="matches none"):
        plan_run(CompressConfig(model=str(moe), overrides=("*.wrong: bits=4",)), World())
    with pytest.raises(UserError, match="does not divide"):
        plan_run(CompressConfig(model=str(moe), overrides=("*.q_proj: granularity=row:7",)), World())


def test_tiles_of_all_need_not_fit_where_an_override_replaces_them(moe):
    own = ("*.down_proj.*: granularity=row:1",)  # rows of 16, all others are of 32
    plan = plan_run(CompressConfig(model=str(moe), granularity="block:1x32", overrides=own), World())
    assert plan.needed_bytes > plan.parameters


@pytest.mark.parametrize("left", [{"skip": ("*.q_proj", "*.o_proj")}, {"target": "gguf:q3_k", "embedding_group": 32}])
def test_bits_of_a_decoder_with_dense_matrices_are_those_of_the_plan_and_of_the_files(left, text_file, tmp_path):
    tiny_llama(hidden=256, inner=256, layers=1).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    given = {"model": str(tmp_path / "model"), "data": (str(text_file),), "output": str(tmp_path / "out")}
    config = build_config(None, {**SHORT, **given, "start": "kmeans", **left})
    assert dry_run(config)["decoder_bits_per_weight"] == compress(config)["decoder_bits_per_weight"]
    assert verify(Compressed(config.output))["report"]


@pytest.mark.parametrize("allocation", ["uniform", "sensitivity"])
def test_a_run_with_overrides_reloads_as_it_was_asked_for(allocation, moe, text_file, tmp_path):
    (tmp_path / "run.yaml").write_text(
        "overrides:\n"
        "  '*.down_proj.*': {bits: 4, granularity: 'row:4'}\n"
        "  '*.q_proj': {bits: 2}\n"
        "  'model.layers.0.*k_proj': {granularity: 'block:4x8'}\n"
    )
    given = {"model": str(moe), "data": (str(text_file),), "output": str(tmp_path / "out"), "allocation": allocation}
    config = build_config(tmp_path / "run.yaml", {**SHORT, **given})
    planned = {(kind["count"], kind["becomes"]) for kind in dry_run(config)["modules"]}
    assert any(count == 2 and "2-bit indices (override)" in becomes for count, becomes in planned)
    assert any(
        count == 8 and "4-bit indices (override)" in becomes and "row:4" in becomes for count, becomes in planned
    )
    compress(config)
    found = {layer["name"]: layer for layer in describe(Compressed(config.output))["layers"]}
    for name, layer in found.items():
        if ".down_proj." in name:
            assert (layer["bits"], layer["granularity"], layer["luts"]) == (4, "row:4", 8), name
        elif name.endswith("q_proj"):
            assert layer["bits"] == 2
    assert found["model.layers.0.self_attn.k_proj"]["granularity"] == "block:4x8"
    assert "granularity" not in found["model.layers.1.self_attn.k_proj"]
    assert "row:4 in 8" in summary("inspect", describe(Compressed(config.output)))
    ids = torch.arange(1, 18)[None]
    loaded = edkm_cli.load(config.output, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(ids).logits
        loaded.save_pretrained(tmp_path / "again")
        assert torch.equal(edkm_cli.load(tmp_path / "again", dtype=torch.float32)(ids).logits, logits)
        loaded.dequantize()
        torch.testing.assert_close(loaded(ids).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", ["64MB", "80 MB", "55MiB"])
@pytest.mark.parametrize("overrides", [(), ("*.down_proj: bits=4",), ("*.o_proj: granularity=block:1x32",)])
def test_a_size_that_is_asked_for_is_met(size, overrides):
    plan = plan_run(CompressConfig(model="smollm2-135m", target_size=size, overrides=overrides), World())
    wanted = float(size[:2]) * (2**20 if size.endswith("MiB") else 10**6)
    assert weights_bytes(plan) == pytest.approx(wanted, rel=0.01)
    assert plan.config.allocation == "sensitivity"


def test_a_size_that_cannot_be_is_refused_with_those_that_can():
    with pytest.raises(UserError, match=r"--target-size must be \d+\.\d to \d+\.\d MB"):
        plan_run(CompressConfig(model="smollm2-135m", target_size="1GB"), World())
    with pytest.raises(UserError, match="leave one out"):
        plan_run(CompressConfig(model="smollm2-135m", target_size="64MB", overrides=("*.layers.*: bits=6",)), World())
    with pytest.raises(UserError, match="allocation sensitivity"):
        CompressConfig(model="m", target_size="1GB", allocation="uniform")
