"""The memory of building and exporting a model, measured from outside: the figures of scripts/bench_export.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from processes import PATIENCE_SECONDS

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_export.py"


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_holds_its_shards_and_one_layer_and_writes_what_one_process_writes(python, tmp_path):
    shape = ["--layers", "6", "--hidden", "768", "--inner", "2048", "--vocabulary", "2048"]
    subprocess.run(
        [python, str(SCRIPT), *shape, "--json", str(tmp_path / "figures.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHON_EXEC": str(python)},
        check=True,
        capture_output=True,
        timeout=PATIENCE_SECONDS,
    )
    result = json.loads((tmp_path / "figures.json").read_text())
    assert result["same_files"] is True
    for figures in result["sharded"]:
        layer_bytes, shard_bytes = figures["layer_bytes"], figures["shard_bytes"]
        assert shard_bytes < 0.6 * figures["model_bytes"]
        assert figures["export_beyond_runtime_bytes"] <= 1.2 * shard_bytes + layer_bytes
        assert figures["build_beyond_runtime_bytes"] <= 1.2 * shard_bytes + 1.5 * layer_bytes
    assert result["alone"]["export_growth_bytes"] <= result["alone"]["layer_bytes"]
