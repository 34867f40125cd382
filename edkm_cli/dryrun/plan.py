"""`--dry-run`: what a run would swap, write and need, and what to change if that is too much.

From the configuration alone: the run is rehearsed on the meta device (`edkm_cli.dryrun.rehearsal`), for this machine or for
GPUs that are named. Where it does not fit, other settings are rehearsed in the same way; those that fit are proposed.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from edkm_cli import models
from edkm_cli.config import CompressConfig, UserError
from edkm_cli.distributed import launched
from edkm_cli.dryrun.ledger import DEVICE, HOST
from edkm_cli.dryrun.meta import PARTS, Setting
from edkm_cli.dryrun.rehearsal import Peak, Rehearsal
from edkm_cli.environment import peak_memory_bytes
from edkm_cli.hf import skeleton_tensors
from edkm_cli.nn.swap import EMBEDDING, LINEAR, Swap, decoder_bits_per_weight, palettize_skeleton
from edkm_cli.preflight import choose_device, choose_dtype, plan, spec_of

_RUNTIME = "runtime"
_TOKENIZER_BYTES = 650  # an entry of the vocabulary: SmolLM2's 49,152 take 31 MB
# The first matrix products (MKL, threads), the compiled kernels, and what tokenizing leaves behind.
_FIRST_USE_BYTES = 50_000_000
# CUDA's context, kernels and workspaces on the GPU, its libraries in host memory: usual figures, not measured here.
_CUDA_DEVICE_BYTES, _CUDA_HOST_BYTES = 600_000_000, 2_000_000_000
_USABLE = 0.95  # of a GPU: the caching allocator cannot use all that lies between its blocks
_MOST_PROPOSALS, _MOST_REHEARSALS = 3, 6
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Machine:
    """What there is: so many bytes of each device, and of host memory for all processes (None: not known)."""

    setting: Setting
    memory_bytes: int
    host_bytes: int | None


@dataclass(frozen=True)
class Need:
    """What a process needs of its device and, beside a GPU, of host memory."""

    device: Peak
    host: Peak | None

    def fits(self, machine: Machine) -> bool:
        processes = machine.setting.processes
        if self.host is None:
            return _needed_bytes(self.device) * processes <= machine.memory_bytes
        host_fits = machine.host_bytes is None or _needed_bytes(self.host) * processes <= machine.host_bytes
        return self.device.total <= _USABLE * machine.memory_bytes and host_fits


def _needed_bytes(peak: Peak) -> int:
    """The peak without a file's pages, which the system takes back where memory is short. Only loading has them."""
    phases = {**peak.phases, "load": peak.phases.get("load", 0) - peak.files}
    return max(phases.values()) + peak.parts.get(_RUNTIME, 0)


def parse_bytes(text: str) -> int:
    """`24GiB`, `80 GB`, `25769803776`. Raises UserError."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", text.upper())
    if found is None or (found[2] or "B") not in _UNITS:
        raise UserError(f"--gpu-memory must be a size like 24GiB or 80GB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2] or "B"])


def choose_machine(config: CompressConfig, gpu_memory: str | None, gpus: int | None) -> Machine:
    """The GPUs that are named, else what this machine has. Raises UserError where these contradict each other."""
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus must be at least 1, got {gpus}")
    present = torch.cuda.is_available()
    if gpus is not None and gpu_memory is None and not present:
        raise UserError("--gpus needs --gpu-memory on a machine without a GPU, got none; add for example 24GiB")
    named = gpu_memory is not None or gpus is not None
    if named and config.device == "cpu":
        raise UserError("--gpu-memory and --gpus plan for GPUs, but --device is cpu; leave one of them out")
    device = "cuda" if named else choose_device(config.device).split(":")[0]
    processes = gpus or launched()
    asked = config.sharding == "auto" and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    sharded = processes > 1 and (config.sharding == "full" or asked)
    setting = Setting(device, processes, sharded, torch.get_num_threads())
    if gpu_memory is not None:
        return Machine(setting, parse_bytes(gpu_memory), None)
    if device == "cuda":
        number = torch.device(config.device).index if config.device.startswith("cuda:") else 0
        return Machine(setting, torch.cuda.get_device_properties(number or 0).total_memory, _physical_bytes())
    return Machine(setting, _physical_bytes(), None)


def dry_run(config: CompressConfig, *, gpu_memory: str | None = None, gpus: int | None = None) -> dict[str, Any]:
    """The plan of a run as the JSON of `edkm compress --dry-run` (its keys: docs/results.md).

    Args:
        config: the run's settings.
        gpu_memory: plan for GPUs with that much memory each (`24GiB`), whatever this machine has.
        gpus: how many of them, each with a process.

    `phases` are the highest totals of each phase, without `runtime`. Raises UserError for settings that no run could have.
    """
    machine = choose_machine(config, gpu_memory, gpus)
    setting = machine.setting
    planner = _Planner(config)
    need = planner.need(config, setting)
    fits = need.fits(machine)
    sequences = config.batch_size * config.gradient_accumulation * setting.processes
    return {
        "model": config.model,
        "modules": _grouped(planner.swaps, config),
        "skipped": [swap.to_mapping() for swap in planner.swaps if swap.reason],
        "peak_memory_bytes": _by_part(need.device),
        "phases": need.device.phases,
        **({"host_memory_bytes": _by_part(need.host), "host_phases": need.host.phases} if need.host else {}),
        **({"not_counted": planner.not_counted} if planner.not_counted else {}),
        "weights_bytes": planner.weights_bytes(setting),
        "original_weights_bytes": 2 * planner.parameters,
        "decoder_bits_per_weight": decoder_bits_per_weight(
            planner.swaps, bits=config.bits, granularity=config.granularity, lut_dtype=config.lut_dtype
        ),
        "steps": config.steps,
        "sequences_per_step": sequences,
        "training_tokens": config.steps * sequences * config.sequence_length,
        "device": setting.device,
        "processes": setting.processes,
        "sharded": setting.sharded,
        "available_bytes": machine.memory_bytes,
        "available_host_bytes": machine.host_bytes,
        "fits": fits,
        "proposals": [] if fits else planner.proposals(machine),
        "config": asdict(config),
    }


class _Planner:
    """Rehearses runs of one model; the one of `config`, and others that differ in a few settings."""

    def __init__(self, config: CompressConfig):
        self._config = config
        self._dense, self.swaps = plan(config)
        self.parameters = sum(parameter.numel() for parameter in self._dense.parameters())
        self._clustered = sum(s.shape[0] * s.shape[1] for s in self.swaps if s.role == LINEAR and not s.reason)
        self._source = models.resolve(config.model)
        self.not_counted = ""
        vocabulary = self._dense.config.get_text_config(decoder=True).vocab_size
        # The process as it is now: all that a run imports is imported.
        self._process_bytes = _resident_bytes() + _TOKENIZER_BYTES * vocabulary + _FIRST_USE_BYTES

    def need(self, config: CompressConfig, setting: Setting) -> Need:
        stored = models.stored_bytes(self._source) if self._source.is_local and not self._source.gguf_file else None
        rehearsal = Rehearsal(
            config, self._dense, self.swaps, setting, stored_bytes=2 * self.parameters if stored is None else stored
        )
        try:
            peaks = rehearsal.run()
        except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
            # Remote code, or layers that look at values: then only what no forward pass is needed for.
            self.not_counted = f"activations: this model does not run on the meta device ({_first_line(error)})"
            peaks = {DEVICE: self._static(config, setting), HOST: Peak("load", {}, {})}
        if not setting.gpu:
            return Need(_with_runtime(peaks[DEVICE], self._process_bytes), None)
        host = _with_runtime(peaks[HOST], self._process_bytes + _CUDA_HOST_BYTES)
        return Need(_with_runtime(peaks[DEVICE], _CUDA_DEVICE_BYTES), host)

    def _static(self, config: CompressConfig, setting: Setting) -> Peak:
        """What parameters alone need in training: no more than a run does."""
        full = config.steps > 0 and not config.lora_rank
        dense = getattr(torch, choose_dtype(config.dtype, setting.device))
        trained = getattr(torch, choose_dtype(config.dtype, setting.device, master=setting.sharded and full))
        clustered = int(self._clustered * trained.itemsize * setting.share)
        whole = int(self.parameters * dense.itemsize * setting.share)
        moments = {"adamw": 2.0, "sgd": 1.0, "adamw-8bit": 2 / trained.itemsize}[config.optimizer]
        parts = {"weights": whole}
        if full:
            parts = {"weights": clustered, "gradients": clustered, "optimizer": int(moments * clustered)}
            parts["teacher"] = whole if config.distill else 0
        return Peak("training", parts, {"training": sum(parts.values())})

    def weights_bytes(self, setting: Setting) -> int:
        """Of the exported files, without their headers."""
        target = copy.deepcopy(self._dense)
        with torch.device("meta"):
            palettize_skeleton(target, spec_of(self._config, self.swaps))
        dtype = getattr(torch, choose_dtype(self._config.dtype, setting.device))
        sizes = {name: dtype.itemsize for name, _ in target.named_parameters()}
        stored = skeleton_tensors(target)
        return sum(tensor.numel() * sizes.get(name, tensor.element_size()) for name, tensor in stored.items())

    def proposals(self, machine: Machine) -> list[dict[str, Any]]:
        """Settings that fit, the least different first: flags, number of processes, and what they need."""
        found: list[dict[str, Any]] = []
        enough: list[set[str]] = []
        rehearsed = 0
        for names, flags, config, setting in _alternatives(self._config, machine.setting):
            other = replace(machine, setting=setting)
            least = Need(self._static(config, setting), Peak("", {}, {}) if setting.gpu else None)
            if any(less <= names for less in enough) or not least.fits(other):
                continue
            need = self.need(config, setting)
            rehearsed += 1
            if need.fits(other):
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


def _by_part(peak: Peak) -> dict[str, int]:
    """Every part, in one order, and `total`."""
    parts = {part: peak.parts.get(part, 0) for part in (*PARTS, _RUNTIME)}
    return {**parts, "total": sum(parts.values())}


def _with_runtime(peak: Peak, size: int) -> Peak:
    """The phases stay those of tensors."""
    return replace(peak, parts={**peak.parts, _RUNTIME: size})


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _resident_bytes() -> int:
    """Memory of this process now; at its peak, where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return peak_memory_bytes("cpu")
    return pages * os.sysconf("SC_PAGE_SIZE")


def _physical_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _grouped(swaps: list[Swap], config: CompressConfig) -> list[dict[str, Any]]:
    """The swapped modules, counted by role and shape."""
    counts: dict[tuple[str, tuple[int, int]], int] = {}
    for swap in swaps:
        if not swap.reason:
            counts[swap.role, swap.shape] = counts.get((swap.role, swap.shape), 0) + 1
    linear = f"{config.bits}-bit indices, {config.lut_dtype} LUT, {config.granularity}"
    other = f"{config.embedding_bits}-bit, a float32 scale a row"
    return [
        {"role": role, "shape": list(shape), "count": count, "becomes": linear if role == LINEAR else other}
        for (role, shape), count in sorted(counts.items(), key=lambda item: (item[0][0] == EMBEDDING, item[0]))
    ]
