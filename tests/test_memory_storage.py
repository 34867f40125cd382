"""Views of storages: every layout comes back with its strides, and views of one storage cost one copy."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import forced, same

LAYOUTS = {
    "transposed": lambda h: h.t(),
    "expanded": lambda h: h[:, :1].expand(16, 16),
    "expanded outside": lambda h: h.expand(3, 16, 16),
    "column slice": lambda h: h[:, 3:7],
    "most columns": lambda h: h[:, 2:15],
    "every third": lambda h: h[::3, ::2],
    "chunks": lambda h: h.chunk(3, -1)[1],
    "overlapping": lambda h: h.view(-1).unfold(0, 5, 2),
    "permuted": lambda h: h.view(4, 4, 16).permute(2, 0, 1),
    "scalar": lambda h: h[3, 4],
    "empty": lambda h: h[:0],
    "chain": lambda h: h.view(2, 8, 16).transpose(1, 2)[1:, ::2].unsqueeze(0).permute(3, 0, 2, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_with_its_strides(layout, dtype):
    x = torch.randn(16, 16, dtype=dtype, requires_grad=True)
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t * 1

        @staticmethod
        def backward(ctx, grad):
            (t,) = ctx.saved_tensors
            seen.append((t.clone(), t.stride(), t.shape, t.dtype))
            return grad

    h = x * 2
    view = LAYOUTS[layout](h)
    with forced() as marshal:
        loss = Look.apply(view).abs().sum()
    loss.backward()
    assert torch.equal(seen[0][0], view)
    assert seen[0][1:] == (view.stride(), view.shape, view.dtype)
    assert marshal.statistics.stored_bytes == 0


STEPS = {
    "reverse": lambda t: t.permute(*reversed(range(t.dim()))),
    "rows": lambda t: t[1:],
    "every second": lambda t: t[..., ::2],
    "first": lambda t: t.select(0, 0) if t.shape[0] else t,
    "last of two": lambda t: t.chunk(2, -1)[-1],
    "new": lambda t: t.unsqueeze(0),
    "expand": lambda t: t.unsqueeze(-1).expand(*t.shape, 3),
    "diagonal": lambda t: t.diagonal(0, 0, 1) if t.dim() > 1 else t,
    "flatten": lambda t: t.reshape(-1),
}


@settings(max_examples=60)
@given(
    chains=st.lists(st.lists(st.sampled_from(sorted(STEPS)), max_size=6), min_size=1, max_size=5),
    hops=st.sampled_from([None, 0, 2, 4]),
    identity=st.booleans(),
)
def test_any_chains_of_views_give_the_plain_gradient_and_cost_no_more_than_plain_copies(chains, hops, identity):
    x = torch.randn(4, 6, 8, requires_grad=True)

    def gradient():
        total, base = 0, x * 2
        for chain in chains:
            view = base
            for step in chain:
                view = STEPS[step](view) if view.dim() else view
            total = total + view.sin().sum() + view.square().sum()
        return torch.autograd.grad(total, x)[0]

    expected = gradient()
    with forced(hops=hops, identity=identity) as marshal:
        assert torch.equal(gradient(), expected)
    assert marshal.statistics.stored_bytes == 0
    if identity:
        assert marshal.statistics.moved_bytes <= marshal.statistics.offered_bytes + 4 * x.numel()


def test_a_narrow_slice_does_not_move_its_whole_storage():
    h = torch.randn(64, 64, requires_grad=True) * 1
    with forced() as marshal:
        loss = h[:, :4].sin().sum() + h[3].cos().sum()
    assert marshal.statistics.moved_bytes == 64 * 4 * 4 + 64 * 4
    loss.backward()


def test_fused_projections_are_moved_as_one():
    h = torch.randn(64, 96, requires_grad=True) * 1
    with forced() as marshal:
        q, k, v = h.split(32, -1)
        loss = q.sin().sum() + k.sin().sum() + v.sin().sum()
    assert marshal.statistics.moved_bytes == 64 * 96 * 4
    loss.backward()


def test_a_view_of_another_dtype_shares_the_copy():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t, *others):
            ctx.save_for_backward(t, *others)
            return t * 1

        @staticmethod
        def backward(ctx, grad):
            seen.extend(tensor.clone() for tensor in ctx.saved_tensors)
            return grad, None, None

    x = torch.randn(64, requires_grad=True) * 1
    others = x.detach().view(torch.int32), x.detach().view(torch.int16)[5::3]
    with forced() as marshal:
        Look.apply(x, *others).sum().backward()
    assert marshal.statistics.duplicates_by_identity == 2
    assert marshal.statistics.moved_bytes == 256
    assert same(seen, (x, *others))
