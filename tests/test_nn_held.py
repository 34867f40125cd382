"""HeldLinear: packed weights whose tables train as those of free weights would, entry by entry."""

import copy

import pytest
import torch

from edkm_cli.clustering import lookup
from edkm_cli.nn.clustered import ClusteredLinear, Clustering, HeldLinear, hold
from edkm_cli.packing import as_numbers
from helpers import cluster, clustered_linear_of, tiny_llama

LAYOUTS = [
    (3, "row:1", "float16"),
    (4, "tensor", "bfloat16"),
    (2, "row:4", "float32"),
    (3, "block:4x8", "float8_e4m3fn"),
    (5, "row:1", "float8_e3m4"),
]


def pair(bits, granularity, lut_dtype, *, dtype=torch.float32, bias=True):
    """A clustered layer, and what holds its assignments."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 16, bias=bias).to(dtype)
    clustering = Clustering(bits, granularity, lut_dtype)
    layer = clustered_linear_of(linear, clustering, temperature=0.05, name="layer").train()
    return layer, HeldLinear.from_clustered(layer)


def reference(layer, x):
    """The product by plain differentiable operations in float64, with the gradient straight through the rounding."""
    table = layer.centroids.double()
    table = table + (layer.lut().double() - table).detach()
    tile = layer.clustering.granularity.tile(layer.out_features, layer.in_features)
    rows, columns = torch.arange(layer.out_features)[:, None], torch.arange(layer.in_features)
    group = rows // tile[0] * (layer.in_features // tile[1]) + columns // tile[1]
    weight = table[group, layer.codes().long()]
    return torch.nn.functional.linear(x.double(), weight, None if layer.bias is None else layer.bias.double())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("bits", "granularity", "lut_dtype"), LAYOUTS)
def test_product_and_gradients_are_those_of_the_reference(bits, granularity, lut_dtype, bias):
    _, held = pair(bits, granularity, lut_dtype, bias=bias)
    x = torch.randn(2, 5, 24, requires_grad=True)
    weights = torch.randn(2, 5, 16)
    (held(x) * weights).sum().backward()
    found = [x.grad, held.centroids.grad, *([held.bias.grad] if bias else [])]
    x.grad = held.centroids.grad = None
    if bias:
        held.bias.grad = None
    torch.testing.assert_close(held(x).double(), reference(held, x), rtol=1e-5, atol=1e-5)
    (reference(held, x) * weights).sum().backward()
    wanted = [x.grad, held.centroids.grad, *([held.bias.grad] if bias else [])]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("bits", "granularity", "lut_dtype"), LAYOUTS)
def test_a_model_that_computes_with_the_weight_itself_trains_the_tables(bits, granularity, lut_dtype):
    _, held = pair(bits, granularity, lut_dtype)
    x = torch.randn(5, 24)
    held(x).square().sum().backward()
    wanted, held.centroids.grad = held.centroids.grad, None
    torch.nn.functional.linear(x, held.weight, held.bias).square().sum().backward()
    torch.testing.assert_close(held.centroids.grad, wanted, rtol=1e-4, atol=1e-4)
    assert torch.equal(held.weight, held.hard_weight())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("bits", "granularity", "lut_dtype"), LAYOUTS)
def test_it_computes_and_trains_as_free_weights_do_until_one_moves(bits, granularity, lut_dtype, dtype):
    layer, held = pair(bits, granularity, lut_dtype, dtype=dtype)
    x = torch.randn(7, 24, dtype=dtype)
    for module in (layer, held):
        module(x).float().square().sum().backward()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    torch.testing.assert_close(held(x), layer(x), **close)
    torch.testing.assert_close(held.centroids.grad, layer.centroids.grad, **close)
    torch.testing.assert_close(held.bias.grad, layer.bias.grad, **close)
    assert torch.equal(held.hard_weight(), layer.hard_weight())


@pytest.mark.parametrize(("bits", "granularity", "lut_dtype"), LAYOUTS)
def test_export_sees_what_it_sees_of_the_clustered_layer(bits, granularity, lut_dtype):
    layer, held = pair(bits, granularity, lut_dtype)
    for ours, theirs in zip(held.snapped(), layer.snapped(), strict=True):
        assert torch.equal(ours.float(), theirs.float())
    ours, theirs = held.stored_scale(), layer.stored_scale()
    assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize(("bits", "granularity", "lut_dtype"), LAYOUTS)
def test_weights_follow_their_entries_wherever_those_go(bits, granularity, lut_dtype):
    _, held = pair(bits, granularity, lut_dtype)
    before = held.codes()
    with torch.no_grad():  # entries pass one another: the weights of each stay together all the same
        held.centroids.copy_(held.centroids.flip(1) + 0.01 * torch.randn(held.centroids.shape))
    assert torch.equal(held.codes(), before)
    indices, lut = held.snapped()
    scale = held.stored_scale()
    table = as_numbers(lut) if scale is None else as_numbers(lut) * scale.float().view(-1, 1)
    assert torch.equal(lookup(indices, table, granularity=held.clustering.granularity), held.hard_weight())


def test_what_stays_dense_does_not_train_in_a_held_model():
    model, _ = cluster(tiny_llama(bias=True), skip=("*.q_proj",), embedding_bits=16)
    hold(model)
    trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trains == {name for name, p in model.named_parameters() if p.dim() == 1 or name.endswith(".centroids")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_held_model_predicts_what_the_clustered_one_does_and_keeps_only_packed_weights(dtype):
    model, _ = cluster(tiny_llama().to(dtype), embedding_bits=16)
    held = copy.deepcopy(model)
    hold(held)
    ids = torch.randint(0, 257, (1, 40))
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    torch.testing.assert_close(held(input_ids=ids).logits, model(input_ids=ids).logits, **close)
    assert not any(name.endswith("proj.weight") for name, _ in held.named_parameters())


def test_the_meta_device_knows_its_shapes():
    with torch.device("meta"):
        layer = ClusteredLinear(
            torch.empty(16, 24), torch.empty(16), torch.empty(16, 8), Clustering(3, "row:1", "float16"),
            temperature=1.0, name="layer",
        )  # fmt: skip
        held = HeldLinear.from_clustered(layer)
        held(torch.empty(5, 24, requires_grad=True)).sum().backward()
    assert held.indices.shape == (16, 9)
    assert held.centroids.grad.shape == (16, 8)
