"""Other settings for runs that do not fit: whatever is asked for, a plan comes back."""

import psutil
import pytest
from torch import nn

from edkm_cli.config import CompressConfig
from edkm_cli.dryrun.plan import dry_run
from edkm_cli.environment import group_limits, physical_bytes
from edkm_cli.summaries import summary
from helpers import tiny_llama


@pytest.mark.parametrize("machine", [{"gpu_memory": "1KB"}, {"gpu_memory": "1KB", "gpus": 2}, {}], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"compare_dense": True},
        {"assignments": "held"},
        {"start": "reconstructed"},
        {"start": "compensated"},
        {"start": "kmeans"},
        {"allocation": "sensitivity"},
        {"bits": 3.5},
        {"bits": 3.5, "assignments": "held", "compare_dense": True, "start": "reconstructed"},
        {"target": "any-precision", "embedding_bits": 16},
        {"mode": "soft", "dtype": "bfloat16"},
        {"assignments": "held", "offload": "cpu"},
        {"data": ("self",), "compare_dense": True},
        {"steps": 0, "bits": 2.5},
    ],
    ids=str,
)
def test_a_plan_that_does_not_fit_is_told_and_not_refused(tmp_path_factory, machine, changes, monkeypatch):
    """Other settings are tried, among them combinations that no run could have: they are left out."""
    monkeypatch.setattr("edkm_cli.dryrun.need.physical_bytes", lambda: 1000)  # none of them is rehearsed
    shape = {
        "sequence_length": 64,
        "context": 64,
        "calibration_tokens": 64,
        "start_tokens": 64,
        "batch_size": 2,
        "steps": 2,
    }
    directory = tmp_path_factory.getbasetemp() / "even"
    if not directory.exists():
        tiny_llama(hidden=32, inner=64).save_pretrained(directory)
    values = {"model": str(directory), "data": ("builtin",), "device": "auto", **shape, **changes}
    found = dry_run(CompressConfig(**values), **machine)
    assert (found["fits"], found["proposals"]) == (False, [])
    assert "none of the other settings tried fits either" in summary("plan", found)


def test_a_container_s_limit_counts_as_the_machine_s_memory(tmp_path):
    second = tmp_path / "jobs" / "7"
    second.mkdir(parents=True)
    (second / "memory.max").write_text("max\n")
    (second.parent / "memory.max").write_text("4096\n")
    first = tmp_path / "memory" / "docker" / "a"
    first.mkdir(parents=True)
    (first / "memory.limit_in_bytes").write_text("8192\n")
    assert list(group_limits("0::/jobs/7\n", tmp_path)) == [4096]
    assert list(group_limits("5:cpu:/\n4:memory:/docker/a\n", tmp_path)) == [8192]
    assert list(group_limits("0::/\n", tmp_path)) == []
    (tmp_path / "slice:cri:12").mkdir()
    (tmp_path / "slice:cri:12" / "memory.max").write_text("512\n")
    assert list(group_limits("0::/slice:cri:12\n", tmp_path)) == [512]
    assert physical_bytes() <= psutil.virtual_memory().total


def test_text_is_planned_with_layers_that_are_rounded_as_they_are_read(tmp_path, monkeypatch):
    model = tiny_llama(hidden=256, inner=512)
    model.save_pretrained(tmp_path / "model")
    config = CompressConfig(model=str(tmp_path / "model"), data=("self",), steps=0, device="cpu", output="out")
    totals = {}
    monkeypatch.setattr("edkm_cli.self_text._CACHE_BYTES", 0)  # so that weights are most of it
    for rounds in (False, True):
        monkeypatch.setattr("edkm_cli.dryrun.rehearsal.multiplies_bfloat16", lambda kind, rounds=rounds: rounds)
        totals[rounds] = dry_run(config)["phases"]
    linears = {name: module.weight.numel() for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = linears.pop("lm_head")
    saved = totals[False]["text"] - totals[True]["text"]
    assert saved == pytest.approx(2 * sum(linears.values()) - 2 * head, rel=0.01)  # of the head there are both
    assert totals[True]["load"] == totals[False]["load"] < 4 * (sum(linears.values()) + 2 * head)  # never all of them
