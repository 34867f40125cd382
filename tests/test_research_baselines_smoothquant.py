"""SmoothQuant against loops written from the paper, and against figures that its authors' own code gave."""

import copy

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.research.baselines import smoothquant
from edkm_cli.research.baselines.grid import Uniform
from edkm_cli.research.baselines.outcome import Task, decoder_linears
from helpers import quantized, tiny_llama, tiny_qwen


def calibration():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 257, (1, 31), generator=generator) for _ in range(3)]


def outlier_llama(**options):
    """Norm weights with a few channels far above the rest: what the method exists for."""
    model = tiny_llama(**options)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[[3, 11]] *= 40
            layer.post_attention_layernorm.weight[7] *= 40
    return model


def rounded(matrix, *, bits, group):
    """Group by group, value by value; the scale is a float16."""
    result = matrix.clone()
    levels = 2 ** (bits - 1) - 1
    for row in range(matrix.shape[0]):
        for start in range(0, matrix.shape[1], group):
            values = matrix[row, start : start + group]
            scale = float((max(float(values.abs().max()), 1e-5) / torch.tensor(float(levels))).half())
            for column in range(start, start + group):
                level = max(-levels, min(levels, round(float(matrix[row, column]) / scale)))
                result[row, column] = level * scale
    return result


def expected_scales(model, batches, norm_name, names, alpha):
    """Equation 4, from the inputs that a plain forward pass shows."""
    norm = model.get_submodule(norm_name)
    seen = []
    handle = norm.register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    activations = torch.cat([output.reshape(-1, output.shape[-1]) for output in seen]).abs().amax(0)
    weights = torch.stack([model.get_submodule(name).weight.abs().amax(0) for name in names]).amax(0)
    return activations**alpha / weights ** (1 - alpha)


@torch.no_grad()
def outlier_ratio(model, ids):
    """The largest channel of the first linears' input against the median channel."""
    seen = []
    norm = model.model.layers[0].input_layernorm
    handle = norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(ids)
    handle.remove()
    largest = seen[0].abs().flatten(0, 1).amax(0)
    return float(largest.max() / largest.median())


@pytest.mark.parametrize("build", [outlier_llama, tiny_qwen, lambda: tiny_llama(bias=True, tied=False)])
def test_smoothing_alone_changes_no_logits(build, ids):
    model = build()
    before, weight = model(ids).logits, model.model.layers[0].mlp.up_proj.weight.clone()
    smoothquant.smooth(Task(model, calibration(), 8), decoder_linears(model), alpha=0.5)
    assert not torch.equal(weight, model.model.layers[0].mlp.up_proj.weight)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)


def test_smoothing_takes_the_outliers_out_of_the_activations(ids):
    model = outlier_llama()
    before = outlier_ratio(model, ids)
    smoothquant.smooth(Task(model, calibration(), 8), decoder_linears(model), alpha=0.5)
    assert outlier_ratio(model, ids) < 0.5 * before


@pytest.mark.parametrize("alpha", [0.5, 0.8])
def test_scales_are_equation_4_and_shared_by_the_linears_behind_a_norm(alpha):
    model = outlier_llama()
    original = copy.deepcopy(model)
    smoothquant.smooth(Task(model, calibration(), 8), decoder_linears(model), alpha=alpha)
    behind = {
        "input_layernorm": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
    }
    for layer in (0, 1):
        for norm, names in behind.items():
            names = [f"model.layers.{layer}.{name}" for name in names]
            norm = f"model.layers.{layer}.{norm}"
            scales = expected_scales(original, calibration(), norm, names, alpha)
            torch.testing.assert_close(
                model.get_submodule(norm).weight, original.get_submodule(norm).weight / scales, rtol=1e-4, atol=1e-6
            )
            for name in names:
                torch.testing.assert_close(
                    model.get_submodule(name).weight, original.get_submodule(name).weight * scales, rtol=1e-4, atol=1e-6
                )
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.{layer}.{name}"
            assert torch.equal(model.get_submodule(name).weight, original.get_submodule(name).weight)


@pytest.mark.parametrize(("bits", "group_size"), [(3, 8), (4, 0), (8, 0)])
def test_weights_are_those_of_a_naive_loop(bits, group_size):
    model = outlier_llama()
    smoothed = copy.deepcopy(model)
    smoothquant.smooth(Task(smoothed, calibration(), 8), decoder_linears(smoothed), alpha=0.5)
    outcome = quantized(smoothquant, model, calibration(), bits=bits, group_size=group_size, activation_bits=16)
    total = weights = 0
    for name, layer in decoder_linears(model).items():
        group = group_size or layer.in_features
        matrix = smoothed.get_submodule(name).weight.detach()
        torch.testing.assert_close(layer.weight.detach(), rounded(matrix, bits=bits, group=group), rtol=1e-6, atol=1e-7)
        total += matrix.numel() * bits + 16 * matrix.numel() // group
        weights += matrix.numel()
    assert outcome.bits_per_weight == pytest.approx(total / weights)
    assert outcome.calibration_tokens == 3 * 31
    assert outcome.note == "weight-only"
    assert torch.equal(model.lm_head.weight, smoothed.lm_head.weight)


def test_activations_are_quantized_where_the_paper_does(ids):
    model = outlier_llama()
    weight_only = copy.deepcopy(model)
    quantized(smoothquant, weight_only, calibration(), bits=8, group_size=0, activation_bits=16)
    outcome = quantized(smoothquant, model, calibration(), bits=8, group_size=0, activation_bits=4)
    assert "4 bits" in outcome.note
    inputs, outputs = {}, {}
    for name, layer in decoder_linears(model).items():
        layer.register_forward_hook(lambda m, i, o, name=name: inputs.__setitem__(name, i[0]))
        layer.register_forward_hook(lambda m, i, o, name=name: outputs.__setitem__(name, o))
    model(ids)
    assert len(inputs) == 14
    for values in inputs.values():  # at most 15 levels a token
        assert max(len(token.unique()) for token in values.detach().flatten(0, 1)) <= 15
    for name, values in outputs.items():
        levels = max(len(token.unique()) for token in values.detach().flatten(0, 1))
        assert (levels <= 15) is name.endswith(("q_proj", "k_proj", "v_proj"))
    assert not torch.equal(model(ids).logits, weight_only(ids).logits)


def test_smoothing_helps_8_bit_activations_with_outliers(ids):
    reference = outlier_llama()
    errors = []
    for alpha in (0.0, 0.5):
        model = copy.deepcopy(reference)
        if alpha:
            quantized(smoothquant, model, calibration(), bits=8, group_size=0, alpha=alpha)
        else:  # the same rounding without smoothing
            smoothquant.quantize_inputs(decoder_linears(model).values(), 8)
            for layer in decoder_linears(model).values():
                layer.weight.data = Uniform(8, 0, "absmax", "float32").round(layer.weight.data)
        with torch.no_grad():
            errors.append(float((model(ids).logits - reference(ids).logits).norm()))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits must be 2 to 8"),
        ({"activation_bits": 12}, "activation_bits must be"),
        ({"alpha": 1.5}, "alpha must be"),
        ({"group_size": 7}, "must divide the 24 columns of model.layers.0.self_attn.q_proj, got 7"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        quantized(smoothquant, tiny_llama(), calibration(), **{"bits": 4, "group_size": 0, **options})


def test_a_model_whose_norms_cannot_take_the_scales_is_refused():
    from transformers import GemmaConfig, GemmaForCausalLM  # multiplies by one plus its weight

    config = GemmaConfig(
        vocab_size=257, hidden_size=24, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6,
    )  # fmt: skip
    with pytest.raises(UserError, match="cannot be folded into the norms of GemmaForCausalLM"):
        quantized(smoothquant, GemmaForCausalLM(config).eval(), calibration(), bits=8, group_size=0)
    with pytest.raises(UserError, match="needs calibration text"):
        quantized(smoothquant, tiny_llama(), [], bits=8, group_size=0)
