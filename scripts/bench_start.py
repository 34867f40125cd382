"""Time the reconstructed start of one decoder layer by part, beside what the operations of each part allow, as JSON.

    python scripts/bench_start.py --json FILE                          LLaMA-7B's shape, 2,048 tokens
    python scripts/bench_start.py --device cuda --json FILE
    python scripts/bench_start.py --hidden 256 --intermediate 688 --heads 4 --tokens 512

The layer has random weights, and so has the text. Nothing is downloaded or written but the JSON. The functions are those of
`edkm compress`, each timed where it is called; what they call of each other counts once, as the innermost. `limit_seconds`
is the operations of a part by the speed that a large product reaches here in the precision that the part may use (bfloat16
factors where the processor has them, else float32). `cpu_seconds` is the process's time on all cores, which other work on
the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from edkm_cli.distributed import World
from edkm_cli.environment import hardware, peak_memory_bytes, versions
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity
from edkm_cli.initialize import build, compensate, corrections, importance, reconstruct
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.swap import plan_swaps
from edkm_cli.precision import multiplies_bfloat16
from edkm_cli.preflight import choose_dtype

# Part -> what is timed as that part: (where its name is looked up, the name).
TIMED: dict[str, list[tuple[Any, str]]] = {
    "importance": [],  # these two are given to `initialize`
    "k-means": [],
    "forwards": [(reconstruct._Block, "_run")],
    "products of inputs": [(corrections, "sum_of_products")],
    "factors": [(compensate, "inverse_factor")],
    "corrections": [(corrections.Corrections, "target")],
    "rounding": [(compensate, "compensated")],
    "tables": [(compensate, "fitted_tables")],
    "descent": [(compensate.kernels, "descend"), (compensate.Compensation, "_rounded")],
}
FLOAT32 = ("factors", "corrections", "rounding", "tables", "descent")  # others multiply bfloat16 where that is faster


class Stopwatch:
    """Seconds by part; the innermost part that runs is the one that counts."""

    def __init__(self, device: str) -> None:
        self._wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
        self.seconds: dict[str, float] = defaultdict(float)
        self.cpu_seconds: dict[str, float] = defaultdict(float)
        self._running = ["other"]
        self._since, self._cpu_since = time.perf_counter(), time.process_time()

    def _turn(self) -> None:
        self._wait()
        now, cpu = time.perf_counter(), time.process_time()
        self.seconds[self._running[-1]] += now - self._since
        self.cpu_seconds[self._running[-1]] += cpu - self._cpu_since
        self._since, self._cpu_since = now, cpu

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._turn()
            self._running.append(part)
            try:
                return function(*args, **kwargs)
            finally:
                self._turn()
                self._running.pop()

        return call


def operations(hidden: int, intermediate: int, tokens: int) -> dict[str, float]:
    """Multiplications and additions that a part needs at the least, for a layer of four square matrices and three more."""
    squares, wide = 4 * hidden**2, 3 * hidden * intermediate
    inputs = (hidden, hidden, hidden, intermediate)  # of q, k, v; o; gate, up; down
    work = (
        4.0 * hidden**3 + 2.0 * hidden**2 * intermediate + 1.0 * hidden * intermediate**2
    )  # out * in^2 of all matrices
    across = 2.0 * tokens * (squares + wide)
    return {
        "forwards": 2 * across,  # uncompressed and compressed
        "importance": 4 * across,  # forward twice, gradients of inputs, products of squares
        "products of inputs": sum(1.0 * tokens * width**2 for width in inputs),  # one triangle
        "factors": sum(width**3 / 3 for width in inputs),
        "corrections": min(2 * across + 2.0 * tokens**2 * (5 * hidden + 2 * intermediate), 2 * work),
        "rounding": work,
        "tables": work / 2,  # two rounds of sums of half of H by code
        "descent": 3 * 2 * work,  # what is wanted, and errors of two rounds
    }


def speeds(device: str) -> dict[str, float]:
    """Operations a second of a large product, by precision (bfloat16 where the processor multiplies it: others take
    minutes), and bytes a second of a copy."""
    found = {}
    for name in ("bfloat16", "float32", "float64")[not multiplies_bfloat16(device) :]:
        left = torch.randn(2048, 2048, device=device).to(getattr(torch, name))
        best = min(_seconds(lambda left=left: left @ left, device) for _ in range(4))
        found[f"{name}_operations_per_second"] = 2 * 2048**3 / best
    source = torch.zeros(2**26, device=device)
    found["copied_bytes_per_second"] = source.nbytes / min(_seconds(source.clone, device) for _ in range(4))
    return found


def _seconds(call: Callable[[], Any], device: str) -> float:
    watch = Stopwatch(device)
    watch.timed("", call)()
    return watch.seconds[""]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One layer, its parts timed."""
    hidden, intermediate, tokens, device = arguments.hidden, arguments.intermediate, arguments.tokens, arguments.device
    torch.manual_seed(arguments.seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=arguments.heads,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).eval().to(device, getattr(torch, choose_dtype("auto", device)))
    granularity = Granularity.parse("row:1")
    spec = QuantizationSpec(bits=3, granularity=granularity, lut_dtype="float16", embedding_bits=8)
    clustering = Clustering(bits=3, granularity=granularity, lut_dtype="float16")
    swaps = plan_swaps(model, embedding_bits=8)
    recipe = build.Recipe(swaps, spec, clustering, importance="gradient", average_bits=3.0, passes=0, holds=True)
    text = torch.randint(0, 512, (max(1, tokens // 512), min(tokens, 512)))
    watch = Stopwatch(device)
    with ExitStack() as timing:
        for part, places in TIMED.items():
            for where, name in places:
                timing.enter_context(mock.patch.object(where, name, watch.timed(part, getattr(where, name))))
        tables, collect = (
            watch.timed("k-means", build.shared_kmeans_starts),
            watch.timed("importance", importance.collect),
        )
        options: dict[str, Any] = {"calibration": [*text[:4].split(1)], "fitting": [*text.split(1)]}
        build.initialize(
            model, recipe, **options, world=World(device=device), steps=build.Steps(collect=collect, tables=tables)
        )
    needed, speed = operations(hidden, intermediate, tokens), speeds(device)
    plain = speed["float32_operations_per_second"]
    fast = speed.get("bfloat16_operations_per_second", plain)
    parts = []
    for part, seconds in sorted(watch.seconds.items(), key=lambda item: -item[1]):
        limit = needed.get(part, 0.0) / (plain if part in FLOAT32 else fast)
        row = {"part": part, "seconds": round(seconds, 3), "cpu_seconds": round(watch.cpu_seconds[part], 3)}
        parts.append({**row, "operations": needed.get(part), "limit_seconds": round(limit, 3)})
    return {
        "shape": {"hidden": hidden, "intermediate": intermediate, "heads": arguments.heads, "tokens": tokens},
        "seconds": round(sum(watch.seconds.values()), 3),
        "parts": parts,
        "peak_memory_bytes": peak_memory_bytes(device),
        "threads": torch.get_num_threads(),
        **speed,
        "hardware": hardware(device),
        "versions": versions(),
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=11008)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json must name a file in a directory that exists, got {arguments.json}")
    result = measure(arguments)
    for part in result["parts"]:
        seconds = f"{part['seconds']:9.2f} s, of all cores {part['cpu_seconds']:9.2f} s"
        print(f"{part['part']:20} {seconds}, limit {part['limit_seconds']:8.2f} s")
    print(f"{'all':20} {result['seconds']:9.2f} s")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
