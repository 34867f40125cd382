"""Round to nearest against a loop over single weights."""

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.research.baselines import rtn
from edkm_cli.research.baselines.grid import RULES, Uniform
from edkm_cli.research.baselines.outcome import decoder_linears
from helpers import quantized, tiny_llama


def half(number):
    return float(torch.tensor(number, dtype=torch.float64).half())


def levels(group, bits, rule):
    """The points of a group's grid, one by one, as each scheme's authors define them."""
    low, high, top = min(0.0, *group), max(0.0, *group), 2**bits - 1
    if rule == "minmax":
        scale = half((high - low) / top)
        zero = round(-low / scale)
        return [scale * (i - zero) for i in range(top + 1)]
    largest = max(-low, high)
    if rule == "symmetric":
        scale = half(2 * largest / top)
        return [scale * i for i in range(-(2 ** (bits - 1)), 2 ** (bits - 1))]
    if rule == "absmax":  # zero in the middle, and as many steps on either side
        most = 2 ** (bits - 1) - 1
        return [half(largest / most) * i for i in range(-most, most + 1)]
    # AutoRound: the largest weight is a grid point, at the end that has one step more.
    scale = half(largest / 2 ** (bits - 1)) * (-1 if high >= -low else 1)
    return [scale * i for i in range(-(2 ** (bits - 1)), 2 ** (bits - 1))]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("width", [6, 12, 24])
def test_every_weight_goes_to_the_nearest_point_of_its_groups_grid(rule, bits, width):
    weight = torch.randn(5, 24, generator=torch.Generator().manual_seed(bits), dtype=torch.float64) * 0.05
    weight[0] = weight[0].abs() + 0.01  # groups of one sign: the grid still contains zero
    weight[1] = -weight[1].abs()
    expected = weight.clone()
    for row in range(5):
        for start in range(0, 24, width):
            points = levels(weight[row, start : start + width].tolist(), bits, rule)
            for column in range(start, start + width):
                expected[row, column] = min(points, key=lambda point: abs(point - float(weight[row, column])))
    rounded = Uniform(bits, width, rule).round(weight)
    torch.testing.assert_close(rounded, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("rule", RULES)
def test_zeros_stay_zeros_and_huge_weights_stay_finite(rule):
    weight = torch.zeros(2, 8)
    assert torch.equal(Uniform(3, 8, rule).round(weight), weight)
    weight[0, 3] = 3e6
    assert bool(Uniform(3, 8, rule).round(weight).isfinite().all())


def test_autorounds_rule_meets_the_largest_weight_and_the_symmetric_rule_does_not():
    weight = torch.tensor([[0.5, -0.25, 0.125, 0.0], [-0.5, 0.25, 0.125, 0.0]])
    exact = Uniform(3, 4, "autoround").round(weight)
    assert exact[:, 0].tolist() == [0.5, -0.5]
    rounded = Uniform(3, 4, "symmetric").round(weight)
    assert rounded[0, 0] == pytest.approx(0.5 * 6 / 7, rel=1e-3)


def test_the_symmetric_rule_sends_the_most_negative_weight_to_the_lowest_level_unless_the_scale_was_rounded_up():
    weight = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    weight *= -torch.gather(weight, 1, weight.abs().argmax(1, keepdim=True)).sign()
    largest = -weight.amin(1)  # of magnitude, and negative, in each row
    lower, upper = largest * 8 / 7, largest * 6 / 7  # -4 and -3 scales, equally far

    def reached(scale_dtype):
        rounded = Uniform(3, 64, "symmetric", scale_dtype).round(weight)
        found = -rounded.gather(1, weight.argmin(1, keepdim=True))[:, 0]
        low = torch.isclose(found, lower, rtol=1e-3)
        assert bool((low | torch.isclose(found, upper, rtol=1e-3)).all())
        return int(low.sum())

    rounded_up = int(((2 * largest / 7).half().float() > 2 * largest / 7).sum())
    assert 50 < rounded_up < 150
    assert reached("float16") == 200 - rounded_up
    assert reached("float32") > 160  # a quotient of float32 numbers is exactly -3.5 for most, and ties go to even


def test_scales_are_stored_in_the_dtype_asked_for():
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    for rule in RULES:
        exact = Uniform(3, rule=rule, scale_dtype="float32").fit(weight.double()).scale
        stored = Uniform(3, rule=rule).fit(weight.double()).scale
        assert torch.equal(exact.float().double(), exact)
        assert torch.equal(exact.half().double(), stored)
        assert not torch.equal(exact, stored)
    with pytest.raises(UserError, match="scale_dtype must be one of float16, float32, got 'bfloat16'"):
        quantized(rtn, tiny_llama(), [], bits=3, group_size=8, scale_dtype="bfloat16")


def test_the_model_gets_the_rounded_weights():
    model = tiny_llama()
    before = {name: layer.weight.detach().clone() for name, layer in decoder_linears(model).items()}
    outcome = quantized(rtn, model, [], bits=4, group_size=8, rule="symmetric")
    for name, layer in decoder_linears(model).items():
        assert torch.equal(layer.weight, Uniform(4, 8, "symmetric").round(before[name]))
    assert outcome.calibration_tokens == 0


def test_an_unknown_rule_is_refused():
    with pytest.raises(UserError, match="one of minmax, symmetric, autoround"):
        quantized(rtn, tiny_llama(), [], bits=3, group_size=8, rule="min-max")
