"""`edkm bench runtime`: linears on packed weights beside dense ones, by shape, tokens, bits and granularity.

One process measures everything, alternating, so that ratios compare times of one run. A time is the least of many calls
of the public function (`kernels.lut_linear`, `F.linear`), Python's share included. Every product is checked against
float64 first.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edkm_cli.environment import hardware, versions
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.kernels import lut_linear_torch
from edkm_cli.kernels.tiles import Packed
from edkm_cli.nn.ready import Ready
from edkm_cli.packing import pack

SHAPES = ("576x576", "1536x576", "4096x4096", "11008x4096")
TOKENS = (1, 16, 512)
_DTYPES = ("float32", "bfloat16", "float16")
_BUDGET_SECONDS = 0.4  # of repeats for one time
_COPY_BYTES = 1 << 27
Log = Callable[[str], None]


def _parse_shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise UserError(f"--shape must be OUTxIN, such as 4096x4096, got {text!r}")
    return int(match[1]), int(match[2])


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    """The least time of a call; on a GPU of ten in a row, which hides what launching one costs."""
    best, calls, end = float("inf"), 10 if device.type == "cuda" else 1, time.perf_counter() + _BUDGET_SECONDS
    for turn in itertools.count():
        start = time.perf_counter()
        for _ in range(calls):
            function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        best = min(best, (now - start) / calls) if turn else best  # the first call compiles and warms up
        if turn >= 3 and now > end:
            return best
    raise AssertionError("unreachable")


def _random(shape: tuple[int, int], bits: int, granularity: str, device: torch.device) -> Packed:
    tile = Granularity.parse(granularity).tile(*shape)
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=generator)
    groups = shape[0] // tile[0] * (shape[1] // tile[1])
    lut = torch.randn(groups, 2**bits, generator=generator).sort(1).values.half()
    return Packed(pack(codes, bits).to(device), lut.to(device), None, bits, tile)


def _check(found: Tensor, x: Tensor, dense: Tensor) -> None:
    exact = x.double() @ dense.double().T
    limit = 8 * torch.finfo(x.dtype).eps * float((x.double().abs() @ dense.double().abs().T).max())
    error = float((found.double() - exact).abs().max())
    if not error <= limit:
        raise RuntimeError(f"a packed product is wrong by {error}, more than rounding explains ({limit})")


def _flags(**values: Sequence[Any]) -> str:
    return " ".join(f"--{name} {value}" for name, given in values.items() for value in given)


def _copy_bytes_per_second(place: torch.device) -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)
    return _COPY_BYTES / _seconds(partial(target.copy_, source), place)


def bench_runtime(
    *,
    shapes: Sequence[str] = SHAPES,
    tokens: Sequence[int] = TOKENS,
    bits: Sequence[int] = (3, 4),
    granularities: Sequence[str] = ("row:1",),
    dtypes: Sequence[str] = ("bfloat16",),
    device: str = "cpu",
    log: Log = print,
) -> dict[str, Any]:
    """The result of `edkm bench runtime` (its keys: docs/results.md). Raises UserError for bad values."""
    sizes, place = [_parse_shape(shape) for shape in shapes], torch.device(device)
    for dtype in dtypes:
        if dtype not in _DTYPES:
            raise UserError(f"--dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    for size, granularity in itertools.product(sizes, granularities):
        Granularity.parse(granularity).tile(*size, layer="--shape")
    copied = _copy_bytes_per_second(place)
    rows = []
    for size, count, granularity in itertools.product(sizes, bits, granularities):
        packed = _random(size, count, granularity, place)
        dense = lut_linear_torch.dense(packed, size[1], torch.float32)
        half = dense.bfloat16()
        for number in tokens:
            x = torch.randn(number, size[1], generator=torch.Generator().manual_seed(number)).to(place)
            with torch.no_grad():
                dense_half = _seconds(partial(torch.nn.functional.linear, x.bfloat16(), half), place)
                dense_full = _seconds(partial(torch.nn.functional.linear, x, dense), place)
                for dtype in dtypes:
                    seconds = _packed_seconds(x.to(getattr(torch, dtype)), packed, dense, place)
                    rows.append(
                        {
                            "shape": list(size),
                            "tokens": number,
                            "bits": count,
                            "granularity": granularity,
                            "dtype": dtype,
                            "packed_seconds": seconds,
                            "dense_bf16_seconds": dense_half,
                            "dense_fp32_seconds": dense_full,
                            "packed_bytes_per_second": (packed.indices.nbytes + packed.table.nbytes) / seconds,
                        }
                    )
                    log(_line(rows[-1]))
    return {
        "command": "edkm bench runtime "
        + _flags(shape=shapes, tokens=tokens, bits=bits, granularity=granularities, dtype=dtypes),
        "rows": rows,
        "copy_bytes_per_second": copied,
        "versions": versions(),
        "hardware": hardware(device),
    }


def _packed_seconds(x: Tensor, packed: Packed, dense: Tensor, place: torch.device) -> float:
    """As a module calls it: prepared once, by the operator where the kernel is not the way."""
    from edkm_cli.kernels.lut_linear import lut_linear

    ready, columns, matrices = Ready(), x.shape[-1], (packed,)

    def product() -> Tensor:
        found = ready.product(x, matrices, columns)
        if found is not None:
            return found[0]
        return lut_linear(x, packed.indices, packed.table, None, bits=packed.bits, tile=packed.tile or (1, columns))

    _check(product(), x, dense)
    return _seconds(product, place)


def _line(row: dict[str, Any]) -> str:
    packed = row["packed_seconds"]
    shape = "x".join(map(str, row["shape"]))
    return (
        f"{shape:<11} {row['tokens']:>6} {row['bits']:>4} {row['granularity']:<11} {row['dtype']:<9} "
        f"{packed * 1e6:>10.1f} {row['dense_bf16_seconds'] / packed:>8.2f} {row['dense_fp32_seconds'] / packed:>8.2f} "
        f"{row['packed_bytes_per_second'] / 1e9:>6.1f}"
    )


def format_table(result: dict[str, Any]) -> str:
    """The result of `bench_runtime` as a text table: how many times as fast as `F.linear` in bfloat16 and float32."""
    head = f"{'shape':<11} {'tokens':>6} {'bits':>4} {'granularity':<11} {'dtype':<9} {'packed us':>10} {'vs bf16':>8}"
    lines = [f"{head} {'vs fp32':>8} {'GB/s':>6}", *map(_line, result["rows"])]
    where = result["hardware"]
    lines.append(
        f"copy {result['copy_bytes_per_second'] / 1e9:.1f} GB/s; {where['gpu'] or where['cpu']}, {where['threads']} threads"
    )
    return "\n".join(lines)
