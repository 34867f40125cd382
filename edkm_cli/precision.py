"""Matrix products in bfloat16 where float32 buys nothing: to train weights or sample text, never to solve or measure.

What it costs: rounding a factor changes it by at most 2^-8 of itself, so a product of rounded factors A and B is off by at
most 2^-7 (|A| |B|), and one whose result is rounded, too, by half as much again. Which products a library rounds differs
between processors: some round the smallest, some none.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

TOKENS_A_SUM = 2048


def multiplies_bfloat16(device: str) -> bool:
    """Whether a `cpu` or `cuda` here multiplies bfloat16 faster than float32."""
    return torch.cpu._is_avx512_bf16_supported() if device == "cpu" else device == "cuda"


@contextmanager
def float32_products() -> Iterator[None]:
    """float32 matrix products as they are, whatever is set outside: choices that make up for one another need them."""
    backends = [getattr(torch.backends, name).matmul for name in ("cuda", "mkldnn")]
    before = [one.fp32_precision for one in backends]  # torch's older functions fail beside settings by this name
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def bfloat16_autocast(device: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Linears on bfloat16 tensors, where `dtype` is float32 and the device multiplies them faster."""
    kind = device.partition(":")[0]
    rounds = dtype == torch.float32 and multiplies_bfloat16(kind)
    return torch.autocast(kind, torch.bfloat16) if rounds else nullcontext()


def as_autocast(x: Tensor) -> Tensor:
    """`x` in the dtype that autocast, where it is on, has a linear multiply in: for operators that it does not know."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """left^T right, (n, m) float32, of matrices (tokens, n) and (tokens, m): a sum over tokens.

    Where the processor has instructions for it, from bfloat16 factors, some thousand tokens at a time, so that rounding
    the parts' sums to bfloat16 averages out: off by a thousandth.
    """
    if not _rounds_faster(left):
        return _with_itself(left) if left is right else left.t().to(right.dtype) @ right
    total = left.new_zeros(left.shape[1], right.shape[1])
    for ours, theirs in zip(left.split(TOKENS_A_SUM), right.split(TOKENS_A_SUM), strict=True):
        total += _with_itself(ours.bfloat16()) if left is right else ours.bfloat16().t() @ theirs.bfloat16()
    return total


def _with_itself(x: Tensor) -> Tensor:
    """x^T x from its blocks on the diagonal and below, 5/8 of the multiplications where there are four; the others are their
    mirror images. A block is 256 columns wide or more, so that what is small stays one product."""
    columns = x.shape[1]
    total, step = x.new_empty(columns, columns), max(256, -(-columns // 4))
    for first in range(0, columns, step):
        block = slice(first, first + step)
        total[block, : block.stop] = x[:, block].t() @ x[:, : block.stop]
        total[:first, block] = total[block, :first].t()
    return total


@contextmanager
def bfloat16_linears(model: nn.Module, *, alone: bool = False) -> Iterator[None]:
    """Inside, the `nn.Linear` layers of a float32 model on a CPU multiply in bfloat16, with a copy of the weights that is
    rounded once; everything else stays in float32.

    For many passes with the same weights: rounding them in each reaches half the speed (180 against 350 GFLOP/s a core of an
    AMD EPYC with AVX-512 BF16, for 64 rows). Logits are rounded, too. Where the processor has no such instructions,
    nothing changes. `alone`: the float32 weights are let go.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear and _rounds_faster(module.weight)]
    for module in linears:
        module.forward = _rounded(module)  # type: ignore[assignment,method-assign]
        if alone:
            module.weight = nn.Parameter(module.weight.to("meta"), module.weight.requires_grad)
    try:
        yield
    finally:
        for module in linears:
            del module.forward


def _rounds_faster(weight: Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.device.type == "cpu" and multiplies_bfloat16("cpu")


def _rounded(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    ops = torch.ops.mkldnn  # what nn.functional.linear calls, but that lays the weight out anew each time
    weight = ops._reorder_linear_weight(linear.weight.detach().bfloat16())
    bias = None if linear.bias is None else linear.bias.detach().bfloat16()
    return lambda x: ops._linear_pointwise(x.bfloat16(), weight, bias, "none", [], "").to(x.dtype)
