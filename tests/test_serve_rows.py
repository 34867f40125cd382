"""The operator that servers' graphs contain: the values of edkm::lut_linear, traced and prepared."""

import gc

import pytest
import torch

from edkm_cli.packing import pack
from edkm_cli.runtime import dispatch, lut_linear_c
from edkm_cli.runtime.lut_linear import lut_linear
from edkm_cli.serve.pieces import PackedRows, Rows

COLUMNS = 40
OF_ONE = (Rows(24, 3, (1, COLUMNS)),)
OF_SEVERAL = (Rows(24, 3, (1, COLUMNS)), Rows(8, 4, (8, 8)), Rows(9, 5, (3, COLUMNS)), Rows(8, 2, (8, COLUMNS)))


def matrices(members, lut_dtype=torch.float16):
    """(indices, lut) of each member."""
    generator, made = torch.Generator().manual_seed(0), []
    for rows, bits, (height, width) in members:
        codes = torch.randint(2**bits, (rows, COLUMNS), generator=generator).to(torch.uint8)
        table = torch.randn(rows // height * (COLUMNS // width), 2**bits, generator=generator).sort(1).values
        made.append((pack(codes, bits), table.to(lut_dtype)))
    return made


def together(made, members):
    indices, luts = zip(*made, strict=True)
    return PackedRows(
        torch.cat([i.flatten() for i in indices]), torch.cat([t.flatten() for t in luts]), members, COLUMNS
    )


def products(x, made, members, bias):
    biases = [None] * len(members) if bias is None else bias.split([member.rows for member in members])
    outs = [
        lut_linear(x, *matrix, own, bits=member.bits, tile=member.tile)
        for matrix, member, own in zip(made, members, biases, strict=True)
    ]
    return torch.cat(outs, -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("members", [OF_ONE, OF_SEVERAL], ids=["one", "several"])
def test_traced_and_prepared_products_are_those_of_each_matrix(members, dtype):
    made = matrices(members)
    rows = together(made, members)
    torch.compiler.reset()
    traced = torch.compile(rows, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 3), (5,), (1,), (300,), (0,)):
            x = torch.randn(*shape, COLUMNS).to(dtype)
            for bias in (None, torch.randn(rows.rows).to(dtype if shape == (0,) else torch.float32)):
                wanted = products(x, made, members, bias)
                assert torch.equal(rows(x, bias), wanted)
                if len(shape) == 1:  # one trace: the operator chooses the path
                    assert torch.equal(traced(x, bias), wanted)


@pytest.mark.parametrize("kind", ["strided", "float64", "half of a bias", "another table", "fewer", "not prepared"])
def test_what_is_not_as_it_was_prepared_is_computed_as_it_is(kind):
    made = matrices(OF_SEVERAL)
    rows = together(made, OF_SEVERAL)
    x, bias = torch.randn(4, COLUMNS), torch.randn(2 * rows.rows)
    x = torch.randn(4, 2 * COLUMNS)[:, ::2] if kind == "strided" else x.double() if kind == "float64" else x
    bias = bias[::2] if kind == "half of a bias" else None
    indices, luts = rows.indices.data, rows.luts.data
    if kind == "another table":
        luts = -luts
        made = [(of, -table) for of, table in made]
    if kind == "not prepared":
        indices = indices.clone()
    if kind == "fewer":  # at the same addresses
        members = OF_SEVERAL[:1]
        found = torch.ops.edkm.merged_linear(x, indices[: 24 * 15], luts[: 24 * 8], None, rows.numbers[:4])
        assert torch.equal(found, products(x, made[:1], members, None))
        return
    found = torch.ops.edkm.merged_linear(x, indices, luts, bias, rows.numbers)
    assert torch.equal(found, products(x, made, OF_SEVERAL, bias))


def test_a_wrong_size_is_refused():
    rows = together(matrices(OF_ONE), OF_ONE)
    with torch.no_grad(), pytest.raises(Exception, match="have 384 bytes of indices and 200 entries, got 360 and 192"):
        rows(torch.randn(2, COLUMNS + 2), None)


def test_without_c_the_products_are_the_same(monkeypatch):
    made = matrices(OF_SEVERAL)
    monkeypatch.setattr(dispatch, "keep", lambda *_: None)
    rows, x = together(made, OF_SEVERAL), torch.randn(3, COLUMNS)
    with torch.no_grad():
        assert torch.equal(rows(x, None), products(x, made, OF_SEVERAL, None))


def test_nothing_is_kept_of_a_model_that_is_gone():
    kept = []
    for _ in range(2):
        rows = together(matrices(OF_ONE), OF_ONE)
        with torch.no_grad():
            rows(torch.randn(2, COLUMNS), None)
        kept.append(rows.indices.data_ptr())
        if len(kept) == 1:
            assert lut_linear_c.forget(kept[0])  # what a model has used is there
        del rows
        gc.collect()
    assert not any(map(lut_linear_c.forget, kept))
