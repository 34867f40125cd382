"""`--dry-run`: what a run would swap, write and need, and what to change if that is too much.

From the configuration alone: the run's own plan (`edkm_cli.preflight`) is rehearsed on the meta device, for this machine
or for GPUs that are named. Where it does not fit, other settings are rehearsed in the same way; those that fit are
proposed. A run uses the same rehearsal to decide whether it can keep freed memory for speed.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

import torch

from edkm_cli import models
from edkm_cli.config import CompressConfig
from edkm_cli.dryrun.ledger import Peak
from edkm_cli.dryrun.machine import choose_machine, this_machine
from edkm_cli.dryrun.meta import PARTS
from edkm_cli.dryrun.need import HEAP, RUNTIME, estimate, memory_of, process_bytes, with_heap
from edkm_cli.dryrun.proposals import proposals
from edkm_cli.granularity import FREE, Override
from edkm_cli.nn.allocation import SENSITIVITY, other_bytes
from edkm_cli.nn.swap import EMBEDDING, LINEAR, decoder_bits_per_weight
from edkm_cli.preflight import RunPlan, plan_run


def dry_run(config: CompressConfig, *, gpu_memory: str | None = None, gpus: int | None = None) -> dict[str, Any]:
    """The plan of a run as the JSON of `edkm compress --dry-run` (its keys: docs/results.md).

    Args:
        config: the run's settings.
        gpu_memory: plan for GPUs with that much memory each (`24GiB`), whatever this machine has.
        gpus: how many of them, each with a process.

    `phases` are the highest totals of each phase, of tensors alone. Raises UserError for settings that no run could have.
    """
    machine = choose_machine(config, gpu_memory, gpus)
    plan = plan_run(config, machine.launch)
    runtime_bytes = process_bytes(plan)
    need = estimate(plan, runtime_bytes)
    memory = memory_of(config, need, machine)
    need = with_heap(need) if memory == "speed" else need
    fits = need.fits(machine)
    return {
        "model": config.model,
        "modules": _grouped(plan),
        "skipped": [swap.to_mapping() for swap in plan.swaps if swap.reason],
        "peak_memory_bytes": _by_part(need.device),
        "phases": need.device.phases,
        **({"host_memory_bytes": _by_part(need.host), "host_phases": need.host.phases} if need.host else {}),
        **({"not_counted": need.not_counted} if need.not_counted else {}),
        **({"warnings": plan.warnings} if plan.warnings else {}),
        "memory": memory,
        "weights_bytes": weights_bytes(plan),
        "original_weights_bytes": 2 * plan.parameters,
        "decoder_bits_per_weight": decoder_bits_per_weight(plan.swaps, plan.spec),
        "steps": config.steps,
        "sequences_per_step": plan.step_sequences,
        "training_tokens": plan.training_tokens,
        "device": plan.launch.device,
        "processes": plan.launch.processes,
        "sharded": plan.launch.sharded,
        "available_bytes": machine.memory_bytes,
        "available_host_bytes": machine.host_bytes,
        "fits": fits,
        "proposals": [] if fits else proposals(plan, machine, runtime_bytes),
        "config": asdict(config),
        "resolved": plan.resolved,
    }


def choose_memory(plan: RunPlan) -> str:
    """What `--memory` means for a run on this machine: `speed`, or `small` where only that fits.

    Rehearses the run unless arithmetic alone shows that there is room.
    """
    config, machine = plan.config, this_machine(plan.launch)
    if config.memory != "auto" or plan.launch.gpu:
        return "speed" if config.memory == "auto" else config.memory
    if _more_than_enough_bytes(plan) * plan.launch.processes <= machine.memory_bytes:
        return "speed"
    return memory_of(config, estimate(plan, process_bytes(plan)), machine)


def _more_than_enough_bytes(plan: RunPlan) -> float:
    """More than any run of this size takes, from shapes alone; infinite where attention maps are kept.

    Ten float32 numbers a weight (model, teacher, gradient, two moments, sensitivities, copies), three for each input and
    output of a linear and token in flight, eight for each logit, and 2 GB for the process.
    """
    config = plan.config
    if config.method == "dkm":
        return float("inf")
    tokens = max(config.batch_size * config.sequence_length, config.context, 1024)
    ends = [sum(swap.shape) for swap in plan.swaps if swap.role == LINEAR]
    vocabulary = max((swap.shape[0] for swap in plan.swaps if swap.role != LINEAR), default=0)
    activations = 12 * tokens * sum(ends) + 40 * (config.start_tokens or 0) * max(ends) + 32 * tokens * vocabulary
    return 40 * plan.parameters + activations + 2e9


def weights_bytes(plan: RunPlan) -> int:
    """Of the exported files, without their headers."""
    dtype = getattr(torch, models.stored_dtype(plan.source, plan.architecture, plan.dense_dtype))
    tensors = [pair for s in plan.clustered for pair in plan.spec.linear_tensors(*s.shape[:2], layer=s.name).values()]
    linears = sum(kind.itemsize * math.prod(shape) for kind, shape in tensors)
    return linears + other_bytes(plan.skeleton, plan.swaps, plan.spec, dtype.itemsize)


def _by_part(peak: Peak) -> dict[str, int]:
    """Every part, in one order, and `total`."""
    parts = {part: peak.parts.get(part, 0) for part in (*PARTS, HEAP, RUNTIME)}
    return {**parts, "total": sum(parts.values())}


def _grouped(plan: RunPlan) -> list[dict[str, Any]]:
    """The swapped modules, counted by role, shape and override."""
    config, counts = plan.config, Counter[tuple[str, tuple[int, ...], str]]()
    other_bits = (
        f"{plan.average:.2f} bits on average, by sensitivity"
        if config.allocation == SENSITIVITY
        else f"{config.bits}-bit indices"
    )
    tables = "LUT" if config.palette == FREE else f"scales of {config.palette} tables"
    for swap in plan.swaps:
        if swap.clustered:
            own = Override.of(config.overrides, swap.name)
            bits = f"{own.bits}-bit indices (override)" if own.bits else other_bits
            becomes = f"{bits}, {config.lut_dtype} {tables}, {plan.spec.granularity_of(swap.name)}"
            counts[swap.role, swap.shape, becomes + " (override)" * bool(own.granularity)] += 1
        elif not swap.reason:
            counts[swap.role, swap.shape, ""] += 1
    other = f"{plan.spec.bits_of('', embedding=True)}-bit, a float32 scale "
    other += f"for {config.embedding_group} columns" if config.embedding_group else "a row"
    return [
        {"role": role, "shape": list(shape), "count": count, "becomes": becomes or other}
        for (role, shape, becomes), count in sorted(counts.items(), key=lambda item: (item[0][0] == EMBEDDING, item[0]))
    ]
