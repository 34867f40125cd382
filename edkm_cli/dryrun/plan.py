"""`--dry-run`: what a run would swap, write and need, and what to change if that is too much.

From the configuration alone: the run's own plan (`edkm_cli.preflight`) is rehearsed on the meta device, for this machine
or for GPUs that are named. Where it does not fit, other settings are rehearsed in the same way; those that fit are
proposed, the least different first. A run uses the same rehearsal to decide whether it can keep freed memory for speed.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from edkm_cli import data, models
from edkm_cli.config import CompressConfig, lengths_of, too_long
from edkm_cli.distributed import World
from edkm_cli.dryrun.duration import seconds_by_phase
from edkm_cli.dryrun.need import Machine, by_part, choose_machine, estimate, least, memory_of, process_bytes, with_heap
from edkm_cli.errors import UserError
from edkm_cli.export.checkpoint import rehearse_export
from edkm_cli.granularity import FREE, Override
from edkm_cli.nn.allocation import SENSITIVITY, other_bytes
from edkm_cli.nn.swap import EMBEDDING, decoder_bits_per_weight
from edkm_cli.preflight import RunPlan, choose_dtype, plan_run


def dry_run(
    config: CompressConfig, *, gpu_memory: str | None = None, gpus: int | None = None, timed: bool = False
) -> dict[str, Any]:
    """The plan of a run as the JSON of `edkm compress --dry-run` (its keys: docs/results.md).

    Args:
        gpu_memory: plan for GPUs with that much memory each (`24GiB`), whatever this machine has.
        timed: run one decoder layer to say how long all takes, here.

    `phases` are the highest totals of each phase, of tensors alone. Raises UserError for settings that no run could have.
    """
    machine = choose_machine(config, gpu_memory, gpus)
    if timed and (gpu_memory is not None or machine.world.size > 1):
        raise UserError("--time measures one process on this machine, got another to plan for; leave it out")
    plan = plan_run(config, machine.world)
    rehearse_export(plan)
    runtime_bytes = process_bytes(plan)
    need = estimate(plan, runtime_bytes)
    memory = memory_of(config, need, machine)
    need = with_heap(need) if memory == "speed" else need
    fits = need.fits(machine)
    return {
        "model": config.model,
        "modules": _grouped(plan),
        "skipped": [swap.to_mapping() for swap in plan.swaps if swap.reason],
        "peak_memory_bytes": by_part(need.device),
        "phases": need.device.phases,
        **({"host_memory_bytes": by_part(need.host), "host_phases": need.host.phases} if need.host else {}),
        **({"seconds": seconds_by_phase(plan)} if timed else {}),
        **({"not_counted": need.not_counted} if need.not_counted else {}),
        **({"warnings": warnings} if (warnings := too_long(plan.architecture, lengths_of(config))) else {}),
        "memory": memory,
        "weights_bytes": weights_bytes(plan),
        "original_weights_bytes": 2 * plan.parameters,
        "decoder_bits_per_weight": decoder_bits_per_weight(plan.swaps, plan.spec, _dense_sizes(plan)),
        "steps": config.steps,
        "sequences_per_step": plan.config.step_sequences(plan.world.size),
        "training_tokens": plan.training_tokens,
        "device": plan.world.device,
        "processes": plan.world.size,
        "sharded": plan.world.sharded,
        "available_bytes": machine.memory_bytes,
        "available_host_bytes": machine.host_bytes,
        "fits": fits,
        "proposals": [] if fits else proposals(plan, machine, runtime_bytes),
        "config": asdict(config),
        "resolved": plan.resolved,
    }


def weights_bytes(plan: RunPlan) -> int:
    """Of the exported files, without their headers."""
    tensors = [pair for s in plan.clustered for pair in plan.spec.linear_tensors(*s.shape[:2], layer=s.name).values()]
    linears = sum(kind.itemsize * math.prod(shape) for kind, shape in tensors)
    return linears + other_bytes(plan.skeleton, plan.swaps, plan.spec, _dense_sizes(plan))


def _dense_sizes(plan: RunPlan) -> Callable[[str], int]:
    return models.dense_sizes(plan.source, plan.architecture, plan.dense_dtype)


def _grouped(plan: RunPlan) -> list[dict[str, Any]]:
    """The swapped modules, counted by role, shape and override."""
    config, counts = plan.config, Counter[tuple[str, tuple[int, ...], str]]()
    on_average = f"{plan.average:.2f} bits on average, by sensitivity"
    other_bits = on_average if config.allocation == SENSITIVITY else f"{config.bits}-bit indices"
    tables = "LUT" if config.palette == FREE else f"scales of {config.palette} tables"
    for swap in plan.swaps:
        if swap.clustered:
            own = Override.of(config.overrides, swap.name)
            bits = f"{own.bits}-bit indices (override)" if own.bits else other_bits
            becomes = f"{bits}, {config.lut_dtype} {tables}, {plan.spec.granularity_of(swap.name)}"
            counts[swap.role, swap.shape, becomes + " (override)" * bool(own.granularity)] += 1
        elif not swap.reason:
            counts[swap.role, swap.shape, ""] += 1
    other = f"{plan.spec.embedding_widths} bits, a float32 scale "
    other += f"for {config.embedding_group} columns" if config.embedding_group else "a row"
    return [
        {"role": role, "shape": list(shape), "count": count, "becomes": becomes or other}
        for (role, shape, becomes), count in sorted(counts.items(), key=lambda item: (item[0][0] == EMBEDDING, item[0]))
    ]


_MOST_PROPOSALS, _MOST_REHEARSALS = 3, 6
Change = tuple[str, dict[str, Any]]  # flags, and the settings that they are


def proposals(plan: RunPlan, machine: Machine, runtime_bytes: int) -> list[dict[str, Any]]:
    """Settings that fit, the least different first: flags, number of processes, and what they need."""
    fitting: list[dict[str, Any]] = []
    enough: list[set[str]] = []
    rehearsed = 0
    for names, changes, world in _alternatives(plan):
        if any(less <= names for less in enough):
            continue
        values = {key: value for _, settings in changes for key, value in settings.items()}
        try:
            other = plan_run(replace(plan.asked, **values), world, like=plan)
        except UserError:  # a combination that no run could have
            continue
        there = replace(machine, world=world)
        if not least(other).fits(there):
            continue
        need = estimate(other, runtime_bytes)
        need = with_heap(need) if other.config.memory == "speed" else need
        rehearsed += 1
        if need.fits(there):
            host = {"host_total_bytes": need.host.total} if need.host else {}
            flags, count = " ".join(flags for flags, _ in changes), world.size
            fitting.append({"flags": flags, "processes": count, "total_bytes": need.device.total, **host})
            enough.append(names)
        if len(fitting) == _MOST_PROPOSALS or rehearsed == _MOST_REHEARSALS:
            break
    return fitting


def _alternatives(plan: RunPlan) -> Iterator[tuple[set[str], list[Change], World]]:
    """(names of the changes, the changes, where) in the order in which they are worth a try."""
    changes, config, world = _changes(plan), plan.asked, plan.world
    for names in _COMBINATIONS:
        if all(name in changes for name in names):
            sharded = world.sharded or "shard" in names
            yield set(names), [changes[name] for name in names], replace(world, sharded=sharded)
    if world.gpu and config.steps:
        shard: Change = ("--sharding full", {"sharding": "full"})
        more = [shard, *(changes[name] for name in ("checkpoint", "batch") if name in changes)]
        for processes in (count for count in (2, 4, 8, 16, 32) if count > world.size):
            yield {"more"}, more, replace(world, size=processes, sharded=True)


def _changes(plan: RunPlan) -> dict[str, Change]:
    """What could be changed, by name: (flags, settings)."""
    config, world = plan.asked, plan.world
    sequences, trains = config.step_sequences(), config.steps > 0
    # fmt: off
    candidates: dict[str, tuple[bool, str, dict[str, Any]]] = {
        "memory": (not world.gpu and config.memory == "speed", "--memory small", {"memory": "small"}),
        "checkpoint": (trains and not config.gradient_checkpointing,
                       "--gradient-checkpointing", {"gradient_checkpointing": True}),
        "batch": (trains and config.batch_size > 1, f"--batch-size 1 --gradient-accumulation {sequences}",
                  {"batch_size": 1, "gradient_accumulation": sequences}),
        "shard": (world.size > 1 and not world.sharded, "--sharding full", {"sharding": "full"}),
        "offload": (trains and world.gpu and config.offload == "none", "--offload cpu", {"offload": "cpu"}),
        "held": (trains and not config.label_weight, "--assignments held", {"assignments": "held"}),
        "dtype": (choose_dtype(config.dtype, world.device) == "float32", "--dtype bfloat16", {"dtype": "bfloat16"}),
        "data": (plan.writes_text, "--data FILE" + " --label-weight 0" * trains,
                 {"data": (data.BUILTIN,), **({"label_weight": 0.0} if trains else {})}),
        "importance": (config.importance == "gradient", "--importance activation", {"importance": "activation"}),
    }
    # fmt: on
    return {name: (flags, values) for name, (possible, flags, values) in candidates.items() if possible}


# fmt: off
_COMBINATIONS = [tuple(names.split("+")) for names in (
    "memory", "data", "checkpoint", "batch", "checkpoint+batch", "offload", "shard", "shard+checkpoint",
    "shard+checkpoint+batch", "importance", "checkpoint+importance", "held", "held+checkpoint", "held+batch",
    "held+checkpoint+batch", "held+checkpoint+importance", "dtype", "data+dtype", "data+importance", "dtype+checkpoint",
    "dtype+held+checkpoint", "dtype+held+checkpoint+importance",
)]
# fmt: on
