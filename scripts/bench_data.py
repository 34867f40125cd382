"""Measure what tokenizing a large JSON Lines file takes, as JSON: memory, throughput by processes, and a second start.

    python scripts/bench_data.py --json FILE                          2 GB, once by all cores, and a second start
    python scripts/bench_data.py --megabytes 60 --workers 1 --workers 2    how throughput grows with processes
    python scripts/bench_data.py --work DIR --generate    make the text, in DIR, to be measured from there later

Records of about 2 KB are made of the sentences of Python's documentation in a seeded order. Each measurement is a process
of its own, as a run is: it imports the libraries and loads the tokenizer (what it holds then is the libraries'), tokenizes
the file through `open_training_data` into an empty cache, and takes a batch. Memory is the kernel's: the peak (VmHWM) of
that process and of each worker, and the proportional share (PSS) of all of them together, sampled. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from edkm_cli import models
from edkm_cli.config import TextSettings
from edkm_cli.data import open_training_data, parse_sources
from edkm_cli.data.splits import builtin_texts
from edkm_cli.environment import hardware, versions
from edkm_cli.files import write_json

_RECORD_CHARACTERS = 2000
_LIMIT_BYTES = 10**9


def generate(path: Path, size_bytes: int) -> None:
    """Write records of shuffled sentences, each with a number of its own, until the file has so many bytes."""
    sentences = [s.strip() for text in builtin_texts() for s in re.split(r"(?<=[.:])\s+", text) if len(s) > 20]
    draw, written, number = random.Random(0), 0, 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size_bytes:
            parts, length = [f"Document {number}."], 0
            while length < _RECORD_CHARACTERS:
                parts.append(draw.choice(sentences))
                length += len(parts[-1])
            written += file.write(json.dumps({"text": " ".join(parts)}) + "\n")
            number += 1


class Memory:
    """Peaks of a process and its children while a thread samples them, in bytes."""

    def __init__(self, pid: int):
        self._pid = pid
        self.process = self.worker = self.together = 0
        self._running = True
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._running:
            children = _children(self._pid)
            self.process = max(self.process, _field(self._pid, "status", "VmHWM"))
            self.worker = max([self.worker, *(_field(child, "status", "VmHWM") for child in children)])
            shares = sum(_field(pid, "smaps_rollup", "Pss") for pid in [self._pid, *children])
            self.together = max(self.together, shares)
            time.sleep(0.2)

    def stop(self) -> None:
        self._running = False
        self._thread.join()


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _field(pid: int, file: str, name: str) -> int:
    """A field of /proc in bytes; 0 where the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    except (OSError, StopIteration):
        return 0


def start_once(data: Path, model: str, workers: int) -> dict[str, Any]:
    """In a process of its own: open the data, from the cache or not, and take a batch."""
    tokenizer = models.load_tokenizer(models.resolve(model))
    tokenizer(builtin_texts()[0])
    libraries = {
        "peak_bytes": _field(os.getpid(), "status", "VmHWM"),
        "pss_bytes": _field(os.getpid(), "smaps_rollup", "Pss"),
    }
    said: list[str] = []
    memory, begin = Memory(os.getpid()), time.perf_counter()
    opened = open_training_data(
        parse_sources([str(data)]), tokenizer, options=TextSettings(data_workers=workers), say=said.append
    )
    opened.blocks(1024, seed=0).batch(0, 8)
    seconds = time.perf_counter() - begin
    memory.stop()
    return {
        "tokenized": bool(said),
        "seconds": seconds,
        "tokens": opened.tokens,
        "sha256": opened.sha256,
        "libraries_bytes": libraries["peak_bytes"],
        "process_beyond_libraries_bytes": max(memory.process - libraries["peak_bytes"], 0),
        "largest_worker_bytes": memory.worker,
        "all_processes_beyond_libraries_bytes": max(memory.together - libraries["pss_bytes"], 0),
    }


def measure(data: Path, cache: Path, model: str, workers: int) -> dict[str, Any]:
    """`start_once` in a process of its own."""
    command = [sys.executable, __file__, "--once", str(data), "--model", model, "--workers", str(workers)]
    environment = {**os.environ, "EDKM_TOKEN_CACHE": str(cache)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"bench_data.py: {done.stderr.strip()[-1000:]}")
    return {"workers": workers, **json.loads(done.stdout.splitlines()[-1])}


def bench(megabytes: int, workers: list[int], model: str, work: Path) -> dict[str, Any]:
    """Rows: for each number of workers a first start, with an empty cache, and a second one."""
    data = work / "data.jsonl"
    if not data.exists():
        generate(data, megabytes * 10**6)
    size = data.stat().st_size
    rows = []
    for count in workers:
        cache = work / f"cache-{count}"
        shutil.rmtree(cache, ignore_errors=True)
        for row in (measure(data, cache, model, count) for _ in range(2)):
            if row["tokenized"]:
                row["megabytes_per_second"] = size / row["seconds"] / 1e6
            rows.append(row)
            print(json.dumps(row), flush=True)
    most = max(row["all_processes_beyond_libraries_bytes"] for row in rows)
    first = [row["megabytes_per_second"] for row in rows if row["tokenized"]]
    return {
        "data_bytes": size,
        "second_start_seconds": max(row["seconds"] for row in rows if not row["tokenized"]),
        "rows": rows,
        "most_beyond_libraries_bytes": most,
        "within_1_gb": most <= _LIMIT_BYTES,
        "throughput_ratio": first[-1] / first[0] if len(first) > 1 else None,
        "command": f"python scripts/bench_data.py --megabytes {megabytes} "
        + " ".join(f"--workers {count}" for count in workers),
        "versions": versions(),
        "hardware": hardware("cpu"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument(
        "--workers", type=int, action="append", help="processes that tokenize; repeatable (0: all cores)"
    )
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer")
    parser.add_argument("--work", type=Path, help="directory where data and cache stay; default: a temporary one")
    parser.add_argument("--generate", action="store_true", help="only make the text in --work")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(start_once(options.once, options.model, options.workers[0])))
        return 0
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    elif options.generate:
        parser.error("--generate needs --work, where the text stays")
    if options.generate:
        generate(options.work / "data.jsonl", options.megabytes * 10**6)
        return 0
    with tempfile.TemporaryDirectory(prefix="edkm-bench-data-") as work:
        result = bench(options.megabytes, options.workers or [0], options.model, options.work or Path(work))
    if options.json:
        write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
