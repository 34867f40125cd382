"""What a process of a planned run needs: tensors, by a rehearsal, and the process itself; and the machine that it is planned
for: its devices, their memory, and what takes memory besides tensors."""

from dataclasses import dataclass, replace

import psutil
import torch

from edkm_cli import models
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World, launched, wants_sharding
from edkm_cli.dryrun.ledger import DEVICE, HEAP, HOST, Peak
from edkm_cli.dryrun.meta import PARTS
from edkm_cli.dryrun.rehearsal import Rehearsal
from edkm_cli.environment import physical_bytes
from edkm_cli.errors import UserError, named
from edkm_cli.nn.swap import LINEAR
from edkm_cli.precision import multiplies_bfloat16
from edkm_cli.preflight import RunPlan, choose_device
from edkm_cli.settings import parse_bytes

RUNTIME = "runtime"
_TOKENIZER_BYTES = 650  # an entry of the vocabulary: SmolLM2's 49,152 take 31 MB
# The first matrix products (MKL, threads), the compiled kernels, and what tokenizing leaves behind.
_FIRST_USE_BYTES = 50_000_000
# CUDA's context, kernels and workspaces on the GPU, its libraries in host memory: usual figures, not measured here.
_CUDA_DEVICE_BYTES, _CUDA_HOST_BYTES = 600_000_000, 2_000_000_000
_USABLE = 0.95  # of a GPU: the caching allocator cannot use all that lies between its blocks
# Freed blocks that the C library keeps for reuse (`edkm_cli.allocator`) where all are kept, as a share of what tensors need:
# 14% was measured in full fine-tuning of SmolLM2-135M; the rest is a margin.
_HEAP_SHARE = 0.2
# What the products in bfloat16 of the reconstructed start leave behind on a CPU, code and scratch memory: 10 MB on an EPYC
# (Zen 4), 65 to 80 MB on a Xeon with AMX.
_ROUNDING_BYTES = 45_000_000


@dataclass(frozen=True)
class Machine:
    """What there is: so many bytes of each device, and of host memory for all processes (None: not known)."""

    world: World
    memory_bytes: int
    host_bytes: int | None


def choose_machine(config: CompressConfig, gpu_memory: str | None, gpus: int | None) -> Machine:
    """The GPUs that are named, else what this machine has. Raises UserError where these contradict each other."""
    if gpus is not None and gpus < 1:
        raise UserError(f"--gpus must be at least 1, got {gpus}")
    if gpus is not None and gpu_memory is None and not torch.cuda.is_available():
        raise UserError("--gpus needs --gpu-memory on a machine without a GPU, got none; add for example 24GiB")
    named = gpu_memory is not None or gpus is not None
    if named and config.device == "cpu":
        raise UserError("--gpu-memory and --gpus plan for GPUs, but --device is cpu; leave one of them out")
    device, processes = "cuda" if named else choose_device(config.device), gpus or launched()
    world = World(size=processes, device=device, sharded=wants_sharding(config.sharding, processes))
    return Machine(world, parse_bytes(gpu_memory), None) if gpu_memory is not None else this_machine(world)


def this_machine(world: World) -> Machine:
    """The machine that this process runs on."""
    if not world.gpu:
        return Machine(world, physical_bytes(), None)
    number = torch.device(world.device).index or 0
    return Machine(world, torch.cuda.get_device_properties(number).total_memory, physical_bytes())


@dataclass(frozen=True)
class Need:
    """What a process needs of its device and, beside a GPU, of host memory; `not_counted` says what is missing there."""

    device: Peak
    host: Peak | None
    not_counted: str = ""

    def fits(self, machine: Machine) -> bool:
        processes = machine.world.size
        if self.host is None:
            return _needed_bytes(self.device) * processes <= machine.memory_bytes
        host_fits = machine.host_bytes is None or _needed_bytes(self.host) * processes <= machine.host_bytes
        return self.device.total <= _USABLE * machine.memory_bytes and host_fits


def _needed_bytes(peak: Peak) -> int:
    """The peak without a file's pages, which the system takes back where memory is short. Only loading has them."""
    phases = {**peak.phases, "load": peak.phases.get("load", 0) - peak.files}
    return max(phases.values()) + peak.parts.get(RUNTIME, 0) + peak.parts.get(HEAP, 0)


def process_bytes(plan: RunPlan) -> int:
    """What the process takes before the first tensor, as it is now: all that a run imports is imported."""
    vocabulary = plan.architecture.get_text_config(decoder=True).vocab_size
    rounds = plan.config.start == "reconstructed" and not plan.world.gpu and multiplies_bfloat16("cpu")
    now = psutil.Process().memory_info().rss
    return now + _TOKENIZER_BYTES * vocabulary + _FIRST_USE_BYTES + _ROUNDING_BYTES * rounds


def estimate(plan: RunPlan, runtime_bytes: int) -> Need:
    """Rehearse a plan. `runtime_bytes` is what its process takes of host memory beside tensors.

    Freed blocks that are kept for reuse are not in it: see `with_heap`.
    """
    source, world, not_counted = plan.source, plan.world, ""
    stored = models.stored_bytes(source) if source.is_local and not source.gguf_file else None
    try:
        peaks = Rehearsal(plan, stored_bytes=2 * plan.parameters if stored is None else stored).run()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        # Remote code, or layers that look at values: then only what no forward pass is needed for.
        not_counted = f"activations: this model does not run on the meta device ({named(error)})"
        peaks = {DEVICE: _static(plan), HOST: Peak("load", {}, {})}
    if not world.gpu:
        return Need(_with(peaks[DEVICE], RUNTIME, runtime_bytes), None, not_counted)
    host = _with(peaks[HOST], RUNTIME, runtime_bytes + _CUDA_HOST_BYTES)
    return Need(_with(peaks[DEVICE], RUNTIME, _CUDA_DEVICE_BYTES), host, not_counted)


def least(plan: RunPlan) -> Need:
    """What parameters alone need in training: no more than a run does, and known at once."""
    return Need(_static(plan), Peak("", {}, {}) if plan.world.gpu else None)


def with_heap(need: Need) -> Need:
    """The need of a run on a CPU that keeps freed blocks for reuse."""
    if (waiting := need.device.waiting) is None:
        waiting = int(_HEAP_SHARE * sum(size for part, size in need.device.parts.items() if part != RUNTIME))
    return need if need.host else replace(need, device=_with(need.device, HEAP, waiting))


def memory_of(config: CompressConfig, need: Need, machine: Machine) -> str:
    """What `--memory` means: `auto` is `speed`, or `small` where freed blocks that are kept would not fit."""
    if config.memory == "auto":
        return "speed" if machine.world.gpu or with_heap(need).fits(machine) else "small"
    return config.memory


def _static(plan: RunPlan) -> Peak:
    config, world = plan.config, plan.world
    dense, trained = getattr(torch, plan.dense_dtype), getattr(torch, plan.config.dtype)
    weights = sum(swap.shape[0] * swap.shape[1] for swap in plan.clustered)
    bytes_a_weight = plan.spec.bits / 8 if plan.by_layer and not plan.writes_text else dense.itemsize * world.share
    parts = {"weights": int(plan.parameters * bytes_a_weight)}
    if config.steps > 0 and config.assignments != "held":
        clustered = int(weights * trained.itemsize * world.share)
        parts = {"weights": clustered, "gradients": clustered, "optimizer": 2 * clustered}
    return Peak("training", parts, {"training": sum(parts.values())})


def _with(peak: Peak, part: str, size: int) -> Peak:
    """The phases stay those of tensors."""
    return replace(peak, parts={**peak.parts, part: size})


def choose_memory(plan: RunPlan) -> str:
    """What `--memory` means for a run on this machine: `speed`, or `small` where only that fits.

    Rehearses the run unless arithmetic alone shows that there is room.
    """
    config, machine = plan.config, this_machine(plan.world)
    if config.memory != "auto":
        return config.memory
    enough = plan.world.gpu or _more_than_enough_bytes(plan) * plan.world.size <= machine.memory_bytes
    return "speed" if enough else memory_of(config, estimate(plan, process_bytes(plan)), machine)


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


def by_part(peak: Peak) -> dict[str, int]:
    """Every part, in one order, and `total`."""
    parts = {part: peak.parts.get(part, 0) for part in (*PARTS, HEAP, RUNTIME)}
    return {**parts, "total": sum(parts.values())}
