"""AWQ: folding changes nothing, and its searches against searches that run the modules on the inputs themselves."""

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM

from edkm_cli.errors import UserError
from edkm_cli.research.baselines import awq, rtn
from edkm_cli.research.baselines.blocks import BlockStream
from edkm_cli.research.baselines.grid import Uniform
from helpers import quantized, tiny_llama, tiny_qwen

WIDTH = 8
FORM = Uniform(3, WIDTH)
SMALL = {
    "vocab_size": 257,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}


def texts():
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 257, (1, length), generator=generator) for length in (31, 31, 12)]


def without_grouped_queries():
    torch.manual_seed(2)
    config = LlamaConfig(**SMALL, num_key_value_heads=4, attention_bias=True, initializer_range=0.3)
    return LlamaForCausalLM(config).eval()


def outlier_llama(**options):
    """Inputs with a few channels far above the rest: what the method is about."""
    model = tiny_llama(**options)
    with torch.no_grad():
        for block in model.model.layers:
            block.input_layernorm.weight[[3, 11]] *= 20
            block.post_attention_layernorm.weight[7] *= 20
    return model


def observed(model, index=0):
    """(sites of a block, statistics, calls) as `quantize` sees them."""
    stream = BlockStream(model, texts())
    path, block = list(stream.blocks.items())[index]
    sites = awq._sites(block, path)
    grams, calls, _ = awq._watch(stream, index, sites, 8192)
    return sites, grams, calls


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen, without_grouped_queries])
@torch.no_grad()
def test_scaling_without_rounding_leaves_the_logits_unchanged(make):
    model, ids = make(), texts()[0]
    before = model(ids).logits
    generator = torch.Generator().manual_seed(0)
    sites = 0
    for name, block in model.model.layers.named_children():
        for site in awq._sites(block, name):
            scales = 10 ** (2 * torch.rand(site.layers[0].in_features, generator=generator) - 1)
            awq._fold(site, scales, name)
            sites += 1
    assert sites == 2 * (4 if make is without_grouped_queries else 3)
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-4, atol=1e-4)


def plain_candidates(magnitude, weights):
    return [magnitude ** (step / 10) for step in range(10)]


def duo_candidates(magnitude, weights):
    """No scaling, then s_x^alpha / s_w^(1 - alpha) for nine values of alpha, one weight at a time."""
    columns = magnitude.numel()
    total, rows = torch.zeros(columns), 0
    for weight in weights:
        for row in weight:
            for start in range(0, columns, WIDTH):
                group = row[start : start + WIDTH].abs()
                total[start : start + WIDTH] += group / (group.max() + 1e-6)
            rows += 1
    mean = total / rows
    found = [magnitude**a / (mean ** (1 - a) + 1e-4) for a in (step / 8 for step in range(9))]
    return [torch.ones(columns), *found]


@pytest.mark.parametrize("duo_scaling", [False, True])
@pytest.mark.parametrize("number", range(4))
@torch.no_grad()
def test_the_best_alpha_is_that_of_an_exhaustive_search(number, duo_scaling):
    model = without_grouped_queries()
    block = model.model.layers[0]
    block.input_layernorm.weight[[3, 11]] *= 20
    sites, grams, calls = observed(model)
    site = sites[number]
    recorded = []  # what enters the layers, and the judged module
    handles = [
        site.layers[0].register_forward_pre_hook(lambda _, args: recorded.append(args[0].flatten(0, 1))),
    ]
    judged_calls = []
    handles.append(site.judged.register_forward_pre_hook(lambda _, a, k: judged_calls.append((a, k)), with_kwargs=True))
    for batch in texts():
        model(batch, use_cache=False)
    for handle in handles:
        handle.remove()
    magnitude = torch.cat(recorded).abs().mean(0)
    originals = [layer.weight.clone() for layer in site.layers]

    def outputs():
        found = [site.judged(*args, **kwargs) for args, kwargs in judged_calls]
        return torch.cat([(y[0] if isinstance(y, tuple) else y).flatten() for y in found])

    target, errors, candidates = outputs(), [], []
    for s in (duo_candidates if duo_scaling else plain_candidates)(magnitude, originals):
        s = s / (s.max() * s.min()).sqrt()
        for layer, original in zip(site.layers, originals, strict=True):
            layer.weight.copy_(Uniform(3, WIDTH, "minmax").round(original * s) / s)
        errors.append(float((outputs() - target).square().sum()))
        candidates.append(s)
    for layer, original in zip(site.layers, originals, strict=True):
        layer.weight.copy_(original)
    found = awq._search(site, grams[site.layers[0]], calls.get(site.judged, []), FORM, 10, duo_scaling)
    torch.testing.assert_close(found, candidates[errors.index(min(errors))], rtol=1e-4, atol=0)
    assert len(set(errors)) > 1
    for layer, original in zip(site.layers, originals, strict=True):
        assert torch.equal(layer.weight, original)


@torch.no_grad()
def test_outlier_channels_are_scaled_up():
    sites, grams, calls = observed(outlier_llama())
    scales = awq._search(sites[0], grams[sites[0].layers[0]], calls[sites[0].judged], FORM, 20)
    assert set(scales.topk(2).indices.tolist()) == {3, 11}


@torch.no_grad()
def test_clipping_finds_each_groups_best_range():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 24, generator=generator) * (torch.rand(24, generator=generator) + 0.1)
    weight = torch.randn(6, 24, generator=generator) ** 3  # heavy tails: clipping pays
    clipped = awq._clip(weight, x.t() @ x, FORM)
    assert not torch.equal(clipped, weight)
    for row in range(6):
        for start in range(0, 24, WIDTH):
            part, group = x[:, start : start + WIDTH], weight[row, start : start + WIDTH]
            errors = {}
            for step in range(10):
                limit = float(group.abs().max()) * (1 - step / 20)
                rounded = Uniform(3, WIDTH, "minmax").round(group.clamp(-limit, limit)[None])[0]
                errors[limit] = float((part @ (rounded - group)).square().sum())
            best = min(errors, key=errors.__getitem__)
            torch.testing.assert_close(clipped[row, start : start + WIDTH], group.clamp(-best, best))


@pytest.mark.parametrize("symmetric", [False, True])
@torch.no_grad()
def test_the_models_error_on_the_calibration_text_is_below_that_of_rounding(symmetric):
    def error(method, **options):
        model = outlier_llama()
        expected = torch.cat([outlier_llama()(batch).logits.flatten() for batch in texts()])
        quantized(method, model, texts(), bits=3, group_size=WIDTH, **options)
        return float((torch.cat([model(batch).logits.flatten() for batch in texts()]) - expected).square().mean())

    rounded = error(rtn, rule="symmetric" if symmetric else "minmax")
    assert error(awq, symmetric=symmetric) < rounded
    assert error(awq, symmetric=symmetric, clip=False) < rounded
    assert error(awq, symmetric=symmetric, clip=False, duo_scaling=True) < rounded


def test_the_search_runs_modules_on_no_more_than_its_tokens():
    model = tiny_llama()
    stream = BlockStream(model, texts())  # chunks of 62 and 12 tokens
    sites = awq._sites(model.model.layers[0], "block")
    for tokens, chunks in [(8192, 2), (74, 2), (73, 1), (62, 1), (1, 1)]:
        grams, calls, outputs = awq._watch(stream, 0, sites, tokens)
        assert [len(found) for found in calls.values()] == [chunks, chunks]
        assert grams[sites[0].layers[0]].tokens == 74
        assert len(outputs) == 2


def test_queries_and_keys_are_not_clipped(monkeypatch):
    clipped = []

    def spy(weight, products, rounding, original=awq._clip):
        clipped.append(tuple(weight.shape))
        return original(weight, products, rounding)

    monkeypatch.setattr(awq, "_clip", spy)
    quantized(awq, tiny_llama(), texts(), bits=3, group_size=WIDTH, grid=1)
    # v, o, gate, up, down of each block
    assert clipped == 2 * [(12, 24), (24, 24), (40, 24), (40, 24), (24, 40)]
    clipped.clear()
    quantized(awq, tiny_llama(), texts(), bits=3, group_size=WIDTH, grid=1, clip=False)
    assert clipped == []


def test_one_alpha_without_clipping_is_rounding_to_nearest():
    model, reference = tiny_llama(), tiny_llama()
    quantized(awq, model, texts(), bits=3, group_size=WIDTH, grid=1, clip=False)
    quantized(rtn, reference, [], bits=3, group_size=WIDTH)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=1e-6, atol=1e-7)


def test_decoders_that_scales_cannot_be_folded_into_are_refused():
    phi = PhiForCausalLM(PhiConfig(**{**SMALL, "hidden_size": 32})).eval()
    with pytest.raises(UserError, match=r"blocks like LLaMA's, but model\.layers\.0 is a PhiDecoderLayer"):
        quantized(awq, phi, texts(), bits=3, group_size=WIDTH)
    gemma = GemmaForCausalLM(GemmaConfig(**SMALL, num_key_value_heads=4, head_dim=6)).eval()
    with torch.no_grad():
        gemma.model.layers[0].input_layernorm.weight += 0.5  # the norm multiplies by 1 + weight
    with pytest.raises(UserError, match="proportional to their weight"):
        quantized(awq, gemma, texts(), bits=3, group_size=WIDTH)
    with pytest.raises(UserError, match="grid must be at least 1"):
        quantized(awq, tiny_llama(), texts(), bits=3, group_size=WIDTH, grid=0)
    with pytest.raises(UserError, match="grid must be at least 3, got 2"):
        quantized(awq, tiny_llama(), texts(), bits=3, group_size=WIDTH, grid=2, duo_scaling=True)
