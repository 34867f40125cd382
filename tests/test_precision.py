import torch
from torch import nn

from edkm_cli.precision import bfloat16_linears, sum_of_products


def test_sums_of_products_are_those_of_float32_up_to_a_thousandth():
    draw = torch.Generator().manual_seed(0)
    left, right = (torch.randn(5000, width, generator=draw) for width in (48, 32))
    for ours, theirs in ((left, right), (left, left)):
        exact = ours.double().t() @ theirs.double()
        found = sum_of_products(ours, theirs)
        assert found.dtype == torch.float32
        assert float((found - exact).norm() / exact.norm()) < (2e-3 if theirs is left else 1e-2)


def test_sums_of_products_in_float64_are_exact():
    left = torch.randn(300, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.equal(sum_of_products(left, left), left.t() @ left)


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
