"""Measure a training step of a randomly initialised LLaMA, clustered and plain, as JSON.

    python scripts/bench_training.py --shape llama-7b --mode held --memory-limit 24GiB --json FILE
    python scripts/bench_training.py --shape llama-7b --mode full --json FILE
    python scripts/bench_training.py                       a tiny shape on a CPU: the same code

Nothing is downloaded and no weight is written: the shape is `tiny` or an alias of configs/models.yaml. Both variants are
trained by `edkm_cli.train.loop`, the loop of `edkm compress`, each in a process of its own, with the same optimizer, losses,
checkpointing and 8-bit embeddings. `clustered` has `ClusteredLinear` where `plain` has `nn.Linear` (mode `held`:
`HeldLinear`). Only steps are measured, so LUTs start at the quantiles that normally distributed weights have.

    python scripts/bench_training.py --shape smollm2-135m --no-gradient-checkpointing --sequence-length 1024 --json FILE
                                                           what clustering costs a step of full fine-tuning on a CPU

Times: `step_seconds` is the median of wall time, `step_cpu_seconds` that of the process's time on all cores, which other
work on the machine disturbs less; `kernel_share` is the part of it that the operating system took, for page faults above
all (`step_page_faults`). `--memory` sets the C library's allocator as `edkm compress --memory` does.

`--memory-limit` bounds what PyTorch may allocate on the GPU; a variant that does not fit is reported, and if it is the
clustered one, the exit status is 1. On a CPU the peak is that of the process, Python and libraries included.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from edkm_cli.allocator import keep_freed_blocks, return_large_blocks
from edkm_cli.clustering.grids import Grid
from edkm_cli.config import CompressConfig
from edkm_cli.data import Blocks
from edkm_cli.distributed import World, open_world
from edkm_cli.dryrun.need import choose_memory, parse_bytes
from edkm_cli.dryrun.plan import dry_run
from edkm_cli.environment import hardware, peak_memory_bytes, versions
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.initialize.build import Recipe, Steps, initialize
from edkm_cli.kernels import to_groups
from edkm_cli.nn.parts import Parts
from edkm_cli.preflight import RunPlan, choose_device, choose_dtype, plan_run
from edkm_cli.train.loop import train
from edkm_cli.train.losses import Objective

VARIANTS = ("plain", "clustered")
TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}


def byte_count(text: str) -> int:
    """24GiB -> 25769803776."""
    try:
        return parse_bytes(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(f"must be a size like 24GiB, got {text!r}") from error


def settings(arguments: argparse.Namespace, directory: Path) -> CompressConfig:
    """What `edkm compress` would be told. `directory` gets the config.json of a shape that is no alias."""
    model = arguments.shape
    if model == "tiny":
        (directory / "config.json").write_text(json.dumps(TINY))
        model = str(directory)
    device = choose_device(arguments.device)
    config = CompressConfig(
        model=model,
        bits=arguments.bits,
        granularity=arguments.granularity,
        embedding_bits=arguments.embedding_bits,
        importance="none",
        steps=arguments.warmup + arguments.steps,
        batch_size=arguments.batch_size,
        sequence_length=arguments.sequence_length,
        context=arguments.sequence_length,
        distill=False,
        assignments="held" if arguments.mode == "held" else "free",
        gradient_checkpointing=arguments.gradient_checkpointing,
        dtype=choose_dtype(arguments.dtype, device),
        device=device,
        learning_rate=1e-5,
        lut_learning_rate=1e-5,
        save_every=0,
        memory=arguments.memory,
    )
    return replace(config, memory=choose_memory(plan_run(config, World(device=device))))


def quick_start(
    weight: torch.Tensor, grid: Grid, widths: Sequence[int], *, granularity: Granularity, **others: Any
) -> list[torch.Tensor]:
    """Centroids (groups, k) at evenly spaced quantiles of the normal distribution of each group: a start in no time."""
    values = to_groups(weight, granularity.tile(*weight.shape)).float()
    deviation, mean = torch.std_mean(values, 1, keepdim=True)
    spots = [(torch.arange(2**bits, device=weight.device) + 0.5) / 2**bits for bits in widths]
    return [mean + deviation * torch.special.ndtri(places) for places in spots]


class KeptStates:
    """The teacher that a run has: last hidden states that were kept, here random ones, and a frozen output head."""

    def __init__(self, model: Any, config: CompressConfig):
        self._parts = Parts(model, frozen=True)
        shape = (config.batch_size, config.sequence_length, model.config.hidden_size)
        self._states = torch.randn(shape, dtype=self._parts.dtype, device=config.device)

    def states(self, batch: Any) -> torch.Tensor:
        return self._states[: len(batch.ids)]

    @torch.no_grad()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self._parts.logits(states)


def build(plan: RunPlan, variant: str) -> tuple[Any, Objective]:
    """(model, what it is trained on), random, on the device from the beginning: no copy is ever in host memory."""
    config, recipe = plan.config, Recipe.of(plan)
    torch.manual_seed(config.seed)
    with torch.device(config.device):
        model = transformers.AutoModelForCausalLM.from_config(
            copy.deepcopy(plan.architecture), dtype=getattr(torch, config.dtype)
        ).eval()
    if variant == "plain":
        others = [swap for swap in plan.swaps if not swap.clustered]
        recipe = replace(recipe, swaps=others, holds=False)
    teacher = KeptStates(model, config) if plan.distills else None
    model = initialize(model, recipe, steps=Steps(tables=quick_start))
    return model, Objective(teacher, config.label_weight or 0.0)


class Tick(NamedTuple):
    """Clocks of this process: seconds of wall time, and on all cores in programs and in the kernel; page faults."""

    wall: float
    user: float
    system: float
    faults: int

    @classmethod
    def now(cls) -> Tick:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.perf_counter(), usage.ru_utime, usage.ru_stime, usage.ru_minflt)

    def since(self, before: Tick) -> Tick:
        return Tick(*(after - start for after, start in zip(self, before, strict=True)))


def measure(config: CompressConfig, variant: str, warmup: int, memory_limit_bytes: int | None) -> dict[str, Any]:
    """Train one variant, in this process. Returns its row."""
    gpu = config.device.startswith("cuda")
    choose_device(config.device)  # whose limits, kernels and peaks are those of the current one
    world = open_world(config.device, sharding="none", timeout_minutes=1)
    if memory_limit_bytes is not None:
        fraction = memory_limit_bytes / torch.cuda.get_device_properties(config.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(fraction, 1.0))
    if not gpu:
        set_allocator = return_large_blocks if config.memory == "small" else keep_freed_blocks
        set_allocator()
    ticks: list[Tick] = []

    def tick() -> None:
        if gpu:
            torch.cuda.synchronize()
        ticks.append(Tick.now())

    def track(items: Iterable[Any], description: str, total: int) -> Iterator[Any]:
        for item in items:
            tick()
            yield item
        tick()

    row: dict[str, Any] = {"variant": variant}
    try:
        plan = plan_run(config, World(device=config.device))
        model, objective = build(plan, variant)
        if gpu:
            torch.cuda.empty_cache()
            row["bytes_before"] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        tokens = torch.randint(model.config.vocab_size, (8 * config.batch_size * config.sequence_length,))
        blocks = Blocks(tokens, config.sequence_length, seed=config.seed)
        with tempfile.TemporaryDirectory() as staging:
            train(
                model,
                objective,
                blocks,
                config,
                world=world,
                staging=Path(staging),
                mixed_precision=plan.config.mixed_precision,
                track=track,
            )
    except torch.cuda.OutOfMemoryError as error:
        return {**row, "error": "out of memory: " + str(error).splitlines()[0]}
    steps = [after.since(before) for before, after in pairwise(ticks)][warmup:]
    median = statistics.median(step.wall for step in steps)
    return {
        **row,
        "peak_memory_bytes": peak_memory_bytes(config.device),
        **({"peak_reserved_bytes": torch.cuda.max_memory_reserved()} if gpu else {}),
        "step_seconds": median,
        "all_step_seconds": [round(step.wall, 4) for step in steps],
        "step_cpu_seconds": statistics.median(step.user + step.system for step in steps),
        "kernel_share": sum(step.system for step in steps) / max(sum(step.user + step.system for step in steps), 1e-9),
        "step_page_faults": statistics.median(step.faults for step in steps),
        "tokens_per_second": config.batch_size * config.sequence_length / median,
    }


def planned_bytes(config: CompressConfig) -> int:
    """What `--dry-run` expects of this run's training: of the whole process on a CPU, of tensors on a GPU."""
    plan = dry_run(config)
    return plan["phases"]["training"] + (
        0 if config.device.startswith("cuda") else plan["peak_memory_bytes"]["runtime"]
    )


def bench(config: CompressConfig, warmup: int, memory_limit_bytes: int | None) -> dict[str, Any]:
    """All rows, their ratios, and the plan."""
    rows = []
    for variant in VARIANTS:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(measure, config, variant, warmup, memory_limit_bytes).result())
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result: dict[str, Any] = {"rows": rows, "planned_peak_memory_bytes": planned_bytes(config)}
    plain, clustered = rows
    if not any("error" in row for row in rows):
        for name in ("peak_memory_bytes", "step_seconds", "step_cpu_seconds", "tokens_per_second"):
            result[f"{name}_ratio"] = clustered[name] / plain[name]
    if "error" not in clustered:
        result["planned_over_measured"] = result["planned_peak_memory_bytes"] / clustered["peak_memory_bytes"]
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--shape", default="tiny", help="tiny, or an alias of configs/models.yaml")
    parser.add_argument("--mode", choices=("full", "held"), default="full")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--granularity", default="row:1")
    parser.add_argument("--embedding-bits", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--gradient-checkpointing", action=switch, default=True)
    parser.add_argument("--dtype", default="auto", help="auto: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--memory", choices=("auto", "speed", "small"), default="auto", help="as of edkm compress")
    parser.add_argument("--steps", type=int, default=5, help="steps that count; their median is reported")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--memory-limit", type=byte_count, help="of the GPU's memory, for example 24GiB")
    parser.add_argument("--json", type=Path, help="where the result goes; the default is to print it")
    arguments = parser.parse_args()
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json must name a file in a directory that exists, got {arguments.json}")
    return arguments


def main() -> int:
    """Parse, measure, write."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as directory:
        try:
            config = settings(arguments, Path(directory))
            if arguments.memory_limit is not None and not config.device.startswith("cuda"):
                raise UserError(f"--memory-limit needs a GPU, but the device is {config.device}; leave it out")
            result = bench(config, arguments.warmup, arguments.memory_limit)
        except UserError as error:
            print(f"bench_training.py: {error}", file=sys.stderr)
            return 2
    result = {
        "command": " ".join(["python scripts/bench_training.py", *sys.argv[1:]]),
        "memory_limit_bytes": arguments.memory_limit,
        "config": vars(replace(config, model=arguments.shape)),
        **result,
        "versions": versions(),
        "hardware": hardware(config.device),
    }
    text = json.dumps(result, indent=1)
    if arguments.json is None:
        print(text)
    else:
        arguments.json.write_text(text + "\n")
    return 1 if "error" in result["rows"][-1] else 0


if __name__ == "__main__":
    sys.exit(main())
