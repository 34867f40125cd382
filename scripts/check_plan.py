"""Compare what `edkm compress --dry-run` says a run needs with what runs take, as JSON.

    python scripts/check_plan.py --model smollm2-135m --json FILE
    python scripts/check_plan.py --model DIRECTORY --data text.txt --case "--sequence-length 512 --batch-size 2"

Each case is a set of flags. It is planned in one process and run, for two steps, in another: on a CPU the peak is that of
the process (resident memory), on a GPU that of its allocator. The ratio is estimate by measurement.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from edkm_cli.environment import hardware, versions

# Two steps, because the second has moments from its beginning; two calibration sequences, because the second finds sums.
# --memory small: the peak is then what tensors need, which is what a plan counts best.
SHORT = "--steps 2 --calibration-tokens 2048 --eval-windows 1 --context 512 --save-every 0 --memory small"
CASES = (
    "",
    "--gradient-checkpointing",
    "--label-weight 0",
    "--label-weight 0 --no-gradient-checkpointing",
    "--no-distill --sequence-length 512 --batch-size 2",
    "--dtype bfloat16",
    "--steps 0 --context 1024",
)


def edkm(arguments: list[str], result: Path) -> dict[str, Any]:
    """The JSON of an `edkm` command in a process of its own. Raises RuntimeError with its last words."""
    command = [sys.executable, "-m", "edkm_cli", *arguments, "--json", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")
    return json.loads(result.read_text(encoding="utf-8"))


def compare(case: str, common: list[str], folder: Path) -> dict[str, Any]:
    """One case: both peaks, their ratio, and what the estimate consists of."""
    flags = [*common, *shlex.split(case)]
    planned = edkm(["compress", *flags, "--dry-run"], folder / "plan.json")
    run = edkm(["compress", *flags, "--output", str(folder / "out"), "--overwrite"], folder / "run.json")
    estimated = dict(planned["peak_memory_bytes"])
    if planned["device"] != "cpu":  # the allocator does not count CUDA's own memory
        estimated["total"] -= estimated.pop("runtime")
    measured = run["peak_memory_bytes"]
    return {
        "case": case,
        "estimated_bytes": estimated["total"],
        "measured_bytes": measured,
        "ratio": round(estimated["total"] / measured, 4),
        "parts": {part: size for part, size in estimated.items() if size and part != "total"},
        "phases": planned["phases"],
        "seconds": run["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", default="builtin", help="default: builtin, whose labels are learnt, too")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--case", action="append", help="flags of a case (repeatable); default: seven cases")
    parser.add_argument("--short", default=SHORT, help="flags of all cases; default: two steps and little text")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json must name a file in a directory that exists, got {arguments.json}")
    common = ["--model", arguments.model, "--device", arguments.device, "--data", arguments.data]
    common += shlex.split(arguments.short)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in arguments.case or CASES:
            row = compare(case, common, Path(folder))
            rows.append(row)
            sizes = f"{row['estimated_bytes'] / 1e6:8.0f} MB estimated, {row['measured_bytes'] / 1e6:8.0f} MB measured"
            print(f"{row['ratio']:6.3f}  {sizes}  {case or '(defaults)'}", flush=True)
            result = {
                "command": "python scripts/check_plan.py " + shlex.join(sys.argv[1:]),
                "flags_of_all": arguments.short,
                "rows": rows,
                "versions": versions(),
                "hardware": hardware("cpu" if arguments.device == "auto" else arguments.device),
            }
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
