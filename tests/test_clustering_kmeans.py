"""kmeans_start: the optimum by brute force on small groups, never worse than Lloyd from many starts."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edkm_cli import kernels
from edkm_cli.clustering import kmeans_start
from edkm_cli.errors import UserError
from edkm_cli.kernels import layout_c, passes_c, passes_torch
from edkm_cli.kernels.build import library


def error_of(values, mass, centroids):
    """Weighted squared snapping error of one group, float64."""
    distances = (values.double()[:, None] - centroids.double()[None]).square().amin(1)
    return float((distances * mass.double()).sum())


def best_error(values, mass, k):
    """The optimum over all cuts of the sorted values into k intervals."""
    order = values.argsort()
    v, m, n = values[order].double(), mass[order].double(), len(values)
    best = float("inf")
    for cuts in combinations(range(1, n), k - 1):
        total = 0.0
        for a, b in zip((0, *cuts), (*cuts, n), strict=True):
            weight = m[a:b].sum()
            if weight > 0:
                total += float((m[a:b] * (v[a:b] - (m[a:b] * v[a:b]).sum() / weight).square()).sum())
        best = min(best, total)
    return best


@settings(max_examples=40)
@given(st.integers(2, 9), st.integers(2, 4), st.booleans(), st.integers(0, 10**6))
def test_the_start_is_the_optimum(n, k, coarse, seed):
    if library() is None:
        pytest.skip("the optimum needs a C compiler")
    torch.manual_seed(seed)
    values = torch.randint(-3, 4, (n,)).float() if coarse else torch.randn(n)
    mass = torch.rand(n) * (torch.rand(n) > 0.2) if n > 2 else torch.ones(n)
    centroids = kmeans_start(values[None], k, granularity="row:1", importance=mass)[0]
    weights = mass if mass.sum() > 0 else torch.ones(n)
    assert (centroids.diff() >= 0).all()
    optimum = best_error(values, weights, min(k, n))
    assert error_of(values, weights, centroids) <= optimum * (1 + 1e-5) + 1e-12


@pytest.mark.parametrize(("n", "k"), [(64, 4), (576, 8), (1000, 16)])
def test_never_worse_than_lloyd_from_many_starts(n, k):
    torch.manual_seed(n)
    values, mass = torch.randn(3, n), torch.rand(3, n) ** 4
    ours = kmeans_start(values, k, granularity="row:1", importance=mass)
    lloyd = passes_torch.kmeans(values, mass, [k])[0]
    for row in range(3):
        assert error_of(values[row], mass[row], ours[row]) <= error_of(values[row], mass[row], lloyd[row]) * (1 + 1e-6)


def test_plain_lloyd_is_near_the_optimum():
    if library() is None:
        pytest.skip("the optimum needs a C compiler")
    torch.manual_seed(0)
    values, mass = torch.randn(8, 576), torch.rand(8, 576)
    (exact,), (plain,) = passes_c.kmeans(values, mass, [8]), passes_torch.kmeans(values, mass, [8])
    for row in range(8):
        assert error_of(values[row], mass[row], plain[row]) <= 1.1 * error_of(values[row], mass[row], exact[row])


def test_more_distinct_values_than_cut_points_converge():
    torch.manual_seed(1)
    weight = torch.randn(40, 4096)
    centroids = kmeans_start(weight, 8, granularity="tensor")
    index = (weight.reshape(-1, 1) - centroids).abs().argmin(1)
    means = torch.stack([weight.reshape(-1)[index == j].double().mean() for j in range(8)])
    torch.testing.assert_close(centroids[0].double(), means, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("plain", [False, True])
def test_a_large_group_of_16_bit_numbers_is_its_distinct_values(dtype, weighted, plain, monkeypatch):
    torch.manual_seed(4)
    values = torch.randn(3, 1 << 17).mul_(0.02).to(dtype).float()
    mass = torch.rand_like(values) ** 4 if weighted else None
    reference = (passes_torch if plain else passes_c).kmeans(values, mass, [8])[0]  # all values, one by one
    if plain:
        monkeypatch.setattr(layout_c, "supports", lambda weight: False)
    elif library() is None:
        pytest.skip("the optimum needs a C compiler")
    ours = kernels.kmeans(values, mass, [8])[0]
    for row in range(3):
        counted = torch.ones_like(values[row]) if mass is None else mass[row]
        found, wanted = (error_of(values[row], counted, centroids[row]) for centroids in (ours, reference))
        assert found <= wanted * (1.02 if plain else 1 + 1e-5)
    if not plain:
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-7)


def test_a_large_group_without_any_importance_is_clustered_by_count():
    values = torch.randn(1, 1 << 17, generator=torch.Generator().manual_seed(5)).bfloat16().float()
    assert torch.equal(kernels.kmeans(values, torch.zeros_like(values), [4])[0], kernels.kmeans(values, None, [4])[0])


@pytest.mark.parametrize("plain", [False, True])
def test_degenerate_groups(plain, monkeypatch):
    if plain:
        monkeypatch.setattr(layout_c, "supports", lambda weight: False)
    weight = torch.stack((torch.zeros(16), torch.tensor([1.0, 2.0]).repeat(8), torch.full((16,), 0.1)))
    centroids = kmeans_start(weight, 8, granularity="row:1")
    assert centroids.shape == (3, 8)
    assert centroids[0].eq(0).all()
    assert set(centroids[1].tolist()) >= {1.0, 2.0}
    assert centroids[2].eq(weight[2, 0]).all()
    ignored = kmeans_start(torch.randn(2, 16), 4, granularity="row:1", importance=torch.zeros(16))
    assert ignored.isfinite().all()
    assert (ignored.diff(dim=1) > 0).all(), "no importance at all means unweighted"


@pytest.mark.parametrize("granularity", ["tensor", "row:2", "block:2x8"])
def test_column_importance_is_elementwise_importance_of_equal_rows(granularity):
    torch.manual_seed(2)
    weight, importance = torch.randn(4, 16), torch.rand(16)
    a = kmeans_start(weight, 4, granularity=granularity, importance=importance)
    b = kmeans_start(weight, 4, granularity=granularity, importance=importance.expand(4, 16))
    assert torch.equal(a, b)


@pytest.mark.parametrize("k", [4, 16])
def test_importance_of_any_size_gives_finite_centroids(k):
    torch.manual_seed(3)
    weight, importance = torch.randn(64, 96), torch.rand(64, 96) ** 12
    importance[:, ::3] = 1e-30
    centroids = kmeans_start(weight, k, granularity="row:1", importance=importance)
    assert centroids.isfinite().all()
    assert (centroids.diff(dim=1) >= 0).all()
    assert (centroids >= weight.amin(1, keepdim=True)).all()
    assert (centroids <= weight.amax(1, keepdim=True)).all()


def test_user_errors():
    weight = torch.randn(4, 16)
    with pytest.raises(UserError, match="2 to 256"):
        kmeans_start(weight, 1, granularity="tensor")
    with pytest.raises(UserError, match="importance"):
        kmeans_start(weight, 4, granularity="tensor", importance=torch.ones(4))
    with pytest.raises(UserError, match="not negative"):
        kmeans_start(weight, 4, granularity="tensor", importance=-torch.ones(16))
    with pytest.raises(UserError, match="up_proj"):
        kmeans_start(torch.full((4, 16), torch.inf), 4, granularity="tensor", name="up_proj")


@pytest.mark.parametrize("plain", [False, True])
def test_several_numbers_of_centroids_at_once_are_those_of_each_alone(plain):
    if not plain and library() is None:
        pytest.skip("the optimum needs a C compiler")
    torch.manual_seed(6)
    backend = passes_torch if plain else passes_c
    values = torch.cat((torch.randn(3, 700), torch.randint(-4, 5, (2, 700)).float()))  # few distinct ones, too
    for mass in (None, torch.rand(5, 700) ** 4):
        together = backend.kmeans(values, mass, [2, 8, 16])
        for k, centroids in zip((2, 8, 16), together, strict=True):
            assert torch.equal(centroids, backend.kmeans(values, mass, [k])[0])


def test_weights_of_next_to_no_importance_do_not_take_entries_of_their_own():
    values = torch.linspace(-1, 1, 200)[None]
    mass = torch.ones_like(values)
    mass[:, :3] = mass[:, -3:] = 1e-20
    found = kmeans_start(torch.cat([values[:, :3] * 50, values[:, 3:-3], values[:, -3:] * 50], 1), 4,
                         granularity="tensor", importance=mass)  # fmt: skip
    assert float(found.abs().max()) < 1
    inner = kmeans_start(values[:, 3:-3], 4, granularity="tensor")
    assert error_of(values[0, 3:-3], mass[0, 3:-3], found[0]) <= 1.0001 * error_of(
        values[0, 3:-3], mass[0, 3:-3], inner[0]
    )
