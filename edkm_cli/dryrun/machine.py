"""The machine that a run is planned for: its devices, their memory, and what takes memory besides tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from edkm_cli.config import CompressConfig
from edkm_cli.distributed import launched, wants_sharding
from edkm_cli.environment import peak_memory_bytes
from edkm_cli.errors import UserError
from edkm_cli.preflight import Launch, choose_device
from edkm_cli.settings import parse_bytes


@dataclass(frozen=True)
class Machine:
    """What there is: so many bytes of each device, and of host memory for all processes (None: not known)."""

    launch: Launch
    memory_bytes: int
    host_bytes: int | None


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
    device = "cuda" if named else choose_device(config.device)
    processes = gpus or launched()
    launch = Launch(device, processes, wants_sharding(config.sharding, processes), torch.get_num_threads())
    if gpu_memory is not None:
        return Machine(launch, parse_bytes(gpu_memory), None)
    return this_machine(launch)


def this_machine(launch: Launch) -> Machine:
    """The machine that this process runs on."""
    if not launch.gpu:
        return Machine(launch, physical_bytes(), None)
    number = torch.device(launch.device).index or 0
    return Machine(launch, torch.cuda.get_device_properties(number).total_memory, physical_bytes())


def resident_bytes() -> int:
    """Memory of this process now; at its peak, where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return peak_memory_bytes("cpu")
    return pages * os.sysconf("SC_PAGE_SIZE")


def physical_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows does not tell
        return 2**63
