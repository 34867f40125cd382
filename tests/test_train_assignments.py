"""Assignments that are held: weights stay with the entries of the start, while the entries move."""

from dataclasses import replace

import pytest
from safetensors.torch import load_file

from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.errors import Preempted
from edkm_cli.packing import unpack
from processes import stop_after


def test_a_run_that_learns_from_the_teacher_alone_holds_them_and_resumes_to_the_same(
    model_directory, text_file, tmp_path
):
    config = CompressConfig(
        model=str(model_directory), data=(str(text_file),), label_weight=0.0, output=str(tmp_path / "whole"), steps=4,
        sequence_length=32, calibration_tokens=64, start_tokens=256, context=32, eval_windows=1, save_every=2, device="cpu",
    )  # fmt: skip
    assert compress(config)["steps"] == 4
    stopped = replace(config, output=str(tmp_path / "stopped"))

    with pytest.raises(Preempted):
        compress(stopped, observer=stop_after(2))
    kept = stopped.output + ".partial/checkpoints/start/model.layers.0.safetensors"
    codes = {name: value for name, value in load_file(kept).items() if name.endswith("indices")}
    compress(stopped, resume=True)
    written = load_file(tmp_path / "stopped" / "model.safetensors")
    # Sorted tables rename entries: those that had one still share one.
    for name, before in codes.items():
        columns = 40 if "down_proj" in name else 24
        bits = 8 * before.shape[1] // columns
        pairs = zip(unpack(before, bits, columns).tolist(), unpack(written[name], bits, columns).tolist(), strict=True)
        assert all(len(set(zip(old, new, strict=True))) == len(set(old)) for old, new in pairs)
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == resumed
