"""Clustering on the meta device gives the shapes and dtypes that it gives on a real one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from edkm_cli.clustering import clustered_linear, iterate_centroids, kmeans_start, nearest_indices, snap
from edkm_cli.distributed import World
from edkm_cli.dryrun.meta import Stage

GEOMETRIES = ["tensor", "row:2", "block:4x8"]


def both(*shape, dtype=torch.float32):
    real = torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return real, torch.empty_like(real, device="meta")


def same(real, meta):
    assert meta.is_meta
    assert (meta.shape, meta.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", GEOMETRIES)
def test_palettes(granularity, dtype):
    weight, meta = both(16, 32, dtype=dtype)
    start = kmeans_start(weight, 8, granularity=granularity)
    groups = start.to("meta")
    options = {"granularity": granularity}
    with Stage(World(), []):
        same(start, kmeans_start(meta, 8, **options))
        same(nearest_indices(weight, start, **options), nearest_indices(meta, groups, **options))
        same(snap(weight, start, **options), snap(meta, groups, **options))


def test_iterated_centroids():
    weight, meta = both(16, 32)
    options = {"granularity": "row:1", "temperature": 0.1, "iterations": 2}
    start = kmeans_start(weight, 8, granularity="row:1")
    with Stage(World(), []):
        same(iterate_centroids(weight, start, **options), iterate_centroids(meta, start.to("meta"), **options))


@pytest.mark.parametrize("mode", ["soft", "hard", "straight-through"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clustered_linear_forward_and_gradients(mode, dtype):
    outcomes = []
    for device in ("cpu", "meta"):
        weight, x = both(16, 32, dtype=dtype)[0].to(device), both(3, 5, 32, dtype=dtype)[0].to(device)
        centroids = torch.linspace(-2, 2, 8).repeat(16, 1).to(device).requires_grad_(mode == "straight-through")
        weight.requires_grad_()
        x.requires_grad_()
        with Stage(World(), []) if device == "meta" else nullcontext():  # which answers that all is finite
            y = clustered_linear(
                x,
                weight,
                centroids,
                granularity="row:1",
                temperature=0.1,
                mode=mode,
                lut_dtype="float16",
            )
            y.sum().backward()
        outcomes.append([y, *(t.grad for t in (x, weight, centroids))])
    for real, meta in zip(*outcomes, strict=True):
        assert (real is None) == (meta is None)
        if real is not None:
            same(real, meta)
