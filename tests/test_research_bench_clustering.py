"""The benchmark measures every method and names the keys that other things read."""

import json

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.research.bench.clustering import format_table, run
from edkm_cli.research.bench.config import ClusteringBench
from helpers import refused


def test_a_small_run_has_every_row_and_key():
    messages = []
    result = run(
        ClusteringBench(device="cpu", width=128, tokens=16, granularity=("tensor", "row:1")), log=messages.append
    )
    json.dumps(result)
    methods = [(row["method"], row.get("granularity")) for row in result["rows"]]
    assert ("dense", "tensor") in methods
    assert {("fused", g) for g in ("tensor", "row:1")} <= set(methods)
    assert {("straight-through", g) for g in ("tensor", "row:1")} <= set(methods)
    for row in result["rows"]:
        if "skipped" in row:
            assert row["method"] == "coremltools"
            continue
        assert row["forward_seconds"] > 0
        assert row["backward_seconds"] > 0
        assert row["saved_bytes_per_weight"] == 0 or row["method"] in ("dense", "coremltools")
    assert result["linear_forward_backward_seconds"] > 0
    assert {"command", "versions", "hardware"} <= result.keys()
    assert messages
    assert (
        len(format_table(result).splitlines()) == len(result["rows"]) + 3
    )  # heads, a rule, and what it is compared with


def test_what_is_not_there_is_a_user_error():
    with pytest.raises(UserError, match="dtype"):
        ClusteringBench(dtype="int8")
    if not torch.cuda.is_available():
        assert "'cuda' is not available" in refused("bench", "clustering", "--device", "cuda")
