"""Tables that train through packed products: gradients against dense autograd in float64."""

import pytest
import torch

from edkm_cli.granularity import Granularity
from edkm_cli.packing import Packed, from_groups, pack
from edkm_cli.runtime import dispatch, lut_linear_c, lut_linear_torch
from edkm_cli.runtime.lut_linear import lut_linear, row_scaled_linear

SHAPES = [
    ("tensor", 33, 64), ("tensor", 300, 1000), ("row:1", 24, 200), ("row:1", 37, 97), ("row:1", 1, 1), ("row:2", 18, 129),
    ("row:6", 1500, 720), ("block:8x64", 32, 192), ("block:3x24", 21, 192), ("block:1x9", 17, 45),
]  # fmt: skip


@pytest.fixture(params=["auto", "dense", "reference"])
def path(request, monkeypatch):
    monkeypatch.setattr(dispatch, "forced_path", lambda: request.param)
    return request.param


def random_matrix(granularity, rows, columns, bits, dtype=torch.float32):
    """(codes (rows, columns), lut, tile)."""
    generator = torch.Generator().manual_seed(bits + columns)
    tile = Granularity.parse(granularity).tile(rows, columns)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    groups = rows // tile[0] * (columns // tile[1])
    return codes, torch.randn(groups, 2**bits, generator=generator).to(dtype), tile


def dense_of(codes, lut, tile):
    """W, differentiable in the table, by the definition in docs/format.md."""
    groups = torch.arange(len(lut))[:, None].expand(-1, tile[0] * tile[1])
    return lut[from_groups(groups, codes.shape, tile), codes.long()]


def gradients(x, lut, bias, upstream, product):
    leaves = [t.detach().clone().requires_grad_() for t in (x, lut, bias)]
    out = product(*leaves)
    out.backward(upstream.to(out.dtype))
    return out.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("granularity", "rows", "columns"), SHAPES)
def test_gradients_of_x_table_and_bias_are_those_of_dense_autograd(granularity, rows, columns, bits, path):
    codes, lut, tile = random_matrix(granularity, rows, columns, bits)
    indices, generator = pack(codes, bits), torch.Generator().manual_seed(1)
    x, upstream = torch.randn(2, 5, columns, generator=generator), torch.randn(2, 5, rows, generator=generator)
    bias = torch.randn(rows, generator=generator)

    def dense(x, lut, bias):
        return torch.nn.functional.linear(x, dense_of(codes, lut.to(x.dtype), tile), bias.to(x.dtype))

    def packed(x, lut, bias):
        return lut_linear(x, indices, lut, bias, bits=bits, tile=tile)

    for dtype in (torch.float32, torch.bfloat16):
        given = x.to(dtype), lut, bias.to(dtype), upstream.to(dtype)
        exact = gradients(*(t.double() for t in given), dense)
        plain, found = gradients(*given, dense), gradients(*given, packed)
        for best, other, ours in zip((exact[0], *exact[1]), (plain[0], *plain[1]), (found[0], *found[1]), strict=True):
            assert ours.dtype == other.dtype
            rounding = torch.finfo(other.dtype).eps * best.abs().max()
            assert (ours.double() - best).abs().max() <= 2 * (other.double() - best).abs().max() + rounding


def test_first_and_second_derivatives_in_float64():
    codes, lut, tile = random_matrix("block:2x4", 6, 12, 3, torch.float64)
    x, bias = torch.randn(3, 12, dtype=torch.float64), torch.randn(6, dtype=torch.float64)

    def product(x, lut, bias):
        return lut_linear(x, pack(codes, 3), lut, bias, bits=3, tile=tile)

    given = [t.requires_grad_() for t in (x, lut, bias)]
    assert torch.autograd.gradcheck(product, given)
    assert torch.autograd.gradgradcheck(product, given)


def test_only_x_is_saved_beside_what_the_layer_holds():
    codes, lut, tile = random_matrix("row:1", 64, 256, 3)
    indices, x, kept = pack(codes, 3), torch.randn(4, 256), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        lut_linear(x, indices, lut.requires_grad_(), None, bits=3, tile=tile)
    assert sum(t.nbytes for t in kept) <= indices.nbytes + lut.nbytes + x.nbytes


def test_the_number_of_threads_changes_no_bit():
    codes, lut, tile = random_matrix("row:4", 1200, 1000, 3)
    x, upstream, before, found = torch.randn(9, 1000), torch.randn(9, 1200), torch.get_num_threads(), []
    packed = dispatch.Packed(pack(codes, 3), lut, None, 3, tile)
    values = upstream.t() @ x
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(dispatch.lut_linear_c.sum_by_code(values, packed, 1000, 0))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_sums_of_long_rows_of_one_sign_keep_the_digits_of_float32(bits):
    codes, lut, tile = random_matrix("row:1", 8, 11008, bits)
    values, packed = torch.rand(8, 11008) + 1, dispatch.Packed(pack(codes, bits), lut, None, bits, tile)
    exact = torch.zeros(8, 2**bits, dtype=torch.float64).scatter_add_(1, codes.long(), values.double())
    found = dispatch.lut_linear_c.sum_by_code(values, packed, 11008, 0).squeeze(1)
    assert torch.allclose(found.double(), exact, rtol=2e-6, atol=0)


def test_shapes_alone_are_rehearsed_without_a_weight():
    codes, lut, tile = random_matrix("row:1", 64, 256, 3)
    indices, lut = pack(codes, 3).to("meta"), lut.to("meta").requires_grad_()
    x = torch.randn(4, 256, device="meta", dtype=torch.bfloat16, requires_grad=True)
    out = lut_linear(x, indices, lut, None, bits=3, tile=tile)
    out.sum().backward()
    assert (out.shape, out.dtype) == ((4, 64), torch.bfloat16)
    assert (x.grad.shape, lut.grad.shape, lut.grad.dtype) == (x.shape, lut.shape, torch.float32)
    with torch.no_grad():
        assert lut_linear(x, indices, lut, None, bits=3, tile=tile).is_meta


def test_the_operator_passes_torchs_own_checks():
    codes, lut, _ = random_matrix("row:1", 6, 16, 3)
    x, lut = torch.randn(2, 16, requires_grad=True), lut.requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.edkm.lut_linear.default, (x, pack(codes, 3), lut, None, 3, 1, 16), test_utils=tests)
    grad = torch.randn(2, 6, requires_grad=True)
    torch.library.opcheck(
        torch.ops.edkm.lut_linear_table_gradient.default, (grad, x, pack(codes, 3), lut, 3, 1, 16), test_utils=tests
    )


def test_scales_of_rows_that_should_train_are_refused():
    scale = torch.rand(6, 1, requires_grad=True)
    with pytest.raises(ValueError, match="do not train"):
        row_scaled_linear(torch.randn(1, 16), torch.zeros(6, 16, dtype=torch.uint8), scale, None, bits=8)


def test_values_that_do_not_lie_one_after_the_other_are_summed():
    codes, lut, tile = random_matrix("row:1", 512, 2048, 3)
    packed, values = Packed(pack(codes, 3), lut, None, 3, tile), torch.randn(2048, 512).t()
    if not lut_linear_c.supports(packed):
        pytest.skip("needs a C compiler")
    found, wanted = (one.sum_by_code(values, packed, 2048, 0) for one in (lut_linear_c, lut_linear_torch))
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)
