"""`edkm bench clustering`: what clustering one layer costs, beside dense DKM and the layer's own matrix product.

One run measures everything, so that ratios compare times of the same run on the same machine. A time is the smallest
of a few repeats.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import clustering, kernels
from edkm_cli.environment import hardware, least_seconds, peak_memory_bytes, versions
from edkm_cli.granularity import Granularity
from edkm_cli.research.bench.config import ClusteringBench
from edkm_cli.settings import command_line
from edkm_cli.summaries import table

Row = dict[str, Any]
_TEMPERATURE = 0.02
_RUNS = 7
_COREMLTOOLS_WIDTH = 1024
_GIB = 2**30


def _peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Memory that a call had above what was in use before; 0 where the system does not tell."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):  # Linux: the highest mark falls to what is in use
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = peak_memory_bytes(device.type)
    function()
    return peak_memory_bytes(device.type) - before


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


def _row(method: str, granularity: str, weight: Tensor, forward: float, backward: float, saved: int, peak: int) -> Row:
    return {
        "method": method,
        "granularity": granularity,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "forward_seconds": forward,
        "backward_seconds": backward,
        "saved_bytes_per_weight": saved / weight.numel(),
        "peak_memory_bytes": peak,
    }


def _measure(
    method: str, granularity: str, weight: Tensor, centroids: Tensor, forward: Callable[[], Tensor], runs: int = _RUNS
) -> Row:
    """Forward and backward apart, bytes saved between them, peak of both."""
    grad, saved, place = torch.randn_like(weight), 0, weight.device

    def once() -> None:
        nonlocal saved
        result, saved = _saved_bytes(forward, (weight, centroids))
        torch.autograd.grad(result, weight, grad)

    peak, seconds, result = _peak_bytes(once, place), least_seconds(forward, place, runs), forward()
    backward = least_seconds(lambda: torch.autograd.grad(result, weight, grad, retain_graph=True), place, runs)
    return _row(method, granularity, weight, seconds, backward, saved, peak)


def _fused(weight: Tensor, centroids: Tensor, **options: Any) -> Row:
    def forward() -> Tensor:
        return clustering.fused_dkm(weight, centroids, **options)[0]

    forward()  # compiles kernels, fills caches
    return _measure("fused", options["granularity"], weight, centroids, forward)


def _straight_through(weight: Tensor, centroids: Tensor, granularity: str) -> Row:
    """The default training mode's own work in a step: snap, then snap again and the LUT's gradient."""
    tile = Granularity.parse(granularity).tile(weight.shape[0], weight.shape[1])
    plain, grad = weight.detach(), torch.randn_like(weight)

    def forward() -> None:
        kernels.snap(plain, centroids, tile, weight.dtype)

    def backward() -> None:
        forward()
        kernels.sum_by_entry(plain, centroids, grad, tile)

    peak = _peak_bytes(backward, weight.device)
    seconds, backward_seconds = (least_seconds(run, weight.device, _RUNS) for run in (forward, backward))
    return _row("straight-through", granularity, weight, seconds, backward_seconds, 0, peak)


def _starting_centroids(weight: Tensor, bits: int, granularity: str) -> Tensor:
    return clustering.kmeans_start(weight.detach().cpu(), 2**bits, granularity=granularity).to(weight.device)


def _coremltools(bits: int, iterations: int, dtype: torch.dtype) -> list[Row]:
    """coremltools' DKM in float32 with one LUT for the tensor, and the fused one beside it, both at 1024 x 1024."""
    try:
        from coremltools.optimize.torch.palettization import DKMPalettizer, DKMPalettizerConfig
    except ImportError as error:
        return [{"method": "coremltools", "skipped": f"coremltools cannot be imported: {error}"}]
    width = _COREMLTOOLS_WIDTH
    weight = torch.randn(width, width) * 0.02
    model: Any = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False))
    model[0].weight.data.copy_(weight)
    settings = {"n_bits": bits, "milestone": 0, "cluster_dim": 1, "kmeans_max_iter": iterations, "weight_threshold": 0}
    palettizer = DKMPalettizer(model, DKMPalettizerConfig.from_dict({"global_config": settings}))
    palettizer.prepare(inplace=True)
    palettizer.step()
    layer: Any = next(module for module in model.modules() if hasattr(module, "weight_fake_quant"))
    parameter = layer.weight
    layer.weight_fake_quant(parameter)  # the first call makes the starting centroids
    row = _measure("coremltools", "tensor", parameter, parameter, lambda: layer.weight_fake_quant(parameter))
    beside = weight.to(dtype).requires_grad_()
    centroids = _starting_centroids(beside, bits, "tensor")
    return [row, _fused(beside, centroids, granularity="tensor", temperature=_TEMPERATURE, iterations=iterations)]


def _linear_seconds(weight: Tensor, tokens: int, dtype: torch.dtype) -> float:
    """Forward and backward of the layer's plain linear at this many tokens."""
    plain = weight.detach().to(dtype).requires_grad_()
    x = torch.randn(tokens, weight.shape[1], dtype=dtype, device=weight.device, requires_grad=True)

    def step() -> None:
        y = torch.nn.functional.linear(x, plain)
        torch.autograd.grad(y, (x, plain), torch.ones_like(y))

    return least_seconds(step, weight.device, _RUNS)


def _copy_bytes_per_second(weight: Tensor) -> float:
    """Bytes read and written a second by a plain copy of the weight."""
    source, target = weight.detach(), torch.empty_like(weight.detach())
    return 2 * source.nbytes / least_seconds(lambda: target.copy_(source), weight.device, 10)


def run(settings: ClusteringBench, *, log: Callable[[str], None] = lambda message: None) -> dict[str, Any]:
    """Measure clustering of a (width, width) layer: the result of `edkm bench clustering --json` (docs/results.md; how to
    read it: docs/clustering.md)."""
    width, tokens, bits, place = settings.width, settings.tokens, settings.bits, torch.device(settings.device)
    weight_dtype = getattr(torch, settings.dtype)
    torch.manual_seed(0)
    weight = (torch.randn(width, width) * 0.02).to(place, weight_dtype).requires_grad_()
    linear_dtype = torch.float32 if place.type == "cpu" else weight_dtype
    rows: list[Row] = []
    options: dict[str, Any] = {"temperature": _TEMPERATURE, "iterations": settings.iterations}
    for tiles in settings.granularity:  # before what takes time
        Granularity.parse(tiles).tile(width, width, layer="--width")
    for tiles in settings.granularity:
        centroids = _starting_centroids(weight, bits, tiles)
        log(f"fused, {tiles}")
        rows.append(_fused(weight, centroids, granularity=tiles, **options))
        log(f"straight-through, {tiles}")
        rows.append(_straight_through(weight, centroids, tiles))
    log(f"linear, {tokens} tokens")
    linear_seconds = _linear_seconds(weight, tokens, linear_dtype)
    copy_bytes_per_second = _copy_bytes_per_second(weight)
    if settings.dense:
        log("dense, tensor (keeps about 530 bytes per weight)")
        centroids = _starting_centroids(weight, bits, "tensor")
        attention = partial(clustering.dense_dkm, weight, centroids, granularity="tensor", **options)
        rows.append(_measure("dense", "tensor", weight, centroids, lambda: attention()[0], runs=1))
        log("coremltools")
        rows.extend(_coremltools(bits, settings.iterations, weight_dtype))
    return {
        "command": command_line("edkm bench clustering", settings, "width", "tokens", "bits", "iterations", "dtype"),
        "rows": rows,
        "linear_forward_backward_seconds": linear_seconds,
        "linear_dtype": str(linear_dtype).removeprefix("torch."),
        **{name: getattr(settings, name) for name in ("tokens", "bits", "iterations")},
        "temperature": _TEMPERATURE,
        "copy_bytes_per_second": copy_bytes_per_second,
        "versions": versions(),
        "hardware": hardware(str(place)),
    }


def format_table(result: dict[str, Any]) -> str:
    """The result of `run` as a text table."""
    measured = [row for row in result["rows"] if "skipped" not in row]
    seconds = [row["forward_seconds"] + row["backward_seconds"] for row in measured]
    dense = {str(row["shape"]): time for row, time in zip(measured, seconds, strict=True) if row["method"] == "dense"}
    rows = []
    for row, time in zip(measured, seconds, strict=True):
        to_linear = time / result["linear_forward_backward_seconds"]
        times = dense.get(str(row["shape"]), 0.0) / time
        about = [row["method"], row["granularity"], "x".join(map(str, row["shape"]))]
        passes = [f"{row['forward_seconds']:.4f}", f"{row['backward_seconds']:.4f}"]
        sizes = [f"{row['saved_bytes_per_weight']:.3f}", f"{row['peak_memory_bytes'] / _GIB:.3f}"]
        ratio = f"{to_linear:.3f}x" if row["shape"] == measured[0]["shape"] else ""
        rows.append([*about, *passes, *sizes, ratio, f"{times:.0f}x" if times else ""])
    header = ["method", "granularity", "shape", "forward s", "backward s", "saved B/w", "peak GiB"]
    header += ["vs linear", "vs dense"]
    where = result["hardware"]
    skipped = [f"{row['method']} skipped: {row['skipped']}" for row in result["rows"] if "skipped" in row]
    linear = f"linear, {result['linear_dtype']}, {result['tokens']} tokens, forward + backward"
    rates = f"{result['linear_forward_backward_seconds']:.4f} s; copy {result['copy_bytes_per_second'] / 1e9:.1f} GB/s"
    machine = f"{where['gpu'] or where['cpu']}, {where['threads']} threads"
    return "\n".join([table(rows, header=header), *skipped, f"{linear}: {rates}; {machine}"])
