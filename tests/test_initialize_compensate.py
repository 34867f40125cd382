"""The error-compensated start: against optimal brain quantization written out, and on models."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from edkm_cli import kernels
from edkm_cli.clustering import kmeans_start, lookup, nearest_indices, snap
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.initialize.compensate import (
    compensate,
    compensated,
    damping_of,
    fitted_tables,
    inverse_factor,
    row_entries,
)
from edkm_cli.kernels import passes_torch
from edkm_cli.nn.clustered import clustered_layers
from helpers import cluster, kl_divergence, tiny_llama


def inputs_and_weight(rows=6, columns=24, tokens=200, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, dtype=torch.float64, generator=generator)
    x = torch.randn(tokens, columns, dtype=torch.float64, generator=generator) @ mixing
    return x.t() @ x, torch.randn(rows, columns, dtype=torch.float64, generator=generator)


def written_out(weight, luts, hessian, order):
    """Section 3 of arXiv 2210.17323 word by word: after each column the inverse of H over the remaining ones anew.

    `luts(row, column)` is the LUT of a weight.
    """
    latent, w = torch.empty_like(weight), weight.clone()
    for step, column in enumerate(order):
        rest = order[step:]
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        latent[:, column] = w[:, column]
        for row in range(weight.shape[0]):
            lut = luts(row, int(column))
            error = w[row, column] - lut[(lut - w[row, column]).abs().argmin()]
            w[row, rest] -= error / inverse[0, 0] * inverse[0]
    return latent


@pytest.mark.parametrize("tile_columns", [24, 8])
def test_it_is_optimal_brain_quantization_with_luts(tile_columns):
    hessian, weight = inputs_and_weight()
    tiles = weight.shape[1] // tile_columns
    entries = torch.randn(6, tiles, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = hessian.diagonal().argsort(descending=True)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(24, dtype=torch.float64)
    factor = inverse_factor(hessian[order][:, order])
    expected = written_out(weight, lambda row, column: entries[row, column // tile_columns], damped, order)
    assert torch.allclose(compensated(weight, entries, factor, order), expected, rtol=1e-9, atol=1e-9)


def test_columns_beyond_a_lazy_block_are_compensated_too():
    hessian, weight = inputs_and_weight(rows=3, columns=300, tokens=900)
    entries = torch.randn(3, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = torch.arange(300)
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(300, dtype=torch.float64)
    expected = written_out(weight, lambda row, column: entries[row, 0], damped, order)
    assert torch.allclose(compensated(weight, entries, inverse_factor(hessian), order), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rows", "k", "tiles"), [(1, 2, 1), (16, 8, 1), (37, 8, 4), (96, 256, 2)])
def test_the_fast_kernel_is_its_reference(rows, k, tiles):
    hessian, weight = (tensor.float() for tensor in inputs_and_weight(rows=rows, columns=128, tokens=600))
    entries = torch.randn(rows, tiles, k, generator=torch.Generator().manual_seed(1))
    luts = entries.sort(-1).values.permute(1, 2, 0).contiguous()
    factor = inverse_factor(hessian).float()[:64, :64]
    factor = factor / factor.diagonal()[:, None]
    of_column = torch.arange(64) * tiles // 64
    blocks = [weight.t()[:64].clone(memory_format=torch.contiguous_format) for _ in range(2)]
    fast = kernels.round_columns(blocks[0], luts, of_column, factor, torch.float32)
    plain = passes_torch.round_columns(blocks[1], luts, of_column, factor, torch.float32)
    same = torch.isclose(fast, plain, rtol=1e-4, atol=1e-4).all(0)
    assert same.float().mean() >= 0.9  # in a row with a weight halfway between two entries, either may be taken
    torch.testing.assert_close(blocks[0][:, same], blocks[1][:, same], rtol=1e-4, atol=1e-4)
    assert torch.isfinite(fast).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layers_error_falls_though_weights_leave_their_nearest_entries(dtype):
    hessian, weight = (tensor.float() for tensor in inputs_and_weight(rows=16, columns=64, tokens=1000))
    weight = weight.to(dtype).float()
    lut = kmeans_start(weight, 8, granularity="row:1")
    order = hessian.diagonal().argsort(descending=True)
    moved = compensated(weight.to(dtype), lut[:, None], inverse_factor(hessian[order][:, order]), order)
    assert moved.dtype == dtype
    moved = moved.float()

    def error(latent):
        difference = weight - snap(latent, lut, granularity="row:1")
        return float(((difference @ hessian) * difference).sum())

    assert error(moved) < 0.8 * error(weight)
    assert not torch.equal(
        nearest_indices(moved, lut, granularity="row:1"), nearest_indices(weight, lut, granularity="row:1")
    )


def test_an_input_that_is_always_zero_is_rounded_to_nearest():
    hessian, weight = inputs_and_weight()
    hessian[5] = hessian[:, 5] = 0
    entries = torch.randn(6, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moved = compensated(weight, entries, inverse_factor(hessian), torch.arange(24))
    assert torch.allclose(moved[:, 5], weight[:, 5])


@pytest.mark.parametrize("tokens", [20, 400])
def test_a_factor_in_float32_is_that_of_nearly_the_same_matrix(tokens):
    columns = 256
    hessian, _ = inputs_and_weight(columns=columns, tokens=tokens)
    factor = inverse_factor(hessian.float(), dtype=torch.float32).double()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    inverse = factor.inverse()
    difference = (inverse @ inverse.t() - damped).abs().max() / damped.diagonal().max()
    assert difference < columns * 2**-24
    assert columns * 2**-24 < 0.01 / 100  # of what damping adds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_damping_grows_until_rounding_leaves_a_factor(dtype):
    """One direction that has all but a thousandth, in numbers of three digits: the others' eigenvalues are noise."""
    x = torch.randn(400, 64) + 50 * torch.randn(64)
    hessian = (x.t() @ x).bfloat16().float()
    hessian = hessian.tril() + hessian.tril(-1).t()
    assert torch.linalg.eigvalsh(hessian.double()).min() < -hessian.diagonal().mean() / 5000
    factor = inverse_factor(hessian, damping=1e-6, dtype=dtype)
    assert factor.isfinite().all()
    assert torch.equal(factor, factor.triu())


def test_inputs_must_be_finite():
    with pytest.raises(UserError, match="finite"):
        inverse_factor(torch.full((4, 4), torch.nan))
    with pytest.raises(UserError, match="use --start kmeans --importance none"):
        inverse_factor(torch.diag(torch.tensor([1.0, torch.inf, 1.0])))


@pytest.mark.parametrize("granularity", ["row:1", "row:4", "tensor", "block:4x8"])
def test_the_model_comes_nearer_to_the_one_it_came_from(granularity):
    model = tiny_llama(hidden=64, inner=128)
    dense = copy.deepcopy(model).eval()
    cluster(model, bits=3, granularity=granularity)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, model.config.vocab_size, (1, 64), generator=generator) for _ in range(8)]
    text = torch.randint(0, model.config.vocab_size, (4, 64), generator=generator)

    @torch.no_grad()
    def divergence():
        return float(kl_divergence(model.eval()(text).logits, dense(text).logits))

    before, centroids = divergence(), {name: layer.centroids.clone() for name, layer in clustered_layers(model).items()}
    compensate(model, batches)
    assert divergence() < before
    fitted = granularity != "block:4x8"  # tables of tiles side by side are left as they are
    for name, layer in clustered_layers(model).items():
        assert torch.equal(layer.centroids, centroids[name]) != fitted, name


@pytest.mark.parametrize(("columns", "tokens"), [(64, 64), (64, 32)])
def test_fewer_tokens_than_columns_are_damped_so_that_other_text_is_served_too(columns, tokens):
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(columns, columns, generator=generator) * torch.arange(1, columns + 1) ** -0.25
    text, other = (torch.randn(count, columns, generator=generator) @ mixing for count in (tokens, 4096))
    weight = torch.randn(64, columns, generator=generator)
    entries = torch.linspace(-2, 2, 8).repeat(64, 1, 1)
    hessian, errors, by_row = text.t() @ text, [], Granularity.parse("row:1")
    order = hessian.diagonal().argsort(descending=True, stable=True)
    for damping in (0.01, damping_of(0.01, columns, tokens)):
        factor = inverse_factor(hessian[order][:, order], damping=damping).float()
        indices = nearest_indices(compensated(weight, entries, factor, order), entries[:, 0], granularity=by_row)
        errors.append(
            float((other @ (lookup(indices, entries[:, 0], granularity=by_row) - weight).t()).square().mean())
        )
    assert errors[1] < 0.95 * errors[0]
    assert damping_of(0.01, 576, 8192) == 0.01  # many tokens say enough


def test_all_layers_are_visited_once_and_see_compensated_inputs():
    model = tiny_llama(hidden=64, inner=128)
    cluster(model, bits=2)
    batches = [torch.randint(0, model.config.vocab_size, (1, 32), generator=torch.Generator().manual_seed(0))]
    seen: list[int] = []
    compensate(model, batches, track=lambda items, description, total: (seen.append(item) or item for item in items))
    assert len(seen) == len(clustered_layers(model))
    assert not any(layer._forward_pre_hooks for layer in clustered_layers(model).values())
    # The last layer's inputs were those of the compensated model: from them follows what it became.
    last = list(clustered_layers(model).values())[-1]
    found = {}
    handle = last.register_forward_pre_hook(lambda layer, inputs: found.update(x=inputs[0]))
    with torch.no_grad():
        model.eval().base_model(torch.cat(batches))
    handle.remove()
    x = found["x"].reshape(-1, last.in_features)
    hessian = x.t() @ x
    order = hessian.diagonal().argsort(descending=True, stable=True)
    damping = damping_of(0.01, 128, 32)
    factor = inverse_factor(hessian[order][:, order], damping=damping)
    reference, _ = cluster(tiny_llama(hidden=64, inner=128), bits=2)
    start = list(clustered_layers(reference).values())[-1]
    weight, granularity = start.weight.detach(), start.clustering.granularity
    with torch.no_grad():
        expected = compensated(weight, row_entries(start), factor, order)
        indices = nearest_indices(expected, start.lut(), granularity=granularity)
        damped = hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))
        for _ in range(2):  # tables fitted, then choices improved
            start.centroids.copy_(fitted_tables(weight @ hessian, indices, hessian, start.centroids))
            errors = (lookup(indices, start.lut(), granularity=granularity) - weight) @ damped
            passes_torch.descend(indices, errors, row_entries(start), damped, 4)
    chosen = nearest_indices(last.weight, last.lut(), granularity=granularity)
    assert (chosen == indices).float().mean() > 0.99  # a choice that was close may differ in the last bit
    assert torch.allclose(last.centroids, start.centroids, atol=1e-3)
    kept = nearest_indices(expected, last.lut(), granularity=granularity) == chosen
    assert torch.allclose(last.weight[kept], expected[kept], atol=1e-4)  # the factor was float32 there
    assert torch.equal(last.weight[~kept], lookup(chosen, last.lut(), granularity=granularity)[~kept])


def test_a_run_starts_reconstructed_unless_told_otherwise(model_directory, text_file, tmp_path):
    config = CompressConfig(
        model=str(model_directory),
        data=(str(text_file),),
        output=str(tmp_path / "out"),
        steps=0,
        bits=2,
        context=64,
        eval_windows=2,
        calibration_tokens=256,
        start_tokens=1024,
        save_every=0,
    )
    weights = {}
    for start in ("auto", "reconstructed", "compensated", "kmeans"):
        result = compress(replace(config, start=start, output=str(tmp_path / start)))
        assert result["perplexity"]["exported"] == result["perplexity"]["start"]
        weights[start] = (tmp_path / start / "model.safetensors").read_bytes()
    assert weights["auto"] == weights["reconstructed"]
    assert len(set(weights.values())) == 3
