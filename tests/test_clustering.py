"""fused_dkm against dense_dkm in float64: values, gradients, degenerate inputs, what is saved."""

import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edkm_cli import kernels
from edkm_cli.clustering import (
    clustered_linear,
    dense_dkm,
    fused_dkm,
    iterate_centroids,
    kmeans_start,
    relative_importance,
)
from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.kernels import TorchPasses, layout_c
from edkm_cli.kernels.build import library
from edkm_cli.kernels.passes_c import CPasses

SHAPE = (8, 48)
GRANULARITIES = ("tensor", "row:1", "row:4", "block:2x16", "block:4x24")
QUICK = settings(max_examples=60)


@pytest.fixture(params=["compiled", "plain"])
def path(request, monkeypatch):
    """Run a test on the C kernels and again in plain PyTorch."""
    if request.param == "compiled" and library() is None:
        pytest.skip("no C compiler here")
    if request.param == "plain":
        monkeypatch.setattr(layout_c, "supports", lambda weight: False)
    return request.param


def run(function, weight, start, upstream, **options):
    """(clustered, new centroids, dL/dweight, dL/dstart) in float64 of a function with dense_dkm's signature."""
    weight, start = weight.clone().requires_grad_(), start.clone().requires_grad_()
    clustered, centroids = function(weight, start, **options)
    loss = (clustered.double() * upstream).sum() + (centroids.double() * torch.arange(start.shape[1])).sum()
    grads = torch.autograd.grad(loss, (weight, start))
    return [t.detach().double() for t in (clustered, centroids, *grads)]


def importances(shape, granularity, seed=0):
    """No importance, that of columns, and that of weights, over six orders of magnitude and with zeros."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(shape, generator=generator).mul(3).exp() * (torch.rand(shape, generator=generator) > 0.1)
    relative = [
        relative_importance(raw, torch.empty(shape), granularity=granularity) for raw in (weights.mean(0), weights)
    ]
    return dict(zip(("none", "columns", "weights"), (None, *relative), strict=True))


def assert_no_worse_than_twice_dense(weight, start, upstream, **options):
    """The tolerance rule: error against float64 at most twice that of dense DKM in the same precision.

    The floor covers a dense result that happens to be nearly exact, as in near-hard groups where few weights lie
    between two centroids: a logit d^2 / tau is about 4 / temperature and carries one rounding, which attention turns
    into a relative error of 4 eps / temperature.
    """
    exact = run(dense_dkm, weight.double(), start.double(), upstream, **options)
    dense = run(dense_dkm, weight, start, upstream, **options)
    fused = run(fused_dkm, weight, start, upstream, **options)
    for what, truth, plain, fast in zip(("w~", "c", "dw", "dc"), exact, dense, fused, strict=True):
        assert fast.isfinite().all(), what
        scale = max(truth.abs().max().item(), upstream.abs().max().item() if what in ("dw", "dc") else 0.0)
        floor = torch.finfo(torch.float32).eps * (8 + 4 / options["temperature"]) * scale
        assert (fast - truth).abs().max() <= 2 * (plain - truth).abs().max() + floor, what


@QUICK
@example(torch.float32, "row:1", 3, 3, 1e-3, "none", 7)
@example(torch.bfloat16, "tensor", 3, 3, 1e-3, "none", 7)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(GRANULARITIES),
    st.integers(1, 4),
    st.integers(1, 5),
    st.sampled_from([1e-3, 0.02, 0.3, 10.0]),
    st.sampled_from(["none", "columns", "weights"]),
    st.integers(0, 10**6),
)
def test_fused_is_as_accurate_as_dense(dtype, granularity, bits, iterations, temperature, importance, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(SHAPE, generator=generator) * 0.05).to(dtype)
    start = kmeans_start(weight, 2**bits, granularity=granularity)
    upstream = torch.randn(SHAPE, generator=generator).double()
    options = {"granularity": granularity, "temperature": temperature, "iterations": iterations}
    options["importance"] = importances(SHAPE, granularity, seed)[importance]
    assert_no_worse_than_twice_dense(weight, start, upstream, **options)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_both_paths_agree_with_dense(path, granularity, dtype):
    torch.manual_seed(3)
    weight, upstream = (torch.randn(SHAPE) * 0.02).to(dtype), torch.randn(SHAPE).double()
    start = kmeans_start(weight, 8, granularity=granularity)
    options = {"granularity": granularity, "temperature": 0.02, "iterations": 3}
    for importance in importances(SHAPE, granularity).values():
        assert_no_worse_than_twice_dense(weight, start, upstream, importance=importance, **options)


@pytest.mark.parametrize("granularity", ["tensor", "row:1", "block:2x16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_uniform_importance_changes_nothing(path, granularity, dtype):
    """Values to the bit. With a table of distinct values, one addition of float32 in the weight's gradient moves."""
    torch.manual_seed(10)
    weight, upstream = (torch.randn(SHAPE) * 0.02).to(dtype), torch.randn(SHAPE).double()
    start = kmeans_start(weight, 8, granularity=granularity)
    options = {"granularity": granularity, "temperature": 0.02, "iterations": 3}
    plain = run(fused_dkm, weight, start, upstream, **options)
    for raw in (torch.full(SHAPE[1:], 0.3), torch.full(SHAPE, 1e-9), torch.zeros(SHAPE)):
        importance = relative_importance(raw, weight, granularity=granularity)
        uniform = run(fused_dkm, weight, start, upstream, importance=importance, **options)
        for number, (ours, wanted) in enumerate(zip(uniform, plain, strict=True)):
            if number == 2 and granularity == "tensor" and dtype == torch.bfloat16:
                torch.testing.assert_close(ours, wanted, rtol=2**-7, atol=1e-6 * float(wanted.abs().max()))
            else:
                assert torch.equal(ours, wanted), number


@pytest.mark.parametrize("granularity", ["tensor", "row:1", "block:2x24"])
def test_hard_attention_weighted_by_importance_stays_at_the_weighted_kmeans(path, granularity):
    """The start is the optimum of weighted k-means, which the unweighted updates leave and the weighted ones do not."""
    torch.manual_seed(11)
    weight, importance = torch.randn(SHAPE), torch.randn(SHAPE).mul(2).exp()
    start = kmeans_start(weight, 8, granularity=granularity, importance=importance)
    options = {"granularity": granularity, "temperature": 1e-6, "iterations": 3}
    relative = relative_importance(importance, weight, granularity=granularity)
    kept = iterate_centroids(weight, start, importance=relative, **options)
    torch.testing.assert_close(kept, start, rtol=0.02, atol=0.02)  # the ratios have 8 bits of mantissa
    assert (iterate_centroids(weight, start, **options) - start).abs().max() > 0.1


def test_importance_that_does_not_fit_is_refused():
    weight, start = torch.randn(4, 8), torch.zeros(4, 8)
    for importance, message in (
        (torch.ones(4), "must be"),
        (torch.full((8,), -1.0), "not negative"),
        (torch.full((4, 8), float("nan")), "finite"),
    ):
        with pytest.raises(UserError, match=f"q_proj.*{message}"):
            relative_importance(importance, weight, granularity="row:1", layer="q_proj")
    with pytest.raises(UserError, match=r"\(in,\) or \(4, 8\), got"):
        fused_dkm(weight, start, granularity="row:1", temperature=0.02, iterations=1, importance=torch.ones(4))


@pytest.mark.parametrize("k", [2, 3, 21, 256])
def test_any_number_of_centroids_works(path, k):
    torch.manual_seed(4)
    weight, upstream = torch.randn(4, 300), torch.randn(4, 300).double()
    start = kmeans_start(weight, k, granularity="row:2")
    assert_no_worse_than_twice_dense(weight, start, upstream, granularity="row:2", temperature=0.02, iterations=2)


def degenerate_weights():
    mixed = torch.randn(4, 32)
    mixed[0], mixed[1] = 0.25, torch.tensor([0.0, 1.0]).repeat(16)
    signed = torch.zeros(4, 32)
    signed[:, ::2] = -0.0
    return {
        "zeros": torch.zeros(4, 32),
        "signed zeros": signed,
        "constant": torch.full((4, 32), 0.1),
        "constant row among others": mixed,
        "two values": torch.tensor([-1.0, 2.0]).repeat(64).reshape(4, 32),
        "denormals": torch.arange(128.0).reshape(4, 32) * 1e-41,
        "far outlier": torch.cat((torch.randn(4, 31), torch.full((4, 1), 1e4)), 1),
    }


@pytest.mark.parametrize("case", list(degenerate_weights()))
@pytest.mark.parametrize("granularity", ["tensor", "row:1", "block:2x8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_degenerate_weights_are_finite_and_right(path, case, granularity, dtype):
    torch.manual_seed(5)
    weight = degenerate_weights()[case].to(dtype)
    start = kmeans_start(weight, 8, granularity=granularity)
    options = {"granularity": granularity, "temperature": 0.02, "iterations": 2}
    exact = run(dense_dkm, weight.double(), start.double(), torch.ones(weight.shape), **options)
    fused = run(fused_dkm, weight, start, torch.ones(weight.shape), **options)
    assert all(part.isfinite().all() for part in fused)
    for truth, fast in zip(exact[:2], fused[:2], strict=True):
        torch.testing.assert_close(fast, truth, rtol=8e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-6)


def test_a_centroid_that_attracts_nothing_stays(path):
    weight = torch.randn(2, 64)
    start = torch.tensor([[-1.0, 0.0, 1.0, 1000.0]] * 2)
    moved = iterate_centroids(weight, start, granularity="row:1", temperature=0.02, iterations=3)
    assert torch.equal(moved[:, 3], start[:, 3])
    assert not torch.equal(moved[:, :3], start[:, :3])


@pytest.mark.parametrize("granularity", ["tensor", "row:1", "block:2x4"])
@pytest.mark.parametrize(("iterations", "temperature"), [(0, 0.05), (1, 0.05), (3, 0.5)])
def test_gradcheck_passes(granularity, iterations, temperature):
    torch.manual_seed(6)
    weight = torch.randn(4, 8, dtype=torch.float64)
    start = kmeans_start(weight, 4, granularity=granularity).double().requires_grad_()
    options = {"granularity": granularity, "temperature": temperature, "iterations": iterations}
    for importance in (None, torch.rand(8), torch.rand(4, 8)):
        options["importance"] = importance
        assert torch.autograd.gradcheck(lambda w, c: fused_dkm(w, c, **options), (weight.requires_grad_(), start))
        assert torch.autograd.gradcheck(lambda w, c: dense_dkm(w, c, **options), (weight, start))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("granularity", ["tensor", "row:1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_weight_that_is_not_finite_is_named(path, bad, granularity, dtype):
    weight = torch.randn(4, 32).to(dtype)
    weight[2, 5] = bad
    start = torch.linspace(-1, 1, 8).expand(Granularity.parse(granularity).groups(4, 32), 8)
    with pytest.raises(UserError, match=r"model\.layers\.0\.q_proj"):
        fused_dkm(weight, start, granularity=granularity, temperature=0.02, iterations=1, name="model.layers.0.q_proj")
    for mode in ("soft", "hard", "straight-through"):
        options = {"granularity": granularity, "temperature": 0.02, "iterations": 1, "mode": mode}
        with pytest.raises(UserError, match="q_proj"):
            clustered_linear(torch.ones(1, 32, dtype=dtype), weight, start, **options, name="q_proj")


def test_wrong_shapes_are_user_errors():
    weight = torch.randn(4, 32)
    options = {"temperature": 0.02, "iterations": 1}
    with pytest.raises(UserError, match=r"\(4, k\)"):
        fused_dkm(weight, torch.zeros(1, 8), granularity="row:1", **options)
    with pytest.raises(UserError, match="2 to 256"):
        fused_dkm(weight, torch.zeros(1, 257), granularity="tensor", **options)
    with pytest.raises(UserError, match="nearest that fits"):
        fused_dkm(weight, torch.zeros(4, 8), granularity="block:3x5", **options)


def saved_bytes(function, *inputs):
    """Bytes of all storages that autograd saves while `function` runs, without those of the inputs."""
    known = {t.untyped_storage().data_ptr() for t in inputs}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    del result
    return sum(saved.values())


@pytest.mark.parametrize(
    ("granularity", "limit"), [("tensor", 65536), ("row:1", 256 * 8 * 4), ("block:8x64", 32 * 8 * 32)]
)
@pytest.mark.parametrize("mode", ["soft", "hard", "straight-through"])
def test_at_most_the_luts_are_saved(granularity, limit, mode):
    weight = torch.randn(256, 512).bfloat16().requires_grad_()
    x, bias = torch.randn(4, 512).bfloat16().requires_grad_(), torch.zeros(256).bfloat16().requires_grad_()
    start = kmeans_start(weight, 8, granularity=granularity).requires_grad_()
    options = {"granularity": granularity, "temperature": 0.02, "iterations": 3}
    inputs = (x, weight, start, bias)
    assert saved_bytes(lambda: fused_dkm(weight, start, **options), *inputs) == 0
    linear = saved_bytes(lambda: clustered_linear(x, weight, start, bias, mode=mode, **options), *inputs)
    assert linear <= limit
    assert saved_bytes(lambda: dense_dkm(weight, start, **options), *inputs) > 100 * weight.numel()


@pytest.mark.slow
@pytest.mark.parametrize(("granularity", "limit"), [("tensor", 65536), ("row:1", 4096 * 8 * 4)])
def test_at_most_the_luts_are_saved_for_a_llama_layer(granularity, limit):
    weight = torch.randn(4096, 4096).bfloat16().requires_grad_()
    x = torch.randn(8, 4096).bfloat16().requires_grad_()
    start = kmeans_start(weight, 8, granularity=granularity)
    options = {"granularity": granularity, "temperature": 0.02, "iterations": 3}
    assert saved_bytes(lambda: clustered_linear(x, weight, start, **options), x, weight, start) <= limit


@pytest.mark.parametrize("granularity", ["tensor", "row:1", "row:8"])
def test_results_do_not_depend_on_the_number_of_threads(granularity):
    torch.manual_seed(8)
    weight, upstream = torch.randn(64, 8192).bfloat16(), torch.randn(64, 8192).double()
    start = kmeans_start(weight, 8, granularity=granularity)
    options = {"granularity": granularity, "temperature": 0.02, "iterations": 2}
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(run(fused_dkm, weight, start, upstream, **options))
    torch.set_num_threads(threads)
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_compiled_passes_sum_as_well_as_plain_ones():
    """One pass at a time, on a group large enough that several units share it."""
    if library() is None or os.environ.get("EDKM_CPU_KERNELS") == "0":
        pytest.skip("no C compiler here")
    torch.manual_seed(9)
    weight = torch.randn(40, 16384)
    centroids = kmeans_start(weight, 8, granularity="tensor")
    fast, exact = CPasses(weight, (40, 16384)), TorchPasses(weight.double(), (40, 16384))
    for ours, theirs in zip(fast.spread(), exact.spread(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)
    tau = kernels.relative_temperature(*exact.spread(), 0.02).tau
    for ours, theirs in zip(fast.moments(centroids, tau), exact.moments(centroids.double(), tau), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0.05)
