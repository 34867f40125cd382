"""The operator that servers' graphs contain: the values of edkm::lut_linear, traced and prepared."""

import gc

import pytest
import torch

from edkm_cli.kernels.lut_linear import lut_linear
from edkm_cli.packing import pack
from edkm_cli.serve.rows import _PREPARED, PackedRows, products_side_by_side


def matrix(rows=24, columns=40, bits=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    indices = pack(torch.randint(2**bits, (rows, columns), generator=generator).to(torch.uint8), bits)
    return indices, torch.randn(rows, 2**bits, generator=generator).sort(1).values


def product(x, indices, lut, bias):
    return lut_linear(x, indices, lut, bias, bits=3, tile=(1, 40))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prepared_traced_and_plain_products_are_the_same(dtype):
    indices, lut = matrix()
    rows = PackedRows(indices, lut, 3, (1, 40))
    traced = torch.compile(rows, backend="eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for tokens in (1, 5, 300):  # one trace: the operator chooses the path
            x = torch.randn(tokens, 40).to(dtype)
            for bias in (None, torch.randn(24), torch.randn(24)):
                wanted = product(x, indices, lut, bias)
                assert torch.equal(rows(x, bias), wanted)
                assert torch.equal(traced(x, bias), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_different_bits_side_by_side_are_their_products(dtype):
    parts = [PackedRows(*matrix(rows, bits=bits, seed=bits), bits, (1, 40)) for rows, bits in ((24, 3), (8, 4), (8, 2))]
    traced = torch.compile(
        lambda x, bias: products_side_by_side(parts, x, bias), backend="eager", fullgraph=True, dynamic=True
    )
    with torch.no_grad():
        for tokens in (1, 5, 300):
            x = torch.randn(tokens, 40).to(dtype)
            for bias in (None, torch.randn(40)):
                biases = [None] * 3 if bias is None else bias.split([24, 8, 8])
                wanted = torch.cat([part(x, its) for part, its in zip(parts, biases, strict=True)], -1)
                assert torch.equal(products_side_by_side(parts, x, bias), wanted)
                assert torch.equal(traced(x, bias), wanted)


def test_other_tensors_at_the_address_of_a_matrix_are_computed_as_they_are():
    indices, lut = matrix()
    rows = PackedRows(indices, lut, 3, (1, 40))
    x, other = torch.randn(2, 40), torch.randn(24, 8)
    found = torch.ops.edkm.served_linear(x, rows.indices, other, None, 3, 1, 40)
    assert torch.equal(found, product(x, indices, other, None))


def test_nothing_is_kept_of_a_model_that_is_gone():
    before = len(_PREPARED)
    rows = PackedRows(*matrix(), 3, (1, 40))
    rows(torch.randn(2, 40), None)
    assert len(_PREPARED) == before + 1
    del rows
    gc.collect()
    assert len(_PREPARED) == before
    indices, lut = matrix(seed=1)
    x = torch.randn(2, 40)
    assert torch.equal(torch.ops.edkm.served_linear(x, indices, lut, None, 3, 1, 40), product(x, indices, lut, None))
