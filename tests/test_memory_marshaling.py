"""MarshalSavedTensors: gradients as without it, each storage moved once, nothing left behind."""

import contextlib
import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from edkm_cli.memory import MarshalSavedTensors
from helpers import forced, same


class Block(torch.nn.Module):
    """Attention and MLP as a LLaMA block has them: q, k and v share their input, rotary halves, gated MLP."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (torch.nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(2 * width, width, bias=False)
        self.norm1, self.norm2 = torch.nn.RMSNorm(width), torch.nn.RMSNorm(width)

    def _rotate(self, x):
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[-2]).unsqueeze(-1) / torch.arange(1, x.shape[-1] + 1)
        return x * angle.cos() + torch.cat((-x[..., half:], x[..., :half]), -1) * angle.sin()

    def forward(self, x):
        batch, tokens, width = x.shape
        h = self.norm1(x)
        q, k, v = (f(h).view(batch, tokens, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = torch.nn.functional.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(batch, tokens, width))
        h = self.norm2(x)
        return x + self.down(torch.nn.functional.silu(self.gate(h)) * self.up(h))


def gradients(model, x, context=None, call=None):
    model.zero_grad()
    x.grad = None
    if context is None:
        (model if call is None else call)(x).square().mean().backward()
    else:
        with context:
            (model if call is None else call)(x).square().mean().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block(), torch.randn(2, 16, 32, requires_grad=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hops": None},
        {"identity": False},
        {"hops": None, "identity": False},
        {"prefetch": 0},
        {"prefetch": 7},
        {"min_bytes": 5000},
    ],
)
def test_gradients_of_a_llama_block_are_bit_identical(block, options):
    expected = gradients(*block)
    marshal = forced(**options)
    for _ in range(2):  # the second step reuses buffers
        assert same(gradients(*block, context=marshal), expected)
    assert marshal.statistics.stored_bytes == 0


def test_a_llama_block_moves_at_most_0_6_of_what_is_saved_and_counts_add_up(block):
    marshal = forced()
    gradients(*block, context=marshal)
    counts = marshal.statistics
    assert counts.moved_bytes <= 0.6 * counts.offered_bytes
    assert counts.moved_bytes + counts.duplicate_bytes + counts.kept_bytes == counts.offered_bytes
    assert counts.moved_tensors + counts.duplicates + counts.kept_tensors == counts.offered_tensors
    assert counts.peak_stored_bytes <= counts.moved_bytes == counts.restored_bytes


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_activation_checkpointing_gives_the_same_gradients(block, use_reentrant, where):
    model, x = block
    expected = gradients(model, x, call=lambda x: checkpoint(model, x, use_reentrant=use_reentrant))
    marshal = forced()

    def inner(x):
        with marshal:
            return model(x)

    call = model if where == "outside" else inner
    context = marshal if where == "outside" else None
    found = gradients(model, x, context=context, call=lambda x: checkpoint(call, x, use_reentrant=use_reentrant))
    assert same(found, expected)
    assert marshal.statistics.offered_tensors > 0
    assert marshal.statistics.stored_bytes == 0


def test_what_checkpointing_saves_is_moved_and_its_recomputation_is_not(block):
    model, x = block
    marshal = forced()
    with marshal:
        y = checkpoint(model, x * 1, use_reentrant=False)
        assert marshal.statistics.stored_bytes == x.numel() * 4
    y.sum().backward()


def test_two_backward_passes_through_one_graph(block):
    model, x = block
    expected = [2 * gradient for gradient in gradients(model, x)]
    model.zero_grad()
    x.grad = None
    with forced() as marshal:
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        assert marshal.statistics.stored_bytes > 0
        loss.backward()
    assert same([x.grad, *(parameter.grad for parameter in model.parameters())], expected)
    assert marshal.statistics.stored_bytes == 0


def test_double_backward():
    x = torch.randn(8, requires_grad=True, dtype=torch.float64)

    def second(x):
        (first,) = torch.autograd.grad((x.exp() * x.sin()).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second(x)
    with forced():
        assert torch.equal(second(x), expected)


def test_backward_after_the_block_and_nested_entering():
    x = torch.randn(8, 8, requires_grad=True)
    marshal = forced()
    with marshal:
        a = x.exp().sin()
        with marshal:
            b = (a * a).cos()
        loss = (b * a).sum()
    loss.backward()
    expected = torch.autograd.grad(((torch.cos(x.exp().sin() * x.exp().sin())) * x.exp().sin()).sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)
    assert marshal.statistics.stored_bytes == 0


def test_inside_other_hooks_the_inner_ones_get_the_tensors():
    outer = []
    x = torch.randn(8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: outer.append(t) or t, lambda t: t):
        with forced() as marshal:
            a = x.exp()
        a.sin().sum().backward()
    assert len(outer) == 1
    assert marshal.statistics.offered_tensors == 1


def test_an_exception_in_forward_leaves_nothing_behind():
    marshal = forced()
    x = torch.randn(64, requires_grad=True)

    def forward():
        with marshal:
            x.exp().sin()
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        forward()
    gc.collect()
    assert marshal.statistics.stored_bytes == 0
    assert len(marshal._table) == 0
    before = marshal.statistics.offered_tensors
    x.exp().sum().backward()
    assert marshal.statistics.offered_tensors == before  # the hooks are gone


def test_memory_is_released_as_soon_as_the_last_user_is_done():
    marshal = forced(prefetch=0)
    x = torch.randn(256, requires_grad=True)
    stored = []
    with marshal:
        a = x.exp()  # saves a
        a.register_hook(lambda grad: stored.append(marshal.statistics.stored_bytes))
        b = a.sin()  # saves a again
        c = b.cos()  # saves b
        c.sum().backward()
    assert marshal.statistics.peak_stored_bytes == 2 * 1024
    assert stored == [1024]  # when b is through, only a is left
    assert marshal.statistics.stored_bytes == 0


def test_the_device_copy_is_made_once_for_all_its_views():
    marshal = forced(prefetch=0)
    x = torch.randn(16, 16, requires_grad=True) * 1
    with marshal:
        loss = x.square().sum() + x.t().sin().sum() + x.view(-1).cos().sum() + x[3:7].exp().sum()
    loss.backward()
    assert marshal.statistics.moved_bytes == 1024 + 4 * 16 * 4  # x once, and exp's result
    assert marshal.statistics.restored_bytes == marshal.statistics.moved_bytes


@pytest.mark.parametrize("write", ["tensor", "view", "base"])
def test_in_place_modification_after_saving_is_detected_as_autograd_does(write):
    def run():
        x = torch.randn(4, 4, requires_grad=True)
        base = x * 2
        saved = base.view(-1) if write == "base" else base
        loss = saved.sin().sum()
        (base.view(-1) if write == "view" else base).mul_(3)
        loss.backward()

    message = r"modified by an inplace operation: \[torch.FloatTensor \[.*\]\].* is at version 1; expected version 0"
    with pytest.raises(RuntimeError, match=message):
        run()
    with forced(), pytest.raises(RuntimeError, match=message):
        run()


def test_in_place_modification_of_a_parameter_that_stayed_is_detected():
    layer = torch.nn.Linear(4, 4)
    with forced():
        loss = layer(torch.randn(2, 4, requires_grad=True)).sum()
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_storage_that_was_written_to_is_moved_again():
    x = torch.randn(64, requires_grad=True)
    with forced() as marshal:
        h = x * 1
        first = h.sin()
        h.mul_(2)
        second = h.cos()
    assert marshal.statistics.duplicates == 0
    second.sum().backward(retain_graph=True)
    torch.testing.assert_close(x.grad, -2 * torch.sin(2 * x))
    with pytest.raises(RuntimeError, match="inplace"):
        first.sum().backward()


def test_a_freed_storage_whose_address_is_reused_does_not_match():
    x = torch.randn(1 << 14, requires_grad=True)
    reused = False
    marshal = forced()
    for hops, identity in ((4, True), (None, True), (4, False)):
        marshal = forced(hops=hops, identity=identity)
        losses, addresses = [], set()
        with marshal:
            for factor in range(1, 20):
                h, others = x * factor, []
                while addresses and h.data_ptr() not in addresses and len(others) < 200:  # other free blocks come first
                    others.append(h)
                    h = x * factor
                reused |= h.data_ptr() in addresses
                addresses.add(h.data_ptr())
                losses.append(h.sin().sum())
                del h
        assert marshal.statistics.duplicates == 0
        x.grad = None
        sum(losses).backward()
        expected = torch.autograd.grad(sum((x * factor).sin().sum() for factor in range(1, 20)), x)[0]
        assert torch.equal(x.grad, expected)
    assert reused, "the allocator gave no address twice: the test shows nothing"


def test_parameters_views_of_them_inputs_kept_and_small_tensors_stay():
    layer = torch.nn.Linear(64, 64)
    x = torch.randn(8, 64, requires_grad=True)
    marshal = forced(keep=[x], min_bytes=1024)
    with marshal:
        (layer(x) * torch.ones(64, requires_grad=True)).sum().backward()
    assert marshal.statistics.moved_tensors == 1  # the layer's output, for the factor's gradient
    assert marshal.statistics.kept_small_bytes == 256


def test_tensors_on_the_target_device_are_not_moved():
    marshal = MarshalSavedTensors(min_bytes=0)
    x = torch.randn(64, requires_grad=True)
    with marshal:
        x.exp().sin().sum().backward()
    assert marshal.statistics.moved_bytes == 0
    assert marshal.statistics.kept_bytes == marshal.statistics.offered_bytes == 2 * 256


def test_under_torch_compile_the_compiled_graph_is_marshaled(block):
    model, x = block
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    expected = gradients(model, x, call=compiled)
    marshal = forced()
    found = gradients(model, x, context=marshal, call=compiled)
    assert same(found, expected)
    assert marshal.statistics.moved_bytes > 0


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("made", ["outside", "inside"])
def test_entering_inside_a_compiled_function_breaks_the_graph_or_is_refused(made, fullgraph):
    torch._dynamo.reset()
    marshal = forced()

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def forward(x):
        with marshal if made == "outside" else MarshalSavedTensors(force=True):
            return x.exp().sin().sum()

    x = torch.randn(400, requires_grad=True)
    if fullgraph:
        with pytest.raises(Exception, match="MarshalSavedTensors"):
            forward(x)
    else:
        forward(x).backward()
        assert torch.equal(x.grad, torch.autograd.grad(x.exp().sin().sum(), x)[0])
        assert made == "inside" or marshal.statistics.offered_tensors == 2


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"hops": -1}, {"prefetch": -1}, {"min_bytes": -5}])
def test_wrong_arguments_are_refused(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        MarshalSavedTensors(**options)


def test_statistics_count_what_was_moved():
    marshal = forced()
    with marshal:
        torch.randn(64, requires_grad=True).exp().sum().backward()
    assert marshal.statistics.as_dict()["moved_bytes"] == 256


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_on_a_gpu_gradients_are_bit_identical_and_memory_is_freed(prefetch):
    torch.manual_seed(0)
    linears = [torch.nn.Linear(512, 512) for _ in range(8)]
    model = torch.nn.Sequential(*(module for linear in linears for module in (linear, torch.nn.GELU()))).cuda()
    x = torch.randn(4096, 512, device="cuda", requires_grad=True)
    expected = gradients(model, x)
    marshal = MarshalSavedTensors(prefetch=prefetch)
    for _ in range(3):
        assert same(gradients(model, x, context=marshal), expected)
    assert marshal.statistics.moved_bytes > 0
    assert marshal.statistics.stored_bytes == 0


def test_numbers_of_two_sizes_that_share_a_storage_are_rebuilt():
    found = []
    for marshal in (contextlib.nullcontext(), MarshalSavedTensors(force=True, min_bytes=0)):
        x = torch.arange(1.0, 9.0, requires_grad=True)
        with marshal:
            y = x * (1 + 0j)
            (torch.view_as_real(y).reshape(-1)[1:].sin().sum() + y[1:].abs().sum()).backward()
        found.append(x.grad)
    assert torch.equal(*found)
