"""The ledger of storages: each once, for as long as it lives, under its part."""

from __future__ import annotations

import pytest
import torch

from edkm_cli.distributed import World
from edkm_cli.dryrun.ledger import DEVICE, HOST, Ledger
from edkm_cli.dryrun.meta import Stage

KB = 1000


def held(ledger, place=DEVICE):
    return {part: size for part, size in ledger.accounts[place].bytes.items() if size}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_storage_counts_once_while_any_tensor_on_it_lives(device):
    with Ledger() as ledger:
        x = torch.empty(250, device=device)
        view = x.view(25, 10)[3:, 2:].t()
        assert ledger.accounts[DEVICE].total == KB
        del x
        assert ledger.accounts[DEVICE].total == KB
        del view
        assert ledger.accounts[DEVICE].total == 0
        assert ledger.accounts[DEVICE].totals["start"] == KB


def test_in_place_work_and_returned_arguments_make_nothing_new():
    with Ledger() as ledger:
        x = torch.zeros(250)
        x.add_(1).mul_(2)
        x.view(10, 25).t_()
        assert ledger.accounts[DEVICE].totals["start"] == KB


def test_parts_are_those_of_the_peak_of_each_phase():
    with Ledger() as ledger:
        with ledger.under("weights"):
            weights = torch.empty(250)
        with ledger.under("scratch"):
            scratch = torch.empty(500)
        del scratch
        ledger.begin("later")
        with ledger.under("state", place=HOST):
            state = torch.empty(125)
    device, host = ledger.accounts[DEVICE], ledger.accounts[HOST]
    assert device.peaks["start"] == {"weights": KB, "scratch": 2 * KB}
    assert device.totals == {"start": 3 * KB, "later": KB}
    assert host.totals == {"later": KB // 2}
    del weights, state


def test_small_freed_blocks_wait_for_the_next_ones_until_they_are_given_back():
    with Ledger() as ledger:
        account = ledger.accounts[DEVICE]
        account.kept_below = 3 * KB
        small, large = torch.empty(500), torch.empty(1000)
        del large
        assert account.total == 2 * KB  # gave its memory back at once
        del small
        assert held(ledger) == {"heap": 2 * KB}
        again = torch.empty(250)
        assert held(ledger) == {"other": KB, "heap": KB}
        ledger.begin("later")
        assert held(ledger) == {"other": KB}
    assert account.totals == {"start": 6 * KB, "later": KB}
    del again


def test_free_blocks_are_at_least_some_of_what_small_ones_hold():
    with Ledger() as ledger:
        ledger.accounts[DEVICE].kept_below, ledger.accounts[DEVICE].holes = 3 * KB, 0.5
        small, large = torch.empty(500), torch.empty(1000)
        assert held(ledger) == {"other": 6 * KB, "heap": KB}
        del large
        again = torch.empty(250)
        assert held(ledger) == {"other": 3 * KB, "heap": 3 * KB // 2}
        del small, again
        assert held(ledger) == {"heap": 9 * KB // 2}


def test_what_backward_needs_is_alive_between_forward_and_backward_only():
    with Ledger() as ledger:
        weight = torch.empty(100, 100, requires_grad=True)
        x = torch.empty(50, 100)
        before = ledger.accounts[DEVICE].total
        loss = (x @ weight).exp().sum()  # exp keeps its result
        assert ledger.accounts[DEVICE].total == before + 50 * 100 * 4 + 4
        loss.backward()
        del loss
        assert ledger.accounts[DEVICE].total == before + 100 * 100 * 4  # the gradient


def test_moving_keeps_the_total_and_a_share_is_a_share():
    with Ledger(granule=512) as ledger:
        with ledger.under("a"):
            tensors = [torch.empty(128), torch.empty(1)]
        assert held(ledger) == {"a": 1024}  # rounded up to granules
        ledger.move(tensors, "b", place=HOST)
        assert held(ledger) == {}
        assert held(ledger, HOST) == {"b": 1024}
        ledger.move(tensors[:1], "b", share=0.25)
        assert held(ledger) == {"b": 512}
        tensors.clear()
        assert held(ledger) == {}
        assert held(ledger, HOST) == {}


def test_bytes_without_a_tensor_and_tensors_without_bytes():
    with Ledger() as ledger:
        with ledger.more(3 * KB, "files"):
            assert held(ledger) == {"files": 3 * KB}
        with ledger.uncounted():
            x = torch.empty(250)
        assert ledger.accounts[DEVICE].total == 0
        ledger.move([x], "weights")
        assert held(ledger) == {"weights": KB}


def layouts(tensors):
    return [(x.shape, x.stride(), x.dtype, x.device, x.untyped_storage().nbytes()) for x in tensors]


@pytest.mark.parametrize("of", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_what_a_rehearsal_remembers_of_an_operation_is_what_pytorch_makes(of):
    """PyTorch's rules for the meta device, which are written in Python, are asked once for each arguments."""
    shapes = ((3, 1, 5), (4, 1), (2, 6, 5), (4, 4))
    x, row, wide, square = (torch.empty(shape, dtype=of, device="meta") for shape in shapes)
    results = [
        lambda: (x + row, x - 2, x * 0.5, row * x, x.clamp(0, 3), -x, x * 1, x * 1.0, x * True, x * torch.tensor(2.5)),
        lambda: (x.permute(2, 0, 1) + 1, x[..., ::2] * 2, x.sum(-1), torch.cat([x, x], -1), wide.transpose(1, 2) + 0),
        lambda: (square + 1, square.t() + 1, square.neg(), square.t().neg()),
        lambda: (*x.max(-1), *wide.sort(1), x.argmax(0), x > 1, x.float(), x.to(torch.float16), torch.zeros_like(x)),
        lambda: (x.mean(-1), x.mean((0, 2), keepdim=True), x.norm(dim=1), x.norm(), x.norm(dim=-1, keepdim=True)),
        lambda: (x / 2, x**2, x.sqrt(), torch.nn.functional.silu(x), x.square().mean(-1, keepdim=True).rsqrt()),
        lambda: (wide @ x.new_empty(5, 7), torch.nn.functional.linear(wide, x.new_empty(4, 5), x.new_empty(4))),
    ]
    for made in results if of.is_floating_point else results[:4]:
        wanted = layouts(made())
        with Stage(World(), ()):
            assert layouts(made()) == wanted
            assert layouts(made()) == wanted


def test_what_writes_gives_what_it_wrote_into_and_views_are_no_more_bytes():
    with Stage(World(), ()) as stage:
        x = torch.empty(4, 6, device="meta")
        before = [held(stage.ledger)]
        for _ in range(2):
            assert x.add_(1) is x
            assert x.fill_(2.0) is x
            assert x.clone().unsqueeze_(0).shape == (1, 4, 6)
            assert x.clone().resize_(3, 3).shape == (3, 3)
            with stage.ledger.under("view"):
                assert torch.ops.aten._unsafe_view(x, (2, 12)).untyped_storage()._cdata == x.untyped_storage()._cdata
            before.append(held(stage.ledger))
        assert before == [{"activations": 4 * 24}] * 3
