"""Where a run does not fit: other settings, rehearsed in the same way, the least different first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from edkm_cli.config import CompressConfig
from edkm_cli.dryrun.machine import Machine
from edkm_cli.dryrun.need import estimate, least, with_heap
from edkm_cli.errors import UserError
from edkm_cli.preflight import RunPlan, Setting, choose_dtype, plan_run

_MOST_PROPOSALS, _MOST_REHEARSALS = 3, 6


def proposals(plan: RunPlan, machine: Machine, runtime_bytes: int) -> list[dict[str, Any]]:
    """Settings that fit, the least different first: flags, number of processes, and what they need."""
    found: list[dict[str, Any]] = []
    enough: list[set[str]] = []
    rehearsed = 0
    for names, flags, config, setting in _alternatives(plan.config, plan.setting):
        if any(less <= names for less in enough):
            continue
        try:
            other, there = plan_run(config, setting, like=plan), replace(machine, setting=setting)
        except UserError:  # a combination that no run could have
            continue
        if not least(other).fits(there):
            continue
        need = estimate(other, runtime_bytes)
        need = with_heap(need) if config.memory == "speed" else need
        rehearsed += 1
        if need.fits(there):
            host = {"host_total_bytes": need.host.total} if need.host else {}
            count = setting.processes
            found.append({"flags": flags, "processes": count, "total_bytes": need.device.total, **host})
            enough.append(names)
        if len(found) == _MOST_PROPOSALS or rehearsed == _MOST_REHEARSALS:
            break
    return found


def _alternatives(config: CompressConfig, setting: Setting) -> Iterator[tuple[set[str], str, CompressConfig, Setting]]:
    """(names of the changes, flags, the settings with them, where) in the order in which they are worth a try."""
    changes = _changes(config, setting)
    for names in _COMBINATIONS:
        if all(name in changes for name in names):
            sharded = setting.sharded or "shard" in names
            yield set(names), *_changed(config, [changes[name] for name in names]), replace(setting, sharded=sharded)
    if setting.gpu and config.steps:
        more = [
            ("--sharding full", {"sharding": "full"}),
            *(changes[n] for n in ("checkpoint", "batch") if n in changes),
        ]
        for processes in (2, 4, 8, 16, 32):
            if processes > setting.processes:
                yield {"more"}, *_changed(config, more), replace(setting, processes=processes, sharded=True)


def _changed(config: CompressConfig, changes: list[tuple[str, dict[str, Any]]]) -> tuple[str, CompressConfig]:
    values = {key: value for _, settings in changes for key, value in settings.items()}
    return " ".join(flags for flags, _ in changes), replace(config, **values)


def _changes(config: CompressConfig, setting: Setting) -> dict[str, tuple[str, dict[str, Any]]]:
    """What could be changed, by name: (flags, settings)."""
    sequences, trains = config.batch_size * config.gradient_accumulation, config.steps > 0
    candidates: dict[str, tuple[bool, str, dict[str, Any]]] = {
        "memory": (not setting.gpu and config.memory == "speed", "--memory small", {"memory": "small"}),
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
        "shard": (setting.processes > 1 and not setting.sharded, "--sharding full", {"sharding": "full"}),
        "offload": (trains and setting.gpu and config.offload == "none", "--offload cpu", {"offload": "cpu"}),
        "lora": (trains and not config.lora_rank, "--lora-rank 16", {"lora_rank": 16}),
        "dtype": (
            choose_dtype(config.dtype, setting.device) == "float32",
            "--dtype bfloat16",
            {"dtype": "bfloat16"},
        ),
        "importance": (config.importance == "gradient", "--importance activation", {"importance": "activation"}),
    }
    return {name: (flags, values) for name, (possible, flags, values) in candidates.items() if possible}


_COMBINATIONS = (
    ("memory",),
    ("checkpoint",),
    ("batch",),
    ("checkpoint", "batch"),
    ("offload",),
    ("shard",),
    ("shard", "checkpoint"),
    ("shard", "checkpoint", "batch"),
    ("importance",),
    ("checkpoint", "importance"),
    ("lora",),
    ("lora", "checkpoint"),
    ("lora", "batch"),
    ("lora", "checkpoint", "batch"),
    ("lora", "checkpoint", "importance"),
    ("dtype",),
    ("dtype", "checkpoint"),
    ("dtype", "lora", "checkpoint"),
    ("dtype", "lora", "checkpoint", "importance"),
)
