"""clustered_linear: equal to linear on the clustered weight, in every mode, checkpointed, accumulated, autocast.

With a low-rank update: equal to plain autograd on the sum, keeping nothing of the weight's size.
"""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from edkm_cli.clustering import (
    clustered_linear,
    dense_dkm,
    iterate_centroids,
    kmeans_start,
    lookup,
    nearest_indices,
    round_lut,
    snap,
)
from edkm_cli.errors import UserError
from edkm_cli.kernels import from_groups, layout_c, to_groups

GRANULARITIES = ("tensor", "row:1", "block:4x16")
SETTINGS = {"temperature": 0.03, "iterations": 2}


@pytest.fixture(params=["compiled", "plain"])
def path(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(layout_c, "supports", lambda weight: False)


def make(granularity, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(16, 32, generator=generator) * 0.05).to(dtype)
    x = torch.randn(2, 5, 32, generator=generator).to(dtype)
    start = kmeans_start(weight, 8, granularity=granularity)
    start = start.double() if dtype == torch.float64 else start
    bias = torch.randn(16, generator=generator).to(dtype)
    return [t.requires_grad_() for t in (x, weight, start, bias)]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_soft_mode_is_linear_on_the_dense_reference(granularity):
    inputs = make(granularity, torch.float64)
    x, weight, start, bias = inputs
    ours = clustered_linear(x, weight, start, bias, granularity=granularity, **SETTINGS)
    reference = linear(x, dense_dkm(weight, start, granularity=granularity, **SETTINGS)[0], bias)
    torch.testing.assert_close(ours, reference)
    for a, b in zip(
        torch.autograd.grad(ours.sin().sum(), inputs), torch.autograd.grad(reference.sin().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("lut_dtype", [None, "float16", "float8_e4m3fn", "float8_e3m4"])
def test_hard_mode_multiplies_with_what_export_stores_and_keeps_the_dkm_gradient(path, granularity, lut_dtype):
    x, weight, start, _ = make(granularity)
    options = {"granularity": granularity, **SETTINGS}
    final = iterate_centroids(weight, start, **options)
    lut = round_lut(final, lut_dtype)
    stored = lookup(nearest_indices(weight, lut, granularity=granularity), lut, granularity=granularity)
    y = clustered_linear(x, weight, start, mode="hard", lut_dtype=lut_dtype, **options)
    torch.testing.assert_close(y, linear(x, stored), rtol=0, atol=0)
    upstream = torch.randn(y.shape)
    (hard,) = torch.autograd.grad(y, weight, upstream)
    (soft,) = torch.autograd.grad(clustered_linear(x, weight, start, **options), weight, upstream)
    assert torch.equal(hard, soft)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_straight_through_passes_the_gradient_on_and_sums_it_by_entry(path, granularity, dtype):
    x, weight, start, _ = make(granularity, dtype)
    y = clustered_linear(x, weight, start, granularity=granularity, mode="straight-through", lut_dtype="float16")
    upstream = torch.randn(y.shape).to(dtype)
    grad_weight, grad_start = torch.autograd.grad(y, (weight, start), upstream)
    expected = upstream.reshape(-1, 16).t() @ x.detach().reshape(-1, 32)
    assert torch.equal(grad_weight, expected)
    lut = round_lut(start.detach(), "float16").requires_grad_()
    indices = nearest_indices(weight, lut, granularity=granularity)
    sums = torch.zeros_like(start)
    groups = {"tensor": (16, 32), "row:1": (1, 32), "block:4x16": (4, 16)}[granularity]
    for r in range(16):
        for c in range(32):
            group = (r // groups[0]) * (32 // groups[1]) + c // groups[1]
            sums[group, indices[r, c].long()] += expected[r, c].float()
    torch.testing.assert_close(grad_start, sums.detach(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mode", ["soft", "hard", "straight-through"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_checkpointing_gives_the_same_gradients(mode, granularity):
    inputs = make(granularity, torch.bfloat16)

    def layer(x, weight, start, bias):
        return clustered_linear(x, weight, start, bias, granularity=granularity, mode=mode, **SETTINGS).relu()

    plain = torch.autograd.grad(layer(*inputs).float().square().sum(), inputs)
    kept = torch.autograd.grad(checkpoint(layer, *inputs, use_reentrant=False).float().square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))


@pytest.mark.parametrize("mode", ["soft", "hard", "straight-through"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_micro_batches_that_share_the_iterations_add_up_to_the_whole_batch(mode, granularity):
    x, weight, start, bias = make(granularity)
    options = {"granularity": granularity, "mode": mode, **SETTINGS}
    whole = torch.autograd.grad(clustered_linear(x, weight, start, bias, **options).sum(), (weight, start, bias))
    shared = iterate_centroids(weight, start, granularity=granularity, **SETTINGS)
    parts = [
        torch.autograd.grad(
            clustered_linear(part, weight, start, bias, new_centroids=shared, **options).sum(), (weight, start, bias)
        )
        for part in x.split(1)
    ]
    for total, *pieces in zip(whole, *parts, strict=True):
        torch.testing.assert_close(sum(pieces), total, rtol=2e-4, atol=2e-5)


def test_reused_iterations_change_no_bit():
    x, weight, start, bias = make("row:1")
    options = {"granularity": "row:1", **SETTINGS}
    shared = iterate_centroids(weight, start, **options)
    a = clustered_linear(x, weight, start, bias, **options)
    b = clustered_linear(x, weight, start, bias, new_centroids=shared, **options)
    assert torch.equal(a, b)
    assert torch.equal(torch.autograd.grad(a.sum(), weight)[0], torch.autograd.grad(b.sum(), weight)[0])


@pytest.mark.parametrize("mode", ["soft", "hard", "straight-through"])
def test_a_float32_weight_serves_bfloat16_activations_and_autocast(mode):
    x, weight, start, bias = make("row:1")
    options = {"granularity": "row:1", "mode": mode, **SETTINGS}
    y = clustered_linear(x.bfloat16(), weight, start, bias, **options)
    assert y.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = clustered_linear(x, weight, start, bias, **options)
    assert torch.equal(y, cast)
    grads = torch.autograd.grad(cast.float().sum(), (x, weight, start, bias))
    assert [g.dtype for g in grads] == [torch.float32] * 4


def test_unknown_modes_and_dtypes_are_user_errors():
    x, weight, start, _ = make("row:1")
    with pytest.raises(UserError, match="soft, hard, straight-through"):
        clustered_linear(x, weight, start, granularity="row:1", mode="sharp")
    with pytest.raises(UserError, match="float8_e4m3fn"):
        clustered_linear(x, weight, start, granularity="row:1", lut_dtype="int4")


def test_snap_has_the_dtype_of_the_lut_not_of_the_weight():
    weight = torch.randn(4, 8).bfloat16()
    start = kmeans_start(weight, 4, granularity="row:1")
    assert snap(weight, start, granularity="row:1").dtype == torch.float32


MODES = ("soft", "hard", "straight-through")
LORA_GRANULARITIES = ("tensor", "row:1", "row:4", "block:4x8")


def plain_autograd(weight, x, a, b, centroids, bias, *, mode, granularity, lut_dtype=None):
    """The same layer by ordinary operations on `weight + 0.7 b a`, which autograd saves as it likes."""
    total = weight.to(a.dtype) + 0.7 * (b @ a)
    final = centroids
    if mode != "straight-through":
        soft, final = dense_dkm(total, centroids, granularity=granularity, **SETTINGS)
    if mode == "soft":
        return linear(x, soft.to(x.dtype), bias)
    lut = round_lut(final.detach(), lut_dtype)
    indices = nearest_indices(total, lut, granularity=granularity)
    hard = lookup(indices, lut, granularity=granularity)
    if mode == "hard":
        return linear(x, hard.to(x.dtype) + (soft - soft.detach()).to(x.dtype), bias)
    rows, columns = total.shape
    sizes = {"tensor": (rows, columns), "row:1": (1, columns), "row:4": (4, columns), "block:4x8": (4, 8)}
    tile = sizes[granularity]
    entries = from_groups(centroids.gather(1, to_groups(indices, tile).long()), (rows, columns), tile)
    trained = (hard + (entries - entries.detach()) + (total - total.detach())).to(x.dtype)
    return linear(x, trained, bias)


class LiveMatrices(TorchDispatchMode):
    """Counts the storages of at least `numel` elements that operations made and that are alive, and their peak."""

    def __init__(self, numel):
        super().__init__()
        self.numel, self.peak, self.known = numel, 0, set()

    def alive(self):
        self.known = {reference for reference in self.known if not reference.expired()}
        return len(self.known)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {
            StorageWeakRef(leaf.untyped_storage())
            for leaf in tree_leaves((args, kwargs or {}))
            if isinstance(leaf, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.numel() >= self.numel:
                self.known |= {StorageWeakRef(leaf.untyped_storage())} - given
        self.peak = max(self.peak, self.alive())
        return result


def test_centroids_of_another_geometry_are_refused():
    x, weight, start, _ = make("row:1")
    with pytest.raises(UserError, match=r"new_centroids of weight must be \(16, 8\), got \(1, 8\)"):
        clustered_linear(x, weight, start, granularity="row:1", mode="hard", new_centroids=start[:1])


def test_the_default_dtype_changes_no_gradient():
    x, weight, start, _ = make("tensor", torch.bfloat16)
    gradients = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            out = clustered_linear(x, weight, start, granularity="tensor", mode="soft", **SETTINGS)
            gradients.append(torch.autograd.grad(out.float().square().sum(), weight)[0])
        finally:
            torch.set_default_dtype(torch.float32)
    assert gradients[0].abs().sum() > 0
    assert torch.equal(*gradients)
