"""LLM-QAT: its text is the model's own, its gradient passes the rounding, and training brings the student nearer."""

import copy

import pytest
import torch

from edkm_cli.clustering.grids import StraightThrough
from edkm_cli.data import Blocks
from edkm_cli.errors import UserError
from edkm_cli.research.baselines import llm_qat
from edkm_cli.research.baselines.grid import Uniform
from edkm_cli.research.baselines.outcome import decoder_linears
from helpers import quantized, tiny_llama

TWO_BITS, THREE_BITS = Uniform(2, 0, "absmax"), Uniform(3, 0, "absmax")


@pytest.mark.parametrize(("bits", "group_size"), [(2, 0), (3, 4), (8, 0)])
def test_rounding_is_to_the_nearest_of_the_symmetric_levels(bits, group_size):
    values = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    found = Uniform(bits, group_size, "absmax", "float32").round(values)
    width = group_size or 12
    for row in range(5):
        for start in range(0, 12, width):
            group = values[row, start : start + width]
            levels = torch.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1)) * group.abs().max() / (2 ** (bits - 1) - 1)
            nearest = levels[(group[:, None] - levels).abs().argmin(1)]
            torch.testing.assert_close(found[row, start : start + width], nearest)


def test_the_gradient_is_straight_through():
    values = torch.randn(4, 6, requires_grad=True)
    upstream = torch.randn(4, 6)
    quantized = StraightThrough.apply(values, Uniform(3, 0, "absmax").round)
    assert not torch.equal(quantized, values)
    quantized.backward(upstream)
    assert torch.equal(values.grad, upstream)


def test_a_layer_gets_the_gradient_that_its_quantized_weight_would_get():
    torch.manual_seed(0)
    layer = torch.nn.Linear(12, 5, bias=False)
    x = torch.randn(7, 12)
    plain = Uniform(3, 0, "absmax").round(layer.weight.detach()).requires_grad_()
    (x @ plain.t()).square().sum().backward()
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", llm_qat._Quantized(THREE_BITS), unsafe=True)
    layer(x).square().sum().backward()
    torch.testing.assert_close(layer.parametrizations.weight.original.grad, plain.grad)


def test_the_text_is_greedy_at_first_and_then_sampled_from_the_model():
    model = tiny_llama()
    text = llm_qat.training_text(model, sequences=6, length=20, seed=1)
    assert text.shape == (6, 20)
    likeliest = model(text).logits.argmax(-1)
    for row, until in zip(text, (3, 4, 5, 3, 4, 5), strict=True):
        index = int((text == row).all(1).nonzero()[0])
        assert torch.equal(row[1:until], likeliest[index, : until - 1])
    assert not torch.equal(text[:, 5:], likeliest[:, 4:-1])
    assert torch.equal(text, llm_qat.training_text(model, sequences=6, length=20, seed=1))
    assert not torch.equal(text, llm_qat.training_text(model, sequences=6, length=20, seed=2))


def test_sampling_follows_the_models_distribution():
    """4,000 sixth tokens: total variation from the model's own distribution (0.27 at temperature 1.5)."""
    model = tiny_llama()
    with torch.no_grad():
        model.lm_head.weight[8:] = 0  # few tokens have most of the probability, which 4,000 samples measure well
        model.lm_head.weight[:8] *= 3
    text = llm_qat.training_text(model, sequences=4000, length=6, seed=0)
    with torch.no_grad():
        expected = model(text[:, :5]).logits[:, -1].softmax(-1).mean(0)
    found = torch.bincount(text[:, 5], minlength=257) / 4000
    assert 0.5 * float((found - expected).abs().sum()) < 0.06


def test_training_lowers_the_distillation_loss_and_leaves_embeddings_alone():
    model = tiny_llama()
    teacher = copy.deepcopy(model)
    text = llm_qat.training_text(teacher, sequences=8, length=48)
    for layer in decoder_linears(model).values():
        torch.nn.utils.parametrize.register_parametrization(layer, "weight", llm_qat._Quantized(TWO_BITS), unsafe=True)
    losses = llm_qat.distil(model, teacher, Blocks(text.flatten(), 48, seed=0), 2, steps=60, learning_rate=3e-3)
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])
    assert torch.equal(model.lm_head.weight, teacher.lm_head.weight)
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("bits", "group_size"), [(3, 0), (4, 8)])
def test_a_trained_model_has_weights_on_its_levels_and_says_what_it_cost(bits, group_size):
    model = tiny_llama()
    outcome = quantized(
        llm_qat,
        model,
        [],
        bits=bits,
        group_size=group_size,
        steps=3,
        sequence_length=16,
        learning_rate=1e-3,
        batch_size=2,
    )
    weights = rows = 0
    for layer in decoder_linears(model).values():
        assert type(layer) is torch.nn.Linear
        group = group_size or layer.in_features
        for values in layer.weight.detach().reshape(-1, group):
            assert len(values.abs().unique()) <= 2 ** (bits - 1)
        weights += layer.weight.numel()
        rows += layer.weight.numel() // group
    assert outcome.bits_per_weight == pytest.approx(bits + 16 * rows / weights)
    assert outcome.training_tokens == 3 * 2 * 16
    assert outcome.calibration_tokens == 0
    assert "96 tokens of its own text" in outcome.note


def test_the_same_seed_gives_the_same_model_and_no_steps_round_only():
    options = {"bits": 3, "group_size": 0, "sequence_length": 16, "learning_rate": 1e-3}
    weights = []
    for seed in (0, 0, 1):
        model = tiny_llama()
        quantized(llm_qat, model, [], steps=2, seed=seed, **options)
        weights.append(model.model.layers[0].mlp.up_proj.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    model, original = tiny_llama(), tiny_llama().model.layers[0].mlp.up_proj.weight.detach()
    outcome = quantized(llm_qat, model, [], steps=0, **options)
    rounded = model.model.layers[0].mlp.up_proj.weight.detach()
    assert torch.equal(rounded, Uniform(3, 0, "absmax").round(original))
    assert outcome.training_tokens == 0


def test_activations_and_the_cache_can_be_quantized_too(ids):
    model, plain = tiny_llama(), tiny_llama()
    options = {"bits": 8, "group_size": 0, "steps": 2, "sequence_length": 16}
    outcome = quantized(llm_qat, model, [], activation_bits=8, kv_bits=4, **options)
    assert "activations at 8 bits" in outcome.note
    assert "keys and values at 4 bits" in outcome.note
    quantized(llm_qat, plain, [], **options)
    seen = {}
    for name, layer in decoder_linears(model).items():
        layer.register_forward_hook(lambda m, i, o, name=name: seen.__setitem__(name, o.detach()))
    assert not torch.equal(model(ids).logits, plain(ids).logits)
    for name, values in seen.items():
        few = max(len(token.unique()) for token in values.flatten(0, 1)) <= 15
        assert few is name.endswith(("k_proj", "v_proj"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, "bits must be 2 to 8"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"sequence_length": 1}, "sequence_length must be at least 2"),
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"kv_bits": 12}, "kv_bits must be 2 to 8, or 16"),
        ({"group_size": 5}, "group_size must divide the 24 columns"),
        ({"learning_rate": 1e30, "steps": 4}, "stay finite"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        quantized(llm_qat, tiny_llama(), [], **{"bits": 4, "group_size": 0, "sequence_length": 16, **options})
