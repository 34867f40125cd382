"""`edkm bench clustering`: what clustering one layer costs, beside dense DKM and the layer's own matrix product.

One run measures everything, so that ratios compare times of the same run on the same machine. A time is the smallest
of a few repeats.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import clustering, kernels
from edkm_cli.environment import hardware, versions
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity

Log = Callable[[str], None]
GRANULARITIES = ("tensor", "row:1", "block:8x64")
_TEMPERATURE = 0.02
_RUNS = 7
_COREMLTOOLS_WIDTH = 1024
_GIB = 2**30


class _PeakMemory:
    """Memory in use above what was in use at the start: CUDA's own count, or the process's resident set, sampled."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stop, self.bytes = device, threading.Event(), 0

    @staticmethod
    def _resident_bytes() -> int:
        try:
            return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096
        except OSError:  # not Linux: no cheap way to ask
            return 0

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.bytes = max(self.bytes, self._resident_bytes() - self._before)

    def __enter__(self) -> _PeakMemory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._before = self._resident_bytes()
            self._thread = threading.Thread(target=self._sample, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            self._stop.set()
            self._thread.join()


def _seconds(function: Callable[[], Any], device: torch.device, runs: int = _RUNS) -> float:
    """The least time of `runs` calls: CUDA events on a GPU, the wall clock elsewhere."""
    best = float("inf")
    for _ in range(runs):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(device)
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize(device)
            best = min(best, begin.elapsed_time(end) / 1000)
        else:
            begin_seconds = time.perf_counter()
            function()
            best = min(best, time.perf_counter() - begin_seconds)
    return best


def _saved_bytes(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """(the result, bytes of all storages saved for backward that aren't the inputs')."""
    known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    return result, sum(saved.values())


def _measure(
    method: str, granularity: str, weight: Tensor, others: tuple[Tensor, ...], forward: Callable[[], Tensor], runs: int
) -> dict[str, Any]:
    """One row: forward and backward apart, bytes saved between them, peak of both."""
    device, grad = weight.device, torch.randn_like(weight)
    with _PeakMemory(device) as peak:
        result, saved = _saved_bytes(forward, (weight, *others))
        torch.autograd.grad(result, weight, grad)
    del result
    forward_seconds = _seconds(forward, device, runs)
    result = forward()
    backward_seconds = _seconds(lambda: torch.autograd.grad(result, weight, grad, retain_graph=True), device, runs)
    return {
        "method": method,
        "granularity": granularity,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "forward_seconds": forward_seconds,
        "backward_seconds": backward_seconds,
        "saved_bytes_per_weight": saved / weight.numel(),
        "peak_memory_bytes": peak.bytes,
    }


def _straight_through(weight: Tensor, centroids: Tensor, granularity: str) -> dict[str, Any]:
    """The default training mode's own work in a step: snap, then snap again and the LUT's gradient."""
    tile = Granularity.parse(granularity).tile(weight.shape[0], weight.shape[1])
    plain, grad = weight.detach(), torch.randn_like(weight)

    def backward() -> None:
        kernels.snap(plain, centroids, tile, weight.dtype)
        kernels.sum_by_entry(plain, centroids, grad, tile)

    with _PeakMemory(weight.device) as peak:
        backward()
    return {
        "method": "straight-through",
        "granularity": granularity,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "forward_seconds": _seconds(lambda: kernels.snap(plain, centroids, tile, weight.dtype), weight.device),
        "backward_seconds": _seconds(backward, weight.device),
        "saved_bytes_per_weight": 0.0,
        "peak_memory_bytes": peak.bytes,
    }


def _starting_centroids(weight: Tensor, bits: int, granularity: str) -> Tensor:
    return clustering.kmeans_start(weight.detach().cpu(), 2**bits, granularity=granularity).to(weight.device)


def _coremltools(bits: int, iterations: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """coremltools' DKM in float32 with one LUT for the tensor, and the fused one beside it, both at 1024 x 1024."""
    try:
        from coremltools.optimize.torch.palettization import fake_palettize  # noqa: F401
        from coremltools.optimize.torch.palettization.palettization_config import ModuleDKMPalettizerConfig  # noqa: F401
    except ImportError as error:
        return [{"method": "coremltools", "skipped": f"coremltools cannot be imported: {error}"}]
    from coremltools.optimize.torch.palettization import DKMPalettizer, DKMPalettizerConfig

    width = _COREMLTOOLS_WIDTH
    weight = torch.randn(width, width) * 0.02
    model: Any = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False))
    model[0].weight.data.copy_(weight)
    settings = {"n_bits": bits, "milestone": 0, "cluster_dim": 1, "kmeans_max_iter": iterations, "weight_threshold": 0}
    config = DKMPalettizerConfig.from_dict({"global_config": settings})
    palettizer = DKMPalettizer(model, config)
    palettizer.prepare(inplace=True)
    palettizer.step()
    layer: Any = next(module for module in model.modules() if hasattr(module, "weight_fake_quant"))
    parameter = layer.weight
    layer.weight_fake_quant(parameter)  # the first call makes the starting centroids
    row = _measure("coremltools", "tensor", parameter, (), lambda: layer.weight_fake_quant(parameter), _RUNS)
    fused_weight = weight.to(dtype).requires_grad_()
    centroids = _starting_centroids(fused_weight, bits, "tensor")
    options = {"granularity": "tensor", "temperature": _TEMPERATURE, "iterations": iterations}
    fused = _measure(
        "fused",
        "tensor",
        fused_weight,
        (centroids,),
        lambda: clustering.fused_dkm(fused_weight, centroids, **options)[0],  # type: ignore[arg-type]
        _RUNS,
    )
    return [row, fused]


def _linear_seconds(weight: Tensor, tokens: int, dtype: torch.dtype) -> float:
    """Forward and backward of the layer's plain linear at this many tokens."""
    plain = weight.detach().to(dtype).requires_grad_()
    x = torch.randn(tokens, weight.shape[1], dtype=dtype, device=weight.device, requires_grad=True)

    def step() -> None:
        y = torch.nn.functional.linear(x, plain)
        torch.autograd.grad(y, (x, plain), torch.ones_like(y))

    step()
    return _seconds(step, weight.device)


def _copy_bytes_per_second(weight: Tensor) -> float:
    """Bytes read and written a second by a plain copy of the weight."""
    source, target = weight.detach(), torch.empty_like(weight.detach())
    target.copy_(source)
    return 2 * source.nbytes / _seconds(lambda: target.copy_(source), weight.device, 10)


def bench_clustering(
    *,
    width: int = 4096,
    tokens: int = 2048,
    bits: int = 3,
    iterations: int = 3,
    dtype: str = "bfloat16",
    device: str = "cpu",
    granularities: tuple[str, ...] = GRANULARITIES,
    dense: bool = True,
    log: Log = lambda message: None,
) -> dict[str, Any]:
    """Measure clustering of a (width, width) layer; see docs/clustering.md for how to read the result.

    Returns a dict with the keys of `edkm bench clustering --json`: `rows` (seconds, bytes), the layer's own
    `linear_forward_backward_seconds` in `linear_dtype` at `tokens` tokens (float32 on a CPU, the weight's dtype on a
    GPU), `copy_bytes_per_second`, `command`, `versions`, `hardware`. Raises UserError for a dtype or device that is
    not there.
    """
    weight_dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(dtype)
    if weight_dtype is None:
        raise UserError(f"dtype must be bfloat16, float16 or float32, got {dtype!r}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {device} needs a CUDA GPU and a CUDA build of PyTorch; use --device cpu")
    place = torch.device(device)
    torch.manual_seed(0)
    weight = (torch.randn(width, width) * 0.02).to(place, weight_dtype).requires_grad_()
    linear_dtype = torch.float32 if place.type == "cpu" else weight_dtype
    rows: list[dict[str, Any]] = []
    for granularity in granularities:
        centroids = _starting_centroids(weight, bits, granularity)
        options: dict[str, Any] = {"granularity": granularity, "temperature": _TEMPERATURE, "iterations": iterations}
        log(f"fused, {granularity}")
        clustering.fused_dkm(weight, centroids, **options)  # compiles kernels, fills caches
        rows.append(
            _measure(
                "fused",
                granularity,
                weight,
                (centroids,),
                lambda c=centroids, o=options: clustering.fused_dkm(weight, c, **o)[0],  # type: ignore[misc]
                _RUNS,
            )
        )
        log(f"straight-through, {granularity}")
        rows.append(_straight_through(weight, centroids, granularity))
    log(f"linear, {tokens} tokens")
    linear_seconds = _linear_seconds(weight, tokens, linear_dtype)
    copy_bytes_per_second = _copy_bytes_per_second(weight)
    if dense:
        log("dense, tensor (keeps about 530 bytes per weight)")
        centroids = _starting_centroids(weight, bits, "tensor")
        options = {"granularity": "tensor", "temperature": _TEMPERATURE, "iterations": iterations}
        rows.append(
            _measure(
                "dense",
                "tensor",
                weight,
                (centroids,),
                lambda: clustering.dense_dkm(weight, centroids, **options)[0],
                1,
            )
        )
        log("coremltools")
        rows.extend(_coremltools(bits, iterations, weight_dtype))
    return {
        "command": f"edkm bench clustering --width {width} --tokens {tokens} --bits {bits} --iterations {iterations}"
        f" --dtype {dtype} --device {device}",
        "rows": rows,
        "linear_forward_backward_seconds": linear_seconds,
        "linear_dtype": str(linear_dtype).removeprefix("torch."),
        "tokens": tokens,
        "bits": bits,
        "iterations": iterations,
        "temperature": _TEMPERATURE,
        "copy_bytes_per_second": copy_bytes_per_second,
        "versions": versions(),
        "hardware": hardware(str(place)),
    }


def format_table(result: dict[str, Any]) -> str:
    """The result of `bench_clustering` as a text table."""
    dense = next((r for r in result["rows"] if r["method"] == "dense"), None)
    lines = [f"{'method':<17} {'granularity':<11} {'shape':<11} {'forward s':>10} {'backward s':>10} {'saved B/w':>9} "]
    lines[0] += f"{'peak GiB':>8} {'vs linear':>9} {'vs dense':>8}"
    for row in result["rows"]:
        if "skipped" in row:
            lines.append(f"{row['method']:<17} skipped: {row['skipped']}")
            continue
        seconds = row["forward_seconds"] + row["backward_seconds"]
        same_shape = dense is not None and row["shape"] == dense["shape"]
        full = row["shape"] == result["rows"][0]["shape"]
        to_linear = f"{seconds / result['linear_forward_backward_seconds']:.3f}x" if full else ""
        speedup = ""
        if dense is not None and same_shape:
            speedup = f"{(dense['forward_seconds'] + dense['backward_seconds']) / seconds:.0f}x"
        shape = "x".join(str(n) for n in row["shape"])
        lines.append(
            f"{row['method']:<17} {row['granularity']:<11} {shape:<11} {row['forward_seconds']:>10.4f} "
            f"{row['backward_seconds']:>10.4f} {row['saved_bytes_per_weight']:>9.3f} "
            f"{row['peak_memory_bytes'] / _GIB:>8.3f} {to_linear:>9} {speedup:>8}"
        )
    lines.append(
        f"linear, {result['linear_dtype']}, {result['tokens']} tokens, forward + backward: "
        f"{result['linear_forward_backward_seconds']:.4f} s; copy {result['copy_bytes_per_second'] / 1e9:.1f} GB/s; "
        f"{result['hardware']['gpu'] or result['hardware']['cpu']}, {result['hardware']['threads']} threads"
    )
    return "\n".join(lines)
