"""Settings drawn at random: a dry run and a run agree on whether they can be had, and what was made is whole."""

import random

import pytest
from safetensors.torch import load_file

from families import family
from fuzzing import COUNT
from helpers import byte_tokenizer, run, tiny_llama

KINDS = ("llama", "bias", "tied", "qwen2", "qwen3", "gemma2", "phi3", "mixtral", "qwen3_moe")
SHORT = ("--sequence-length", 32, "--context", 32, "--eval-windows", 1, "--calibration-tokens", 64, "--device", "cpu")
# Options with some of their values; None: a flag. Most combinations can be had, the others are refused before any work.
OPTIONS = {
    "--bits": (1, 2, 2.5, 4, 8),
    "--allocation": ("uniform", "sensitivity"),
    "--granularity": ("tensor", "row:2", "block:1x8", "block:4x8"),
    "--lut-dtype": ("bfloat16", "float32", "float8_e3m4", "float8_e4m3fn"),
    "--target": ("squeezellm", "gguf:q4_0", "mlx:mxfp4", "w4a16"),
    "--embedding-bits": (2, 8, 16, "3+"),
    "--embedding-group": (8, 16),
    "--skip": ("*.q_proj", "lm_head", "*embed_tokens", "*.layers.0.*"),
    "--override": ("*.k_proj: bits=5", "*.down_proj*: bits=4, granularity=row:2", "*.layers.1.*: granularity=row:1"),
    "--experts": ("dense",),
    "--method": ("dkm",),
    "--mode": ("soft", "hard"),
    "--iterations": (0, 2),
    "--importance": ("activation", "none"),
    "--start": ("kmeans", "compensated", "reconstructed"),
    "--start-passes": (1,),
    "--assignments": ("free", "held"),
    "--no-distill": (None,),
    "--label-weight": (0, 0.5),
    "--dtype": ("bfloat16", "float16"),
    "--mixed-precision": ("no", "bf16"),
    "--packing": (None,),
    "--batch-size": (2,),
    "--gradient-checkpointing": (None,),
    "--offload": ("cpu",),
    "--eval-every": (1,),
    "--memory": ("small",),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """models(kind): the directory of a tiny model."""
    made, own = {}, {"llama": {"hidden": 64, "inner": 128}, "bias": {"bias": True}, "tied": {"tied": True}}

    def write(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            model = tiny_llama(**own[kind]) if kind in own else family(kind)
            model.save_pretrained(made[kind])
            byte_tokenizer().save_pretrained(made[kind])
        return made[kind]

    return write


@pytest.mark.parametrize("seed", range(14, 14 + COUNT // 50))  # 24 and 27 have found something
def test_what_a_dry_run_allows_is_made_and_can_be_used(seed, models, text_file, tmp_path):
    draw = random.Random(seed)
    model, out = models(draw.choice(KINDS)), tmp_path / "out"
    names = draw.sample(list(OPTIONS), draw.choice((1, 2, 2, 3, 4)))
    chosen = [part for name in names for part in (name, draw.choice(OPTIONS[name])) if part is not None]
    data = draw.choice((("--data", text_file), ("--data", "self", "--eval-data", text_file)))
    steps = ("--steps", draw.choice((0, 1, 2)), "--start-tokens", 128)
    arguments = ("compress", "--model", model, *data, *steps, *SHORT, *chosen, "-o", out)
    planned, _, why = run(*arguments, "--dry-run")
    status, _, err = run(*arguments)
    assert (status, planned) in ((0, 0), (2, 2)), (arguments, why, err)
    if status:
        assert not out.exists()
        return
    assert load_file(out / "model.safetensors")
    for command in (
        ("inspect", out, "--verify"),
        ("eval", out, "--data", text_file, "--context", 32, "--max-windows", 1, "--device", "cpu"),
        ("report", out),
        ("export", out, "--to", "dense", "-o", tmp_path / "dense"),
    ):
        status, _, err = run(*command)
        assert status == 0, (arguments, command, err)
