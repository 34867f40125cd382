"""Where a run does not fit: other settings, rehearsed in the same way, the least different first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edkm_cli import data
from edkm_cli.dryrun.machine import Machine
from edkm_cli.dryrun.need import estimate, least, with_heap
from edkm_cli.errors import UserError
from edkm_cli.preflight import Launch, RunPlan, choose_dtype, plan_run

_MOST_PROPOSALS, _MOST_REHEARSALS = 3, 6
Change = tuple[str, dict[str, Any]]  # flags, and the settings that they are


def proposals(plan: RunPlan, machine: Machine, runtime_bytes: int) -> list[dict[str, Any]]:
    """Settings that fit, the least different first: flags, number of processes, and what they need."""
    fitting: list[dict[str, Any]] = []
    enough: list[set[str]] = []
    rehearsed = 0
    for names, changes, launch in _alternatives(plan):
        if any(less <= names for less in enough):
            continue
        values = {key: value for _, settings in changes for key, value in settings.items()}
        try:
            other = plan_run(replace(plan.asked, **values), launch, like=plan)
        except UserError:  # a combination that no run could have
            continue
        there = replace(machine, launch=launch)
        if not least(other).fits(there):
            continue
        need = estimate(other, runtime_bytes)
        need = with_heap(need) if other.config.memory == "speed" else need
        rehearsed += 1
        if need.fits(there):
            host = {"host_total_bytes": need.host.total} if need.host else {}
            flags, count = " ".join(flags for flags, _ in changes), launch.processes
            fitting.append({"flags": flags, "processes": count, "total_bytes": need.device.total, **host})
            enough.append(names)
        if len(fitting) == _MOST_PROPOSALS or rehearsed == _MOST_REHEARSALS:
            break
    return fitting


def _alternatives(plan: RunPlan) -> Iterator[tuple[set[str], list[Change], Launch]]:
    """(names of the changes, the changes, where) in the order in which they are worth a try."""
    changes, config, launch = _changes(plan), plan.asked, plan.launch
    for names in _COMBINATIONS:
        if all(name in changes for name in names):
            sharded = launch.sharded or "shard" in names
            yield set(names), [changes[name] for name in names], replace(launch, sharded=sharded)
    if launch.gpu and config.steps:
        shard: Change = ("--sharding full", {"sharding": "full"})
        more = [shard, *(changes[name] for name in ("checkpoint", "batch") if name in changes)]
        for processes in (2, 4, 8, 16, 32):
            if processes > launch.processes:
                yield {"more"}, more, replace(launch, processes=processes, sharded=True)


def _changes(plan: RunPlan) -> dict[str, Change]:
    """What could be changed, by name: (flags, settings)."""
    config, launch = plan.asked, plan.launch
    sequences, trains = config.step_sequences(), config.steps > 0
    candidates: dict[str, tuple[bool, str, dict[str, Any]]] = {
        "memory": (not launch.gpu and config.memory == "speed", "--memory small", {"memory": "small"}),
        "checkpoint": (
            trains and not config.gradient_checkpointing,
            "--gradient-checkpointing",
            {"gradient_checkpointing": True},
        ),
        "batch": (
            trains and config.batch_size > 1,
            f"--batch-size 1 --gradient-accumulation {sequences}",
            {"batch_size": 1, "gradient_accumulation": sequences},
        ),
        "shard": (launch.processes > 1 and not launch.sharded, "--sharding full", {"sharding": "full"}),
        "offload": (trains and launch.gpu and config.offload == "none", "--offload cpu", {"offload": "cpu"}),
        "held": (trains and not config.label_weight, "--assignments held", {"assignments": "held"}),
        "dtype": (choose_dtype(config.dtype, launch.device) == "float32", "--dtype bfloat16", {"dtype": "bfloat16"}),
        "data": (
            plan.writes_text,
            "--data FILE --label-weight 0" if trains else "--data FILE",
            {"data": (data.BUILTIN,), **({"label_weight": 0.0} if trains else {})},
        ),
        "importance": (config.importance == "gradient", "--importance activation", {"importance": "activation"}),
    }
    return {name: (flags, values) for name, (possible, flags, values) in candidates.items() if possible}


_COMBINATIONS = (
    ("memory",),
    ("data",),
    ("checkpoint",),
    ("batch",),
    ("checkpoint", "batch"),
    ("offload",),
    ("shard",),
    ("shard", "checkpoint"),
    ("shard", "checkpoint", "batch"),
    ("importance",),
    ("checkpoint", "importance"),
    ("held",),
    ("held", "checkpoint"),
    ("held", "batch"),
    ("held", "checkpoint", "batch"),
    ("held", "checkpoint", "importance"),
    ("dtype",),
    ("dtype", "checkpoint"),
    ("dtype", "held", "checkpoint"),
    ("dtype", "held", "checkpoint", "importance"),
)
