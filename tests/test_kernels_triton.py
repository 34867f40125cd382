"""The Triton kernels in Triton's interpreter against the plain passes, in a process of its own.

`TRITON_INTERPRET=1` must be set before Triton is imported, so this file runs itself: pytest starts
`python tests/test_kernels_triton.py`, which checks everything and exits with 0. `scripts/gpu_check.sh` runs it with the
argument `cuda`, without the interpreter.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

# The interpreter takes seconds for a case: not all products of dtype, geometry and importance, but each pair of the three.
CASES = [
    (torch.float32, (3, 40), (1, 40), 8, None),
    (torch.bfloat16, (3, 40), (1, 40), 8, "columns"),
    (torch.float16, (3, 40), (1, 40), 8, "weights"),
    (torch.float32, (4, 24), (2, 24), 4, "columns"),
    (torch.bfloat16, (4, 24), (2, 24), 4, "weights"),
    (torch.float16, (4, 24), (2, 24), 4, None),
    (torch.float32, (2, 64), (1, 64), 16, "weights"),
    (torch.bfloat16, (2, 64), (1, 64), 16, None),
    (torch.float16, (2, 64), (1, 64), 16, "columns"),
    (torch.float32, (1, 300), (1, 300), 32, "weights"),  # in several chunks
    (torch.bfloat16, (4, 48), (2, 16), 8, "columns"),
    (torch.float32, (4, 48), (2, 16), 4, "weights"),
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.slow
def test_triton_kernels_agree_with_the_plain_passes_in_the_interpreter():
    environment = dict(os.environ, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    root = Path(__file__).parent.parent
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, __file__],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def assert_near(ours, exact, plain, what):
    """Twice the plain passes' error plus one rounding of what is stored, at the scale of the largest entry."""
    scale = exact.abs().max().double()
    floor = 4 * torch.finfo(ours.dtype if ours.dtype.itemsize == 2 else torch.float32).eps * scale + 1e-6
    error, allowed = (ours.double() - exact).abs().max(), 2 * (plain.double() - exact).abs().max() + floor
    assert error <= allowed, f"{what}: {error} > {allowed}"


def check_groups(dtype, shape, tile, k, kind):
    from edkm_cli.kernels import attention_triton

    weight, grad = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    start = torch.linspace(-1.5, 1.5, k).repeat(weight.numel() // (tile[0] * tile[1]), 1)
    assert attention_triton.supports(weight, tile, k)
    importance = {None: None, "columns": torch.rand(shape[1]).bfloat16(), "weights": torch.randn(shape).exp()}[kind]
    check_group(weight, grad, start, tile, k, importance)


def check_group(weight, grad, start, tile, k, importance):
    from edkm_cli.kernels import TorchPasses, attention_triton, closed_form

    dtype, shape, results = weight.dtype, tuple(weight.shape), []
    for passes, real in (
        (attention_triton.TritonPasses(weight, tile, importance), torch.float32),
        (TorchPasses(weight.double(), tile, importance), torch.float64),
        (TorchPasses(weight, tile, importance), torch.float32),
    ):
        spread = closed_form.relative_temperature(*passes.spread(), 0.05)
        final = passes.iterate(start.to(real), spread.tau, 3)
        soft = passes.soft(final, spread.tau, real)
        upstream = grad if real == torch.float32 else grad.double()
        backward = passes.backward(start.to(real), spread, 3, upstream, torch.ones_like(final))
        results.append((final, soft, *backward))
    for what, ours, exact, plain in zip(("centroids", "soft", "dw", "dc"), *results, strict=True):
        assert_near(ours, exact, plain, (what, dtype, shape, k, importance is not None))


def check_constant_rows():
    from edkm_cli.kernels import attention_triton, closed_form

    weight = torch.full((2, 16), 0.25)
    passes, start = attention_triton.TritonPasses(weight, (1, 16)), torch.tensor([[0.25, 0.5]]).repeat(2, 1)
    spread = closed_form.relative_temperature(*passes.spread(), 0.05)
    assert torch.equal(passes.iterate(start, spread.tau, 2), start)
    gradient, _ = passes.backward(start, spread, 2, torch.ones(2, 16), None)
    assert gradient.isfinite().all()


def check_palette(dtype, tile, k):
    from edkm_cli.kernels import palette_triton, passes_torch

    weight, grad = torch.randn(4, 24).to(dtype), torch.randn(4, 24).to(dtype)
    lut = torch.randn((4 // tile[0]) * (24 // tile[1]), k)
    arguments = weight, lut, tile
    assert torch.equal(palette_triton.nearest(*arguments), passes_torch.nearest(*arguments))
    wanted = passes_torch.snap(*arguments, torch.float32)[0]
    ours, finite = palette_triton.snap(*arguments, torch.float32)
    assert finite is None
    assert torch.equal(ours, wanted)
    sums = palette_triton.sum_by_entry(weight, lut, grad, tile), passes_torch.sum_by_entry(weight, lut, grad, tile)
    torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)
    for flaw in (float("nan"), float("inf"), -float("inf")):
        flawed = weight.clone()
        flawed[1, 3] = flaw
        ours, _ = palette_triton.snap(flawed, lut, tile, torch.float32)
        assert ours.isnan().nonzero().tolist() == [[1, 3]]
        assert torch.equal(ours[2:], wanted[2:])
        for entry in (0, k - 1):
            flawed_lut = lut.clone()
            flawed_lut[-1, entry] = flaw
            ours, _ = palette_triton.snap(weight, flawed_lut, tile, torch.float32)
            assert ours[-tile[0] :, -tile[1] :].isnan().all()
            assert int(ours.isnan().sum()) == tile[0] * tile[1]


def check_packed(dtype, rows, columns, bits, tile):
    """Decoded weights; `tile` None: row scales."""
    from edkm_cli.packing import Packed, pack
    from edkm_cli.runtime import lut_linear_torch, lut_linear_triton

    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8)
    groups = None if tile is None else rows // tile[0] * (columns // tile[1])
    table = torch.rand(rows, 1) if groups is None else torch.randn(groups, 2**bits).half()
    packed = Packed(pack(codes, bits), table, torch.randn(rows).to(dtype), bits, tile)
    for kept in (torch.float32, torch.float64):
        wanted = lut_linear_torch.dense(packed, columns, kept)
        assert torch.equal(lut_linear_triton.dense(packed, columns, kept), wanted)
    torch.testing.assert_close(lut_linear_triton.dense(packed, columns, dtype), wanted.to(dtype))
    values = torch.randn(rows - 2, columns).to(dtype)  # of the rows from the third on
    sums = lut_linear_torch.sum_by_code(values.double(), packed, columns, 2)
    torch.testing.assert_close(
        lut_linear_triton.sum_by_code(values, packed, columns, 2).double(), sums, rtol=1e-4, atol=1e-4
    )


def check_rounding(rows, columns, k, tiles, stored):
    """A block of columns rounded, and a descent: the reference's but where a weight lies between two entries."""
    from edkm_cli.kernels import passes_torch, rounding_triton

    weight, x = torch.randn(columns, rows).mul(0.5).to(stored).float(), torch.randn(4 * columns, columns)
    luts = torch.randn(rows, tiles, k).sort(-1).values
    factor = torch.eye(columns) + 0.03 * torch.randn(columns, columns).triu(1)
    arguments = luts.permute(1, 2, 0).contiguous(), torch.arange(columns) * tiles // columns, factor, stored
    blocks = weight.clone(), weight.clone()
    found, plain = (
        rounding_triton.round_columns(blocks[0], *arguments),
        passes_torch.round_columns(blocks[1], *arguments),
    )
    off = 1e-3 if stored == torch.float32 else 0.02  # the last bit of a sum can decide how a number is stored
    same = torch.isclose(found, plain, rtol=0, atol=off).all(0)
    assert same.float().mean() >= (0.9 if stored == torch.float32 else 0.6), ("rounding", same.float().mean())
    torch.testing.assert_close(blocks[0][:, same], blocks[1][:, same], rtol=0, atol=off)
    hessian = x.t() @ x
    indices = [torch.zeros(rows, columns, dtype=torch.uint8) for _ in range(2)]
    for codes, changes in zip(indices, (rounding_triton.changes, passes_torch.changes), strict=True):
        errors = luts[:, torch.arange(columns) * tiles // columns, 0] - weight.t()
        passes_torch.descend(codes, (errors @ hessian).contiguous(), luts, hessian, 3, changes)
    assert (indices[0] == indices[1]).float().mean() >= 0.95, "descent"


if __name__ == "__main__":
    torch.set_default_device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    torch.manual_seed(0)
    for case in CASES:
        check_groups(*case)
    check_constant_rows()
    for tile, k in (((4, 24), 5), ((1, 24), 8), ((2, 8), 5)):
        check_palette(torch.float32, tile, k)
        check_palette(torch.bfloat16, tile, 13 - k)
    for bits in (1, 3, 4, 8):
        check_packed(torch.float32, 6, 45, bits, (1, 45))
        check_packed(torch.bfloat16, 8, 48, bits, (4, 24))
        check_packed(torch.float16, 5, 37, bits, None)
    check_rounding(37, 80, 8, 1, torch.float32)  # five seconds in the interpreter
    for stored in (torch.float32, torch.bfloat16):
        check_rounding(16, 66, 5, 2, stored)
