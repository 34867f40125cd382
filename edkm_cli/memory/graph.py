"""The bounded search of the autograd graph for tensors that share a storage (eDKM, arXiv 2309.00964, section 2.1).

A tensor that autograd saves is named here by its *edge*: the node of the backward graph that produced it, and which of
that node's outputs it is. Edges, hops and marks: docs/memory.md. Marks live in the `metadata` dictionary of the node
itself: they vanish with the graph, and no address is a key.
"""

import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import get_gradient_edge

# What PyTorch records (2.9 to 2.13) for operations whose output shares the storage of their only differentiable input.
# `flatten`, `unflatten` and `reshape` of a contiguous tensor record ViewBackward0; `.T` and `movedim` PermuteBackward0;
# `narrow` and `tensor_split` SliceBackward0; `chunk` SplitBackward0. A `reshape` that must copy records CloneBackward0
# first, which is not here. A node that lies (none is known) costs nothing: whoever uses the search compares storages.
_VIEWS = (
    "Alias0 AsStrided0 Diagonal0 Expand0 LiftFresh0 Permute0 ReshapeAlias0 Select0 Slice0 Split0 SplitWithSizes0 Squeeze0 "
    "Squeeze1 Squeeze2 T0 Transpose0 Transpose1 Unbind0 Unfold0 UnsafeSplit0 UnsafeSplitWithSizes0 UnsafeView0 Unsqueeze0 "
    "ViewAsComplex0 ViewAsReal0 View0 View1"
)
STORAGE_PRESERVING = frozenset(f"{name[:-1]}Backward{name[-1]}" for name in _VIEWS.split())


class Visit(NamedTuple):
    """An edge that the search reached, and how many hops from where it began."""

    node: Any  # torch.autograd.graph.Node
    output: int
    distance: int


def walk(tensor: torch.Tensor, *, hops: int) -> list[Visit]:
    """The edges within `hops` of `tensor`, nearest first, going only through `STORAGE_PRESERVING` nodes.

    The first visit, at distance 0, is the tensor's own edge. A tensor that requires no gradient has no edge: the list
    is empty. Pure: reads the graph and changes nothing.
    """
    if not tensor.requires_grad:
        return []
    # The node of a leaf is the one that accumulates its gradient.
    node: Any = get_gradient_edge(tensor).node if tensor.grad_fn is None else tensor.grad_fn
    frontier = [(node, tensor.output_nr)]
    distances: dict[tuple[Any, int], int] = {}
    for distance in range(hops + 1):
        ahead = []
        for edge in frontier:
            if edge not in distances:
                distances[edge] = distance
                if edge[0].name() in STORAGE_PRESERVING:
                    ahead += [further for further in edge[0].next_functions if further[0] is not None]
        frontier = ahead
    return [Visit(*edge, distance) for edge, distance in distances.items()]


class Marks:
    """Which moved things lie near an edge of the graph. Holds them weakly, in the graph's own nodes."""

    def __init__(self) -> None:
        self._key = object()  # of these marks alone

    def add(self, visits: Iterable[Visit], thing: Any) -> None:
        """Leave a mark for `thing` on every visited edge."""
        for node, output, distance in visits:
            here = node.metadata.setdefault(self._key, {}).setdefault(output, [])
            here[:] = [mark for mark in here if mark[0]() is not None and mark[0]() is not thing]
            here.append((weakref.ref(thing), distance))

    def near(self, visits: Iterable[Visit], *, hops: int) -> list[tuple[int, Any]]:
        """`(distance, thing)` for each mark at most `hops` away in all (our steps plus the mark's own), nearest first."""
        nearby = []
        for node, output, distance in visits:
            for reference, further in node.metadata.get(self._key, {}).get(output, ()):
                if (thing := reference()) is not None and distance + further <= hops:
                    nearby.append((distance + further, thing))
        return sorted(nearby, key=lambda pair: pair[0])
