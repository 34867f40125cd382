"""Cross-device tensor marshaling: saved tensors leave the device once (eDKM, arXiv 2309.00964, section 2.1).

Autograd keeps tensors for backward. `torch.autograd.graph.save_on_cpu` moves each of them to host memory, and so moves
a storage as often as it was saved: `q_proj`, `k_proj` and `v_proj` save the same input three times, and two views of one
tensor become two copies. `MarshalSavedTensors` moves a storage once and keeps, for every other saved tensor that reads
it, a reference and a view (shape, stride, offset).

    pack    tensor -> stays?      a parameter, an input the caller holds, already on the target  -> kept
                   -> moved yet?  graph search within `hops`, then identity of the storage       -> `View` of a record
                   -> else        region -> codecs -> host memory                                -> a new record
    unpack  `View` -> record: copied back once for all its views -> the view rebuilt

A record lives as long as a saved tensor that refers to it; everything else (table, marks in the graph) is weak.
"""

import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import TensorWeakRef

from edkm_cli.memory.graph import Marks, Visit, walk
from edkm_cli.memory.mover import Codec, Mover, Statistics, Store, Stored
from edkm_cli.memory.storage import Region, View, storage_address


class _Record:
    """One moved region of one storage at one version. Copied back once for all the saved tensors that read it."""

    def __init__(self, tensor: torch.Tensor, region: Region, stored: Stored) -> None:
        self.storage = StorageWeakRef(tensor.untyped_storage())
        self.version, self.region, self._stored = tensor._version, region, stored
        self.readers: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._have_read: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._restored: torch.Tensor | None = None

    def serves(self, tensor: torch.Tensor, view: View) -> bool:
        """Whether this record holds what `tensor` reads: same storage, not written to since, and all its bytes."""
        unchanged = self.storage.cdata == storage_address(tensor) and self.version == tensor._version
        return unchanged and self.region.covers(view)

    def read(self, reader: "_Saved") -> torch.Tensor:
        """The view of one saved tensor. The copy on the device is dropped when every living reader has had it."""
        assert reader.view is not None
        if self._restored is None:
            self._restored = self.region.scatter(self._stored.load())
        tensor = reader.view.rebuild(self._restored, low=self.region.low)
        self._have_read.add(reader)
        if len(self._have_read) == len(self.readers):
            self._restored = None
            self._have_read.clear()
        return tensor


class _Saved:
    """What autograd holds in place of a saved tensor: a view of a moved record, or the tensor itself, which stays.

    Detects in-place writes between save and use, with autograd's own rule: the version counter. All views of a tensor share
    its counter and keep their base alive, so a weak reference to the base is enough: nobody writes through a dead one.
    """

    def __init__(self, tensor: torch.Tensor, view: View | None = None, record: _Record | None = None) -> None:
        self.view, self._record = view, record
        self._root = TensorWeakRef(tensor if tensor._base is None else tensor._base)
        self._version = tensor._version
        self._what = f"[{tensor.type()} {list(tensor.shape)}]"
        # An output must not hold the node that holds this. What is detached shares the version counter.
        self._tensor = tensor.detach() if record is None else None
        if record is not None:
            record.readers.add(self)

    def unpack(self) -> torch.Tensor:
        """The tensor. Raises RuntimeError if it was written to."""
        root = self._root() if self._tensor is None else self._tensor
        if root is not None and root._version != self._version:
            rule = "one of the variables needed for gradient computation has been modified by an inplace operation"
            versions = f"is at version {root._version}; expected version {self._version} instead"
            raise RuntimeError(f"{rule}: {self._what} {versions} (found by MarshalSavedTensors)")
        if self._tensor is not None:
            return self._tensor
        assert self._record is not None
        return self._record.read(self)


class MarshalSavedTensors:
    """Keep the tensors that autograd saves in host memory, each storage once. Use it around forward and backward:

        marshal = MarshalSavedTensors(device="cpu")
        for batch in batches:
            with marshal:
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()
        print(marshal.statistics)

    Gradients are those of training without it, bit for bit (codecs state their own exactness). One object serves a whole
    run and may be entered again, also while it is entered; backward may come after the block. Nested inside another
    `saved_tensors_hooks`, the inner one gets the tensors, as PyTorch defines. Activation checkpointing, inside or
    outside, `retain_graph` and `create_graph` work. Enter it around, not inside, a function given to `torch.compile`.

    Parameters (and views of them), `keep`, tensors of subclasses, sparse tensors and tensors below `min_bytes` stay.

    Args:
        hops: how far the graph search goes (eDKM found 4 enough); None leaves it out.
        codecs: applied in this order to each region moved, for example `(Uniquify([weight]), Shard())`.
        identity: also recognise a storage by its identity. It finds every duplicate that a search of any length finds.
        keep: tensors that stay in memory anyway (inputs, buffers); what shares their storage is not moved.
        min_bytes: smaller saved tensors stay: a copy and its bookkeeping cost more than they free.
        force: copy tensors that are already on the CPU, too. For tests and measurements on a machine without a GPU.
        prefetch: how many tensors to copy back ahead of use in backward.

    Raises:
        ValueError: a device other than "cpu", negative `hops`, `prefetch` or `min_bytes`.
        RuntimeError: where a compiler traces the entering; in backward, when a saved tensor was modified in place.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        hops: int | None = 4,
        codecs: Sequence[Codec] = (),
        *,
        identity: bool = True,
        keep: Iterable[torch.Tensor] = (),
        min_bytes: int = 1024,
        force: bool = False,
        prefetch: int = 2,
    ) -> None:
        self._device = torch.device(device)
        if self._device.type != "cpu":
            raise ValueError(f"saved tensors can be moved to device 'cpu' only, got {str(device)!r}")
        for name, value in (("hops", hops), ("prefetch", prefetch), ("min_bytes", min_bytes)):
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        self.statistics = Statistics()
        self._hops, self._identity, self._force, self._min_bytes = hops, identity, force, min_bytes
        self._mover = Mover(self.statistics, prefetch=prefetch)
        self._store: Store = self._mover.store
        for codec in reversed(codecs):
            self._store = partial(lambda codec, rest, flat: codec.pack(flat, rest) or rest(flat), codec, self._store)
        self._table: dict[int, weakref.WeakSet[_Record]] = {}  # by the storage they came from
        self._marks = Marks()
        self._keep = {ref.cdata: ref for ref in (StorageWeakRef(t.untyped_storage()) for t in keep)}
        self._entered: list[torch.autograd.graph.saved_tensors_hooks] = []
        self._lock = threading.RLock()

    def __enter__(self) -> "MarshalSavedTensors":
        if torch.compiler.is_compiling():
            raise RuntimeError("MarshalSavedTensors cannot be entered in a compiled function; enter it around the call")
        pack, unpack = torch.compiler.disable(self._pack), torch.compiler.disable(self._unpack)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        hooks.__enter__()
        self._entered.append(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        began = time.perf_counter()
        with self._lock:
            self.statistics.offered_tensors += 1
            packed = _Saved(tensor) if self._stays(tensor) else self._marshal(tensor)
            self.statistics.pack_seconds += time.perf_counter() - began
        return packed

    def _unpack(self, packed: _Saved) -> torch.Tensor:
        began = time.perf_counter()
        with self._lock:
            tensor = packed.unpack()
            self.statistics.unpack_seconds += time.perf_counter() - began
        return tensor

    def _stays(self, tensor: torch.Tensor) -> bool:
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        size_bytes = tensor.numel() * tensor.itemsize if plain else 0
        self.statistics.offered_bytes += size_bytes
        small = plain and size_bytes < max(self._min_bytes, 1)
        movable = plain and not small and tensor.device.type != "meta" and not tensor.is_conj() and not tensor.is_neg()
        movable = movable and not any(isinstance(one, torch.nn.Parameter) for one in (tensor, tensor._base))
        away = self._force or tensor.device.type != self._device.type
        if movable and away and storage_address(tensor) not in self._keep:
            return False
        self.statistics.kept_tensors += 1
        self.statistics.kept_bytes += size_bytes
        self.statistics.kept_small_bytes += size_bytes if small else 0
        return True

    def _marshal(self, tensor: torch.Tensor) -> _Saved:
        view = View.of(tensor)
        began = time.perf_counter()
        visits = [] if self._hops is None else walk(tensor, hops=self._hops)
        record = self._find(tensor, view, visits)
        self.statistics.search_seconds += time.perf_counter() - began
        if record is None:
            region = Region.to_move(view, tensor.untyped_storage().nbytes())
            record = _Record(tensor, region, self._store(region.gather(tensor)))
            # Before the set's own reference: the last that is made is told first, and the set must be empty by then.
            weakref.finalize(record, self._forget, record.storage.cdata).atexit = False
            self._table.setdefault(record.storage.cdata, weakref.WeakSet()).add(record)
            self.statistics.moved_tensors += 1
        else:
            self.statistics.duplicate_bytes += tensor.numel() * tensor.itemsize
        self._marks.add(visits, record)
        return _Saved(tensor, view, record)

    def _find(self, tensor: torch.Tensor, view: View, visits: list[Visit]) -> _Record | None:
        """The record that serves this tensor, by graph search first (it tells the distance), then by identity."""
        for distance, record in self._marks.near(visits, hops=self._hops or 0):
            if record.serves(tensor, view):
                at_hop = self.statistics.duplicates_at_hop
                at_hop[distance] = at_hop.get(distance, 0) + 1
                return record
        if self._identity:
            for record in self._table.get(storage_address(tensor), ()):
                if record.serves(tensor, view):
                    self.statistics.duplicates_by_identity += 1
                    return record
        return None

    def _forget(self, address: int) -> None:
        if not self._table.get(address):
            self._table.pop(address, None)
