import pytest
import torch
from torch import nn

from edkm_cli.precision import bfloat16_linears, float32_products, sum_of_products


@pytest.mark.parametrize("size", [8, 64, 300])
def test_rounding_costs_no_more_than_is_said(size):
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(5000, width, generator=draw) for width in (size, 32))
    rounding, summing = 2.0**-8, 5000 * 2.0**-24
    for ours, theirs in ((left, right), (left, left)):
        exact = ours.double().t() @ theirs.double()
        magnitude = ours.abs().double().t() @ theirs.abs().double()
        summed = sum_of_products(ours, theirs)
        assert summed.dtype == torch.float32
        assert float(((summed - exact).abs() / magnitude).max()) <= (3 * rounding + summing) * (1 + rounding)
        # Errors of single numbers average out: far below the bound.
        assert float((summed - exact).norm() / exact.norm()) < (2e-3 if theirs is left else 1e-2)


def test_without_instructions_products_are_exact(exact_products):
    left = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sum_of_products(left, left), left.t() @ left)


def test_sums_of_products_in_float64_are_exact():
    left = torch.randn(300, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(sum_of_products(left, left), left.t() @ left)


@pytest.mark.parametrize("columns", [256, 257, 600, 1030, 4096])
def test_sums_of_products_from_their_lower_blocks_are_whole(columns):
    left = torch.randn(3, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(sum_of_products(left, left), left.t() @ left, rtol=1e-12, atol=1e-12)


def test_linears_are_as_they_were_afterwards_and_near_it_inside():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16, bias=False))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(x)
        with bfloat16_linears(model):
            inside = model(x)
        assert inside.dtype == torch.float32
        assert float((inside - before).norm() / before.norm()) < 0.02
        assert torch.equal(model(x), before)


def test_float32_products_beside_torchs_newer_settings():
    """Once one of all backends is set `torch.get_float32_matmul_precision` fails."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in (torch.backends, *backends):
            backend.fp32_precision = "tf32"
        with float32_products():
            assert [backend.fp32_precision for backend in backends] == ["ieee", "ieee"]
        assert [backend.fp32_precision for backend in backends] == ["tf32", "tf32"]
    finally:
        for backend, precision in zip((torch.backends, *backends), ("none", *before), strict=True):
            backend.fp32_precision = precision
