"""The graph search: what PyTorch records for each storage-preserving operation, and how far the search goes."""

import pytest
import torch

from edkm_cli.memory import MarshalSavedTensors
from edkm_cli.memory.graph import STORAGE_PRESERVING, Marks, walk

VIEWS = {
    "view": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(2, 12),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 3)),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "mT": lambda t: t.mT,
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "movedim": lambda t: t.movedim(0, 1),
    "expand": lambda t: t.expand(3, 4, 6),
    "broadcast_to": lambda t: t.broadcast_to(2, 4, 6),
    "squeeze": lambda t: t.squeeze(),
    "squeeze_one": lambda t: t.squeeze(0),
    "squeeze_several": lambda t: t.squeeze((0, 1)),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "slice": lambda t: t[1:3],
    "narrow": lambda t: t.narrow(0, 1, 2),
    "select": lambda t: t[1],
    "alias": torch.ops.aten.alias,
    "as_strided": lambda t: t.as_strided((2, 2), (6, 1)),
    "diagonal": lambda t: t.diagonal(),
    "unfold": lambda t: t.unfold(0, 2, 2),
    "unbind": lambda t: t.unbind(0)[1],
    "split": lambda t: t.split(2)[1],
    "split_with_sizes": lambda t: t.split([1, 3])[1],
    "chunk": lambda t: t.chunk(2)[1],
    "tensor_split": lambda t: t.tensor_split(2)[1],
    "unsafe_split": lambda t: torch.unsafe_split(t, 2)[1],
    "unsafe_view": lambda t: torch.ops.aten._unsafe_view(t, [24]),
    "reshape_alias": lambda t: torch.ops.aten._reshape_alias(t, [24], [1]),
    "view_as_complex": lambda t: torch.view_as_real(torch.view_as_complex(t.view(4, 3, 2))),
}


def base():
    return torch.randn(4, 6, requires_grad=True) * 2


def graph_only(hops=4):
    return MarshalSavedTensors(hops=hops, identity=False, force=True, min_bytes=0)


@pytest.mark.parametrize("name", VIEWS)
def test_every_storage_preserving_operation_is_walked_through(name):
    x0 = base()
    x1 = VIEWS[name](x0)
    assert x1.untyped_storage()._cdata == x0.untyped_storage()._cdata
    visits = walk(x1, hops=4)
    assert visits[0].node.name() in STORAGE_PRESERVING
    assert any(visit.node == x0.grad_fn for visit in visits)


@pytest.mark.parametrize("order", ["base first", "view first"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_and_its_base_are_moved_once_and_give_the_plain_gradient(name, order):
    def loss(x):
        x0 = x * 2
        first, second = (x0, VIEWS[name](x0)) if order == "base first" else (VIEWS[name](x0), x0)
        return first.exp().sum() + (first.sin().sum() + second.square().sum()) + second.cos().sum()

    x = torch.randn(4, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(loss(x), x)
    marshal = graph_only()
    with marshal:
        (found,) = torch.autograd.grad(loss(x), x)
    assert torch.equal(found, expected)
    # exp saves its result; sin, square and cos save the view or its base: the base again where a part of it went first
    a_part_went_first = order == "view first" and VIEWS[name](torch.arange(24.0).view(4, 6)).unique().numel() < 24
    assert marshal.statistics.duplicates == (1 if a_part_went_first else 2)


@pytest.mark.parametrize("distance", range(6))
def test_hop_distance_0_to_4_is_found_and_5_is_not(distance):
    x0 = base()
    x1 = x0
    for _ in range(distance):
        x1 = x1.t()
    marshal = graph_only(hops=4)
    with marshal:
        loss = x0.square().sum() + x1.square().sum()
    statistics = marshal.statistics
    if distance <= 4:
        assert statistics.duplicates_at_hop == {distance: 1}
        assert statistics.moved_bytes == 4 * 6 * 4
    else:
        assert statistics.duplicates == 0
        assert statistics.moved_bytes == 2 * 4 * 6 * 4
    loss.backward()


def test_identity_finds_what_lies_beyond_the_search():
    x0 = base()
    x1 = x0.t().t().t().t().t()
    marshal = MarshalSavedTensors(hops=4, force=True, min_bytes=0)
    with marshal:
        loss = x0.square().sum() + x1.square().sum()
    assert (marshal.statistics.duplicates_at_hop, marshal.statistics.duplicates_by_identity) == ({}, 1)
    loss.backward()


@pytest.mark.parametrize("hops", range(5))
def test_siblings_meet_at_their_base_two_hops_apart(hops):
    x0 = base()
    marshal = graph_only(hops)
    with marshal:
        loss = x0.t().square().sum() + x0.view(-1).square().sum()
    assert marshal.statistics.duplicates_at_hop == ({2: 1} if hops >= 2 else {})
    loss.backward()


def test_no_hops_and_no_identity_moves_every_saved_tensor():
    x0 = base()
    marshal = MarshalSavedTensors(hops=None, identity=False, force=True, min_bytes=0)
    with marshal:
        loss = x0.square().sum() + x0.view(-1).square().sum() + x0.cos().sum()
    assert marshal.statistics.moved_bytes == marshal.statistics.offered_bytes == 3 * 96
    loss.backward()


def test_an_operation_that_copies_ends_the_search():
    copied = base().t().reshape(-1)
    assert [visit.node.name() for visit in walk(copied, hops=4)] == ["UnsafeViewBackward0", "CloneBackward0"]


def test_outputs_of_one_split_are_different_edges_of_one_node():
    first, second = base().split(2)
    (one, *_), (other, *_) = walk(first, hops=0), walk(second, hops=0)
    assert one.node == other.node
    assert (one.output, other.output) == (0, 1)


def test_a_leaf_is_found_and_a_tensor_without_gradient_has_no_edge():
    leaf = torch.randn(4, 6, requires_grad=True)
    assert walk(leaf.view(-1), hops=1)[1].node == walk(leaf, hops=0)[0].node
    assert walk(torch.randn(3), hops=4) == []


def test_marks_hold_nothing_alive():
    class Thing:
        pass

    marks, thing, x = Marks(), Thing(), base()
    visits = walk(x, hops=4)
    marks.add(visits, thing)
    assert marks.near(visits, hops=4) == [(0, thing)]
    del thing
    assert marks.near(visits, hops=4) == []
