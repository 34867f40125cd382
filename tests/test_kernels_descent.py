from threading import Event
from time import sleep

import pytest
import torch

from edkm_cli import kernels
from edkm_cli.kernels import passes_torch
from edkm_cli.kernels.layout_c import ALONE_WEIGHTS, parallel


def case(*, rows=5, columns=24, k=4, tiles=1, dtype=torch.float64, seed=0):
    """(weight, chosen entries, tables, H) of correlated inputs."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3 * columns, columns, generator=draw, dtype=dtype) @ torch.randn(
        columns, columns, generator=draw, dtype=dtype
    )
    hessian = inputs.t() @ inputs / len(inputs) + 0.1 * torch.eye(columns, dtype=dtype)
    weight = torch.randn(rows, columns, generator=draw, dtype=dtype)
    luts = torch.randn(rows, tiles, k, generator=draw, dtype=dtype)
    indices = torch.randint(0, k, (rows, columns), generator=draw).to(torch.uint8)
    return weight, indices, luts, hessian


def values(indices, luts):
    width = indices.shape[1] // luts.shape[1]
    parts = [luts[:, tile].gather(1, part.long()) for tile, part in enumerate(indices.split(width, 1))]
    return torch.cat(parts, 1)


def error(weight, indices, luts, hessian):
    difference = values(indices, luts) - weight
    return ((difference @ hessian) * difference).sum(1)


def descended(weight, indices, luts, hessian, *, sweeps, descend=passes_torch.descend):
    indices = indices.clone()
    errors = (values(indices, luts) - weight) @ hessian
    descend(indices, errors, luts, hessian, sweeps)
    if descend is passes_torch.descend:
        torch.testing.assert_close(errors, (values(indices, luts) - weight) @ hessian, rtol=1e-3, atol=1e-3)
    return indices


@pytest.mark.parametrize(("columns", "tiles"), [(24, 1), (24, 3), (130, 1)])
def test_at_the_end_no_other_entry_of_any_one_weight_is_better(columns, tiles):
    weight, indices, luts, hessian = case(columns=columns, tiles=tiles)
    found = descended(weight, indices, luts, hessian, sweeps=100)
    least = error(weight, found, luts, hessian)
    assert (least < error(weight, indices, luts, hessian)).all()
    for column in range(columns):
        for entry in range(luts.shape[2]):
            other = found.clone()
            other[:, column] = entry
            assert (error(weight, other, luts, hessian) >= least - 1e-9).all()


def test_each_sweep_goes_on_where_the_last_one_ended():
    weight, indices, luts, hessian = case()
    once = descended(weight, indices, luts, hessian, sweeps=1)
    assert torch.equal(
        descended(weight, once, luts, hessian, sweeps=1), descended(weight, indices, luts, hessian, sweeps=2)
    )


@pytest.mark.parametrize(
    ("rows", "columns", "k", "tiles"), [(1, 2, 2, 1), (37, 64, 8, 1), (16, 96, 16, 3), (3, 33, 256, 1), (9, 400, 8, 1)]
)
def test_the_fast_kernel_is_its_reference(rows, columns, k, tiles):
    weight, indices, luts, hessian = case(rows=rows, columns=columns, k=k, tiles=tiles, dtype=torch.float32)
    plain = descended(weight, indices, luts, hessian, sweeps=3)
    fast = descended(weight, indices, luts, hessian, sweeps=3, descend=kernels.descend)
    same = (plain == fast).all(1)
    assert same.float().mean() >= 0.9  # a weight between two entries that are as good may take either
    ours, theirs = (error(weight, found, luts, hessian) for found in (fast, plain))
    torch.testing.assert_close(ours[same], theirs[same])
    assert float(ours.sum()) <= 1.05 * float(theirs.sum())


@pytest.mark.parametrize(("rows", "columns", "k"), [(1, 2, 2), (37, 64, 8), (16, 193, 16), (3, 33, 256), (300, 130, 8)])
def test_sums_by_code_are_products_of_one_hot_rows(rows, columns, k, monkeypatch):
    _, indices, _, hessian = case(rows=rows, columns=columns, k=k)
    monkeypatch.setattr(passes_torch, "ONE_HOT_NUMBERS", 5 * columns * k)
    chosen = torch.nn.functional.one_hot(indices.long(), k).double()  # (rows, columns, k)
    expected = chosen.transpose(1, 2) @ hessian @ chosen
    torch.testing.assert_close(passes_torch.sum_by_code(indices, hessian, k), expected)
    found = kernels.sum_by_code(indices, hessian.float(), k)
    plain = passes_torch.sum_by_code(indices, hessian.float(), k)
    assert float((found - expected).norm()) <= 2 * float((plain - expected).norm()) + 1e-7 * float(expected.norm())


def test_rows_that_share_what_is_read_end_as_each_alone():
    weight, indices, luts, hessian = case(rows=520, columns=300, k=8, tiles=2, dtype=torch.float32)
    errors = (values(indices, luts) - weight) @ hessian
    together, alone = indices.clone(), indices.clone()
    kernels.descend(together, errors.clone(), luts, hessian, 3)
    for row in range(0, 520, 37):
        kernels.descend(alone[row : row + 1], errors[row : row + 1].clone(), luts[row : row + 1], hessian, 3)
    assert torch.equal(together[::37], alone[::37])
    assert float(error(weight, together, luts, hessian).sum()) < float(error(weight, indices, luts, hessian).sum())


def test_an_interrupted_kernel_waits_for_its_other_threads(monkeypatch):
    """What they write to is freed once it is left."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    begun, done = Event(), Event()

    def work(first, last):
        if first == 0:
            begun.wait()
            raise KeyboardInterrupt
        begun.set()
        sleep(0.2)
        done.set()

    with pytest.raises(KeyboardInterrupt):
        parallel(work, 2, ALONE_WEIGHTS)
    assert done.is_set()
