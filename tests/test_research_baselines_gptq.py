"""GPTQ against optimal brain quantization written out: an explicit inverse Hessian, updated weight by weight."""

from functools import partial

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.research.baselines import gptq
from edkm_cli.research.baselines.grid import Uniform
from edkm_cli.research.baselines.outcome import decoder_linears
from helpers import quantized, tiny_llama

quantize_weight = partial(gptq.quantize_weight, order="natural", static_groups=False, damping=0.01)


def layer(rows, columns, *, tokens=400, seed=0):
    """(weight, Hessian) float64 with inputs that are correlated and of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator, dtype=torch.float64) @ (mix + torch.eye(columns))
    x *= torch.rand(columns, generator=generator, dtype=torch.float64) + 0.2
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return weight, x.t() @ x


def brute_force(weight, hessian, *, bits, width, rule="minmax", order=None, static=False, damping=0.01):
    """Round one column at a time; correct the rest by the inverse Hessian over the columns that are left."""
    w, columns = weight.clone(), weight.shape[1]
    damped = hessian + damping * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    order = list(range(columns)) if order is None else order
    form, result = Uniform(bits, rule=rule), torch.zeros_like(w)
    grid = form.fit(w)
    for position, j in enumerate(order):
        if static:
            start = j // width * width
            grid = form.fit(weight[:, start : start + width])
        elif width < columns and position % width == 0:
            grid = form.fit(w[:, order[position : position + width]])
        result[:, j] = grid.round(w[:, j : j + 1])[:, 0]
        left = order[position:]
        inverse = torch.linalg.inv(damped[left][:, left])
        error = (w[:, j] - result[:, j]) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
    return result


def descending_inside_groups(hessian, width):
    """Groups by their largest diagonal entry, and inside each the columns by theirs."""
    diagonal = hessian.diagonal().tolist()
    groups = [list(range(start, start + width)) for start in range(0, len(diagonal), width)]
    groups.sort(key=lambda group: -max(diagonal[j] for j in group))
    return [j for group in groups for j in sorted(group, key=lambda j: -diagonal[j])]


@pytest.mark.parametrize("rule", ["minmax", "symmetric"])
@pytest.mark.parametrize(("columns", "width"), [(40, 40), (40, 8), (160, 160), (160, 16), (288, 144)])
def test_lazy_blocks_of_the_cholesky_factor_are_brute_force(columns, width, rule):
    weight, hessian = layer(7, columns)
    expected = brute_force(weight, hessian, bits=3, width=width, rule=rule)
    result = quantize_weight(weight, hessian, Uniform(3, width, rule))
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("width", [8, 40])
def test_columns_in_the_order_of_activations(width, static):
    weight, hessian = layer(7, 40, seed=1)
    order = sorted(range(40), key=lambda j: -float(hessian[j, j]))
    expected = brute_force(weight, hessian, bits=3, width=width, order=order, static=static)
    options = {"order": "activation", "static_groups": static}
    result = quantize_weight(weight, hessian, Uniform(3, width), **options)
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)


def test_columns_in_the_order_of_activations_within_their_groups():
    weight, hessian = layer(7, 40, seed=2)
    order = descending_inside_groups(hessian, 8)
    assert order != list(range(40))
    expected = brute_force(weight, hessian, bits=3, width=8, order=order)
    result = quantize_weight(weight, hessian, Uniform(3, 8), order="within-groups")
    torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12)
    for start in range(0, 40, 8):  # its groups are made of neighbours
        assert max(len(row.unique()) for row in result[:, start : start + 8]) <= 8


@pytest.mark.parametrize("order", gptq.ORDERS)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_output_error_is_well_below_that_of_rounding(bits, order):
    weight, hessian = layer(16, 64, seed=3)

    def error(quantized):
        difference = weight - quantized
        return float((difference @ hessian * difference).sum())

    result = quantize_weight(weight, hessian, Uniform(bits, 16), order=order)
    assert error(result) < 0.7 * error(Uniform(bits, 16, "minmax").round(weight))


def test_inputs_that_do_not_correlate_leave_rounding_to_nearest():
    weight, _ = layer(5, 24)
    diagonal = torch.diag(torch.rand(24, dtype=torch.float64) + 0.5)
    result = quantize_weight(weight, diagonal, Uniform(3, 24))
    assert torch.equal(result, Uniform(3, 24, "minmax").round(weight))


def test_an_input_that_is_always_zero_and_too_few_tokens_are_no_obstacle():
    weight, hessian = layer(5, 24, tokens=6)
    hessian[3] = hessian[:, 3] = 0.0
    result = quantize_weight(weight.float(), hessian.float(), Uniform(3, 8))
    assert bool(result.isfinite().all())


def test_a_hessian_that_is_not_finite_is_refused():
    weight, hessian = layer(5, 24)
    hessian[2, 2] = float("nan")
    with pytest.raises(UserError, match="must be finite"):
        quantize_weight(weight, hessian, Uniform(3, 8))


@torch.no_grad()
def test_each_layer_is_calibrated_on_the_quantized_layers_before_it():
    generator = torch.Generator().manual_seed(6)
    batches = [torch.randint(0, 257, (1, length), generator=generator) for length in (31, 31, 12)]
    model, reference = tiny_llama(), tiny_llama()
    quantized(gptq, model, batches, bits=3, group_size=8)
    # Whole forward passes of the reference, in which everything before the stage is quantized already.
    stages = [("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",)]
    stages += [("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)]
    for block in reference.model.layers:
        for stage in stages:
            seen = []
            handle = block.get_submodule(stage[0]).register_forward_pre_hook(
                lambda _, args, seen=seen: seen.append(args)
            )
            for batch in batches:
                reference(batch)
            handle.remove()
            x = torch.cat([args[0][0] for args in seen])
            for name in stage:
                linear = block.get_submodule(name)
                linear.weight.copy_(quantize_weight(linear.weight, x.t() @ x, Uniform(3, 8)))
    same = total = 0
    for name, linear in decoder_linears(model).items():
        expected = reference.get_submodule(name).weight
        # Sums in another order may tip a weight that lies between two grid points, and what is corrected by it.
        same += int((linear.weight - expected).abs().lt(1e-4).sum())
        total += expected.numel()
    assert same > 0.999 * total


def test_unknown_orders_and_damping_that_is_not_positive_are_refused():
    batch = [torch.zeros(1, 8, dtype=torch.int64)]
    with pytest.raises(UserError, match="order must be one of natural"):
        quantized(gptq, tiny_llama(), batch, bits=3, group_size=8, order="desc")
    with pytest.raises(UserError, match="damping must be positive, got 0"):
        quantized(gptq, tiny_llama(), batch, bits=3, group_size=8, damping=0)
