"""`--dry-run --time`: the phases of a run, measured by a model of one decoder layer."""

import json

import pytest

from edkm_cli.cli import main
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World
from edkm_cli.dryrun.duration import seconds_by_phase
from edkm_cli.dryrun.plan import dry_run
from edkm_cli.errors import UserError
from edkm_cli.preflight import plan_run
from families import family
from helpers import byte_tokenizer

SHORT = {"sequence_length": 32, "context": 32, "calibration_tokens": 64, "start_tokens": 64, "eval_windows": 2}


@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3"])
def test_one_layer_of_a_model_stands_for_its_run(name, tmp_path):
    family(name).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    plan = plan_run(CompressConfig(model=str(tmp_path / "model"), steps=2, device="cpu", **SHORT), World())
    found = seconds_by_phase(plan)
    assert set(found) == {"load", "evaluate", "teacher", "start", "train", "export"}
    assert min(found.values()) > 0


def test_more_steps_take_longer_and_none_no_training(model_directory, tmp_path, capsys):
    seconds = {}
    for steps in (0, 1000):
        flags = ["--steps", str(steps), "--json", str(tmp_path / "plan.json"), "--device", "cpu"]
        flags += [text for key, value in SHORT.items() for text in (f"--{key.replace('_', '-')}", str(value))]
        with pytest.raises(SystemExit) as stop:
            main(["compress", "--model", str(model_directory), "--data", "builtin", "--dry-run", "--time", *flags])
        assert not stop.value.code
        seconds[steps] = json.loads((tmp_path / "plan.json").read_text())["seconds"]
        assert "time      about " in capsys.readouterr().out
    assert "train" not in seconds[0]
    assert seconds[1000]["train"] > 10 * seconds[0]["export"]


def test_settings_of_the_whole_model_do_not_stop_the_measurement(model_directory):
    changes = {"text_tokens": 4000, "eval_every": 2, "keep_best": True, "skip": ("model.layers.1.*",)}
    changes |= {"long_records": "drop", "max_perplexity_ratio": 1.0, "compare_dense": True}
    plan = plan_run(CompressConfig(model=str(model_directory), steps=2, device="cpu", **SHORT, **changes), World())
    assert seconds_by_phase(plan)["dense"] > 0


def test_another_machine_cannot_be_timed(model_directory, capsys):
    config = CompressConfig(model=str(model_directory))
    with pytest.raises(UserError, match="--time measures one process on this machine"):
        dry_run(config, gpu_memory="24GiB", timed=True)
    with pytest.raises(SystemExit) as stop:
        main(["compress", "--model", str(model_directory), "--time"])
    assert stop.value.code == 2
    assert "--time are for --dry-run, which is not given" in capsys.readouterr().err
