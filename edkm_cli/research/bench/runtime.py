"""`edkm bench runtime`: linears on packed weights beside dense ones, by shape, tokens, bits and granularity.

One process measures everything, alternating, so that ratios compare times of one run. A time is the least of many calls
(of what a layer calls, and of `F.linear`), Python's share included. Every product is checked against float64 first.

One matrix that is read again and again stays in the processor's cache, as a small model's does. `cold` goes through so
many copies of it that each has left the cache when its turn comes again, as in a large model: then memory is measured.
"""

import itertools
import logging
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.environment import hardware, versions
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.packing import Packed, pack
from edkm_cli.research.bench.config import RuntimeBench
from edkm_cli.runtime import lut_linear_torch
from edkm_cli.runtime.dispatch import Ready
from edkm_cli.settings import command_line
from edkm_cli.summaries import table

_ROUNDS, _BUDGET_SECONDS = 4, 0.15  # how often products take turns, and of repeats each time
_COPY_BYTES = 1 << 27
_COLD_BYTES = 1 << 27  # that a sweep reads at least: several times the last-level cache, where that is larger
_CACHES = 4
_TURNS = 10
_LOG = logging.getLogger(__name__)


def _parse_shape(text: str) -> tuple[int, int]:
    if (match := re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)) is None:
        raise UserError(f"--shape must be OUTxIN, such as 4096x4096, got {text!r}")
    return int(match[1]), int(match[2])


def _seconds(turn: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """The least time of a call, all those of `turn` one after the other; on a GPU ten turns, in a CUDA graph where they can
    be captured, which hides what launching them costs."""
    return _gpu_seconds(turn, device) if device.type == "cuda" else _least_seconds(turn) / len(turn)


def _least_seconds(turn: Sequence[Callable[[], Any]], wait: Callable[[], Any] | None = None) -> float:
    """The least time of a turn, of at least three and as many as fit into the budget; `wait` is called at its end."""
    times: list[float] = []
    end = time.perf_counter() + _BUDGET_SECONDS
    while len(times) < 4 or time.perf_counter() < end:
        start = time.perf_counter()
        for call in turn:
            call()
        if wait is not None:
            wait()
        times.append(time.perf_counter() - start)
    return min(times[1:])  # the first call compiles and warms up


def _gpu_seconds(turn: Sequence[Callable[[], Any]], device: torch.device) -> float:
    def turns() -> None:
        for call in itertools.chain.from_iterable(itertools.repeat(turn, _TURNS)):
            call()

    with torch.cuda.stream(torch.cuda.Stream(device)):  # compiles and warms up; a capture must find everything there
        turns()
    torch.cuda.synchronize(device)
    run: Callable[[], Any] = turns
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            turns()
        run = graph.replay
    except RuntimeError as error:
        _LOG.warning("not measured in a CUDA graph, so that launches count: %s", error)
    return _least_seconds([run], partial(torch.cuda.synchronize, device)) / _TURNS / len(turn)


def _cache_bytes(device: torch.device) -> int:
    """Size of the last-level cache; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    matches = [re.fullmatch(r"(\d+)([KMG]?)", file.read_text().strip()) for file in sizes]
    return max((int(m[1]) << 10 * " KMG".index(m[2] or " ") for m in matches if m), default=0)


def _copies(kept_bytes: int, cold: bool, device: torch.device) -> int:
    """How many matrices of `kept_bytes` a sweep goes through."""
    return max(2, -(-max(_COLD_BYTES, _CACHES * _cache_bytes(device)) // kept_bytes)) if cold else 1


def _random(shape: tuple[int, int], bits: int, granularity: str, device: torch.device) -> Packed:
    tiles, generator = Granularity.parse(granularity), torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=generator)
    lut = torch.randn(tiles.groups(*shape), 2**bits, generator=generator).sort(1).values.half()
    return Packed(pack(codes, bits).to(device), lut.to(device), None, bits, tiles.tile(*shape))


def _check(product: Tensor, x: Tensor, dense: Tensor) -> None:
    exact = x.double() @ dense.double().T
    limit = 8 * torch.finfo(x.dtype).eps * float((x.double().abs() @ dense.double().abs().T).max())
    error = float((product.double() - exact).abs().max())
    if not error <= limit:
        raise RuntimeError(f"a packed product is wrong by {error}, more than rounding explains ({limit})")


def _copy_bytes_per_second(place: torch.device) -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=place)
    return _COPY_BYTES / _seconds([partial(torch.empty_like(source).copy_, source)], place)


def run(settings: RuntimeBench, *, log: Callable[[str], None] = print) -> dict[str, Any]:
    """The result of `edkm bench runtime` (its keys: docs/results.md). Raises UserError for bad values."""
    sizes, place = [_parse_shape(text) for text in settings.shape], torch.device(settings.device)
    for size, tiles in itertools.product(sizes, settings.granularity):
        Granularity.parse(tiles).tile(*size, layer="--shape")
    copied = _copy_bytes_per_second(place)
    rows = []
    for size, count, tiles in itertools.product(sizes, settings.bits, settings.granularity):
        packed = _random(size, count, tiles, place)
        dense = lut_linear_torch.dense(packed, size[1], torch.float32)
        copies = range(_copies(packed.indices.nbytes, settings.cold, place))
        matrices = [packed._replace(indices=packed.indices.clone(), table=packed.table.clone()) for _ in copies]
        halves = [dense.bfloat16() for _ in range(_copies(2 * dense.numel(), settings.cold, place))]
        fulls = [dense.clone() for _ in range(_copies(4 * dense.numel(), settings.cold, place))]
        for number in settings.tokens:
            x = torch.randn(number, size[1], generator=torch.Generator().manual_seed(number)).to(place)
            with torch.no_grad():
                turns: list[list[Callable[[], Any]]] = [
                    [partial(torch.nn.functional.linear, x.bfloat16(), w) for w in halves],
                    [partial(torch.nn.functional.linear, x, w) for w in fulls],
                    *(_products(x.to(getattr(torch, name)), matrices, dense) for name in settings.dtype),
                ]
                rounds = [[_seconds(turn, place) for turn in turns] for _ in range(_ROUNDS)]
                dense_half, dense_full, *times = (min(seconds) for seconds in zip(*rounds, strict=True))
                for name, seconds in zip(settings.dtype, times, strict=True):
                    rate = (packed.indices.nbytes + packed.table.nbytes) / seconds
                    row = {"shape": list(size), "tokens": number, "bits": count, "granularity": tiles, "dtype": name}
                    row |= {"matrices": len(matrices), "packed_seconds": seconds, "dense_bf16_seconds": dense_half}
                    row |= {"dense_fp32_seconds": dense_full, "packed_bytes_per_second": rate}
                    rows.append(row | {"share_of_copy": rate / copied})
                    log("  ".join(_cells(rows[-1])))
    return {
        "command": command_line("edkm bench runtime", settings, "shape", "tokens", "bits", "granularity", "dtype"),
        "cold": settings.cold,
        "rows": rows,
        "copy_bytes_per_second": copied,
        "versions": versions(),
        "hardware": hardware(settings.device),
    }


def _products(x: Tensor, matrices: Sequence[Packed], dense: Tensor) -> list[Callable[[], Tensor]]:
    """Products as a module calls them: prepared once, by the operator where the kernel is not the way."""
    from edkm_cli.runtime.lut_linear import lut_linear

    columns = x.shape[-1]

    def product(ready: Ready, packed: tuple[Packed]) -> Tensor:
        if (products := ready.product(x, packed, columns)) is not None:
            return products[0]
        indices, table, _, bits, tile = packed[0]
        return lut_linear(x, indices, table, None, bits=bits, tile=tile or (1, columns))

    calls: list[Callable[[], Tensor]] = [partial(product, Ready(), (packed,)) for packed in matrices]
    _check(calls[0](), x, dense)
    return calls


def _cells(row: dict[str, Any]) -> list[str]:
    packed, of = row["packed_seconds"], (str(row[key]) for key in ("tokens", "bits", "granularity", "dtype"))
    ratios = (f"{row[f'dense_{kind}_seconds'] / packed:.2f}" for kind in ("bf16", "fp32"))
    rates = (f"{row['packed_bytes_per_second'] / 1e9:.1f}", f"{row['share_of_copy']:.2f}")
    return ["x".join(map(str, row["shape"])), *of, f"{packed * 1e6:.1f}", *ratios, *rates]


def format_table(result: dict[str, Any]) -> str:
    """The result of `run` as a text table: how many times as fast as `F.linear` in bfloat16 and float32."""
    head = ["shape", "tokens", "bits", "granularity", "dtype", "packed us", "vs bf16", "vs fp32", "GB/s", "of copy"]
    lines = [table([*map(_cells, result["rows"])], header=head)]
    copied, where = result["copy_bytes_per_second"] / 1e9, result["hardware"]
    if result["cold"]:
        lines.append("each matrix one of many, which no cache holds")
    lines.append(f"copy {copied:.1f} GB/s; {where['gpu'] or where['cpu']}, {where['threads']} threads")
    return "\n".join(lines)
