"""AWQ (arXiv 2306.00978): scale up the input channels that matter before rounding, so that they are rounded finely.

    y = Q(W diag(s)) (diag(s)^-1 x)          s = s_x^alpha, s_x the mean magnitude of each channel of x

1 / s is folded into what computes x, so nothing is stored and nothing runs later. For each site of a decoder block,
alpha is searched on a grid (section 3.2) for the smallest squared error of what the layers feed:

    input norm          -> q, k, v       error of the attention's output
    value projection    -> o             error of o's output; only without grouped-query attention, as the authors do
    post-attention norm -> gate, up      error of the MLP's output
    up projection       -> down          error of down's output

Then ranges are clipped and everything is rounded to nearest. Options and departures: docs/baselines.md.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.errors import UserError
from edkm_cli.nn.hooks import hidden_of, hooked
from edkm_cli.research.baselines.blocks import BlockStream, Gram
from edkm_cli.research.baselines.grid import Uniform
from edkm_cli.research.baselines.outcome import Outcome, Task, check_at_least

_SMALLEST = 1e-4
_LARGEST_SHRINK, _SHRINK_STEPS = 0.5, 20
_NOT_CLIPPED = ("q_proj", "k_proj")
Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class _Site:
    """Layers with one input, the module that produces it, and the module whose output's error counts."""

    producer: nn.Module
    layers: list[nn.Linear]
    judged: nn.Module


@torch.no_grad()
def quantize(
    task: Task,
    *,
    symmetric: bool = False,
    grid: int = 20,
    clip: bool = True,
    search_tokens: int = 8192,
    duo_scaling: bool = False,
    scale_dtype: str = "float16",
) -> Outcome:
    """Scale, clip and round a model's decoder linears in place, calibrated on the task's text.

    The norms before them change, too: they carry 1 / s.

    Args:
        symmetric: grids of the rule `symmetric` in place of `minmax` (see `grid`).
        grid: values of alpha, 0, 1 / grid, ..., below 1; the paper has 20.
        clip: search for a clipped range of each group.
        search_tokens: of the calibration text, for the errors of attention and MLP; at least one chunk is used.
        duo_scaling: weights have a say in the scales, too. `grid` candidates are then no scaling at all, and values of
            alpha from 0 to 1 inclusive.

    Raises UserError for bits, grid or scale_dtype out of range, no calibration text, a group size that does not divide a
    layer, or a decoder that is not built like LLaMA's.
    """
    check_at_least(3 if duo_scaling else 1, grid=grid)
    form = Uniform(task.bits, task.group_size, "symmetric" if symmetric else "minmax", scale_dtype)
    layers, stream = form.linears(task.model), BlockStream(task.model, task.batches)
    sites = {path: _sites(block, path) for path, block in stream.blocks.items()}
    quantized = set(layers.values())
    for index, (path, block) in enumerate(task.track(stream.blocks.items(), "awq", len(stream.blocks))):
        grams, calls, outputs = _watch(stream, index, sites[path], search_tokens)
        for site in sites[path]:
            if all(layer in quantized for layer in site.layers):
                scales = _search(site, grams[site.layers[0]], calls.get(site.judged, []), form, grid, duo_scaling)
                _fold(site, scales, path)
                for gram in {grams[layer] for layer in site.layers}:
                    gram.products /= scales[:, None] * scales
        for name, layer in block.named_modules():
            if layer in quantized:
                weight = layer.weight.float()
                if clip and not name.endswith(_NOT_CLIPPED):
                    weight = _clip(weight, grams[layer].products, form)
                layer.weight.copy_(form.round(weight))
        stream.hidden = outputs
    return form.outcome(layers, calibration_tokens=stream.tokens)


def _sites(block: Any, path: str) -> list[_Site]:
    """Where a LLaMA-shaped block can be scaled. Raises UserError for other blocks."""
    try:
        attention, mlp = block.self_attn, block.mlp
        q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        sites = [_Site(block.input_layernorm, [q, k, v], attention)]
        if v.out_features == o.in_features:
            sites.append(_Site(v, [o], o))
        return [*sites, _Site(block.post_attention_layernorm, [gate, up], mlp), _Site(up, [down], down)]
    except AttributeError as error:
        raise UserError(f"awq needs blocks like LLaMA's, but {path} is a {type(block).__name__} ({error})") from error


def _watch(
    stream: BlockStream, index: int, sites: list[_Site], search_tokens: int
) -> tuple[dict[nn.Module, Gram], dict[nn.Module, Calls], list[Tensor]]:
    """Run a block once: input statistics of each linear, first calls of judged modules, and the block's outputs."""
    block = list(stream.blocks.values())[index]
    grams: dict[nn.Module, Gram] = {}
    calls: dict[nn.Module, Calls] = {site.judged: [] for site in sites if site.judged not in site.layers}
    limit = max(1, sum(end <= search_tokens for end in accumulate(hidden[..., 0].numel() for hidden in stream.hidden)))

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(calls[module]) < limit:
            calls[module].append((args, kwargs))

    with ExitStack() as hooks:
        for stage in stream.stages(index):
            members, gram = [block.get_submodule(name) for name in stage], Gram()
            grams |= dict.fromkeys(members, gram)
            hooks.enter_context(hooked(members[:1], gram))
        hooks.enter_context(hooked(calls, keep, with_kwargs=True))
        return grams, calls, stream.run(index)


def _search(site: _Site, gram: Gram, calls: Calls, form: Uniform, grid: int, duo_scaling: bool = False) -> Tensor:
    """The scales (in,) whose alpha gives the least error."""
    weights = [layer.weight.float().clone() for layer in site.layers]
    outputs = [hidden_of(site.judged(*args, **kwargs)) for args, kwargs in calls]
    magnitude, best, least = gram.magnitude(), torch.ones_like(gram.magnitude()), float("inf")
    candidates = [magnitude.pow(step / grid) for step in range(grid)]
    if duo_scaling:
        groups = torch.cat(weights).abs().unflatten(1, (-1, form.group_size or weights[0].shape[1]))
        relative = (groups / (groups.amax(-1, keepdim=True) + 1e-6)).flatten(1).mean(0)  # s_w, (in,)
        alphas = [step / (grid - 2) for step in range(grid - 1)]
        powers = [magnitude.pow(alpha) / (relative.pow(1 - alpha) + _SMALLEST) for alpha in alphas]
        candidates = [torch.ones_like(magnitude), *powers]
    for candidate in candidates:
        scales = candidate.clamp_min(_SMALLEST)
        scales = scales / (scales.max() * scales.min()).sqrt()
        rounded = [form.round(weight * scales) / scales for weight in weights]
        if calls:
            for layer, value in zip(site.layers, rounded, strict=True):
                layer.weight.copy_(value)
            given = (hidden_of(site.judged(*args, **kwargs)) for args, kwargs in calls)
            error = sum(float((ours - output).square().sum()) for ours, output in zip(given, outputs, strict=True))
        else:  # the layers themselves are judged: the error of all outputs is a quadratic form
            differences = [value - weight for value, weight in zip(rounded, weights, strict=True)]
            error = sum(float((d @ gram.products * d).sum()) for d in differences)
        if error < least:
            least, best = error, scales
    for layer, weight in zip(site.layers, weights, strict=True):
        layer.weight.copy_(weight)
    return best


def _fold(site: _Site, scales: Tensor, path: str) -> None:
    """Multiply the layers' input channels by `scales`, and divide what produces them. Raises UserError if it cannot."""
    producer: Any = site.producer
    linear = isinstance(producer, nn.Linear)
    probe = torch.linspace(-1, 1, producer.in_features if linear else scales.numel(), device=scales.device)
    expected = producer(probe) / scales
    producer.weight.div_(scales[:, None] if linear else scales)
    if getattr(producer, "bias", None) is not None:
        producer.bias.div_(scales)
    if not torch.allclose(producer(probe), expected, rtol=1e-2, atol=1e-5):
        rule = "awq needs norms whose output is proportional to their weight"
        raise UserError(f"{rule}, but {path} has a {type(producer).__name__}, whose output is not; use gptq or rtn")
    for layer in site.layers:
        layer.weight.mul_(scales)


def _clip(weight: Tensor, products: Tensor, form: Uniform) -> Tensor:
    """Clamp each group to the range, between half of its own and all of it, that gives its output the least error.

    The error is that of the group's part of the layer's output over all calibration tokens, a quadratic form in the
    diagonal block of X^T X that belongs to the group.
    """
    width = form.group_size or weight.shape[1]
    groups = weight.reshape(weight.shape[0], -1, width)  # (out, groups, width)
    parts = torch.arange(weight.shape[1], device=weight.device).view(-1, width)
    blocks = products[parts[:, :, None], parts[:, None, :]]  # (groups, width, width)
    largest = groups.abs().amax(-1, keepdim=True)
    best, least = largest.clone(), torch.full_like(largest, float("inf"))
    for step in range(int(_LARGEST_SHRINK * _SHRINK_STEPS)):
        limit = largest * (1 - step / _SHRINK_STEPS)
        clamped = torch.minimum(torch.maximum(groups, -limit), limit)
        difference = form.fit(clamped).round(clamped) - groups
        error = (torch.einsum("ogi,gij->ogj", difference, blocks) * difference).sum(-1, keepdim=True)
        better = error < least
        best, least = torch.where(better, limit, best), torch.where(better, error, least)
    return torch.minimum(torch.maximum(groups, -best), best).reshape(weight.shape)
