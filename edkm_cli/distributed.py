"""The processes of a run: starting them, exchanging values, and sharding parameters over them.

`torchrun` and `accelerate launch` start the processes and set RANK, WORLD_SIZE and the rendezvous; everything here is
torch.distributed (gloo for host memory, nccl for GPUs). A single process is a world of one, where all of this costs nothing.

Sharded means FSDP2: `fully_shard` on each decoder block keeps 1/N of its parameters on each process (rows, dimension
0) and gathers a block when it is used. Inside a block's forward a layer sees whole weights, so clustering is exact and
needs no communication of its own. Outside, `gathered` makes one module whole at a time.
"""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edkm_cli.errors import PeerLost, UserError, explained, named

T = TypeVar("T")

_PEER_GONE = re.compile("connection|broken pipe|timed out|timeout|remote process|gloo|nccl|tcpstore", re.IGNORECASE)


@dataclass(frozen=True)
class World:
    """This process among those of the run. `device` (`cpu`, `cuda` or `cuda:N`) is where its tensors live; `sharded` whether
    parameters are divided over the processes, or whole on each."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    sharded: bool = False

    def __str__(self) -> str:
        if self.size == 1:
            return self.device
        return f"{self.size} processes, {'sharded' if self.sharded else 'data parallel'}, {self.device}"

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def share(self) -> float:
        """What one process keeps of a parameter."""
        return 1 / self.size if self.sharded else 1.0

    @property
    def main(self) -> bool:
        """Whether this process writes files and speaks to the user."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, value: int) -> int:
        """The maximum over all processes."""
        if self.size == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return bool(self.largest(int(flag)))

    def on_main(self, work: Callable[[], Any]) -> Any:
        """Do something on the first process only; all get its result, or its UserError."""
        if self.size == 1:
            return work()
        outcome: list[tuple[Any, str | None]] = [(None, None)]
        if self.main:
            try:
                outcome = [(work(), None)]
            except UserError as error:
                outcome = [(None, str(error))]
        dist.broadcast_object_list(outcome, 0, device=torch.device("cpu"))
        value, refused = outcome[0]
        if refused is not None:
            raise UserError(refused, everywhere=True)
        return value

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The first process's tensor on all, in place."""
        if self.size > 1:
            dist.broadcast(tensor, 0)
        return tensor

    def broadcast_whole(self, tensor: Tensor | None) -> Tensor:
        """The first process's tensor on all, in host memory, whatever the others know of its shape (they give None)."""
        if self.size == 1:
            assert tensor is not None
            return tensor
        dtype, shape = self.on_main(lambda: tensor is not None and (tensor.dtype, tensor.shape))
        whole = torch.empty(shape, dtype=dtype) if tensor is None else tensor
        if whole.numel():
            dist.broadcast(whole.view(-1).view(torch.uint8), 0)  # bytes: gloo does not know all types
        return whole

    def turns(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """This process's share of the items. All get equally many, since a sharded model is called by all at once:
        where the items run out, the last one is repeated and marked False (not to be counted)."""
        places = [turn * self.size + self.rank for turn in range(-(-len(items) // self.size))]
        return [(items[min(place, len(items) - 1)], place < len(items)) for place in places]

    def scatter_rows(self, tensor: Tensor) -> Tensor:
        """This process's rows of the sum over all processes of a matrix (rows, columns)."""
        if self.size == 1:
            return tensor
        share = -(-tensor.shape[0] // self.size)
        padded = torch.cat([tensor, tensor.new_zeros(share * self.size - len(tensor), *tensor.shape[1:])])
        mine = torch.empty_like(padded[:share])
        dist.reduce_scatter_tensor(mine, padded)
        return mine

    def share_of(self, rows: int, together: int = 1) -> slice:
        """This process's consecutive rows of so many, of which each `together` stay with one process. The first processes
        have equally many, the last ones fewer or none."""
        share = -(-rows // (together * self.size)) * together
        return slice(min(self.rank * share, rows), min((self.rank + 1) * share, rows))

    def gather_rows(self, mine: Tensor, rows: int) -> Tensor:
        """The matrix with `rows` rows of which each process has its `share_of`; a share may be padded at its end."""
        if self.size == 1:
            return mine[:rows]
        padded = mine.new_zeros(self.largest(len(mine)), *mine.shape[1:])
        padded[: len(mine)] = mine
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat(parts)[:rows]


ALONE = World()


def launched() -> int:
    """How many processes a launcher (torchrun, accelerate) started; 1 without one."""
    with explained("RANK and WORLD_SIZE are whole numbers, set by a launcher", "; start with torchrun, or unset RANK"):
        return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def processes_here() -> int:
    """How many of the processes that a launcher started are on this machine, whose disks they share."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def wants_sharding(sharding: str, processes: int) -> bool:
    """What `--sharding` means: `auto` follows `accelerate launch --use_fsdp`. Raises UserError for DeepSpeed."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise UserError("edkm shards by FSDP2, but accelerate is configured for DeepSpeed; use --sharding full")
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return processes > 1 and (sharding == "full" or (sharding == "auto" and asked))


def open_world(device: str, *, sharding: str, timeout_minutes: int) -> World:
    """Join the other processes of the run, if a launcher started any.

    `device` is `cpu`, `cuda` (this process's own GPU is taken) or `cuda:N`. Raises UserError where the processes don't
    find one another.
    """
    size = launched()
    sharded = wants_sharding(sharding, size)
    # accelerate must not wrap the model a second time.
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if size == 1:
        return World(device=device)
    if device.startswith("cuda"):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        with explained(f"each process of a node needs a GPU of its own, but {device} cannot be had", "; start fewer"):
            torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo"
        rule = f"the {size} processes must find one another, but process {os.environ['RANK']} could not join"
        with explained(rule, "; start them with torchrun or accelerate launch, and check MASTER_ADDR"):
            dist.init_process_group(backend, timeout=timedelta(minutes=timeout_minutes))
    return World(dist.get_rank(), size, device, sharded)


@contextmanager
def peers(world: World) -> Iterator[None]:
    """Turns the many errors of a collective whose partner is gone into PeerLost, and so a launcher's SIGTERM.

    A launcher that loses one process ends the others at once, often before a collective fails in them: they say which
    of the two it was, and only then go.
    """
    if world.size == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return

    def lost(reason: str) -> PeerLost:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the line comes first
        rule = f"process {world.rank} of {world.size} lost another one ({reason}), whose message says why"
        return PeerLost(f"{rule}; go on with --resume, and with more --timeout-minutes if it was still at work")

    def ended(number: int, frame: object) -> None:
        raise lost("its launcher ended this one")

    former = signal.signal(signal.SIGTERM, ended)
    try:
        yield
    except (RuntimeError, OSError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError) or not _PEER_GONE.search(str(error)):
            raise
        raise lost(named(error)) from error
    finally:
        if signal.getsignal(signal.SIGTERM) is ended:
            signal.signal(signal.SIGTERM, former)


def shard(module: nn.Module, world: World) -> None:
    """Keep 1/N of a module's parameters on each process (FSDP2); in place, parameters become DTensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Also for the root, which FSDP2 would leave whole after a forward without backward (an evaluation): an optimizer
    # made then would train the whole parameter, of which nobody would hear.
    fully_shard(module, mesh=init_device_mesh(world.device.split(":")[0], (world.size,)), reshard_after_forward=True)


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor: its rows where it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor, gathered on all processes where it is sharded."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if tensor.dtype in (torch.int16, torch.uint16):  # gloo moves no numbers of these types
        return full(tensor.to(torch.int32)).to(tensor.dtype)
    return tensor.full_tensor()


@torch.no_grad()
def assign(tensor: Tensor, value: Tensor) -> None:
    """Copy a whole value, which all processes have, into a tensor that may be sharded."""
    if not hasattr(tensor, "to_local"):
        tensor.copy_(value)
        return
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    parts = value.chunk(mesh.size())  # FSDP2's own split of dimension 0
    if mesh.get_local_rank() < len(parts):
        tensor.to_local().copy_(parts[mesh.get_local_rank()])


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """The parameters of a module, and of those below it, are whole inside: read-only copies beside the shards.

    All processes call alike. One module at a time, this takes less memory than unsharding its block, and the copies
    may outlive the context. Where nothing is sharded it does nothing.
    """
    sharded = [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None and local(parameter) is not parameter
    ]
    try:
        for owner, name, parameter in sharded:
            owner._parameters[name] = nn.Parameter(full(parameter.detach()), requires_grad=False)
        yield
    finally:
        for owner, name, parameter in sharded:
            owner._parameters[name] = parameter
