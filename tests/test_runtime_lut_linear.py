"""Linears on packed weights against float64: every path, values and gradients, odd shapes, threads, forks, operators."""

import itertools
import multiprocessing
import sys

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.granularity import Granularity
from edkm_cli.packing import Packed, pack
from edkm_cli.runtime import dispatch, lut_linear_c, lut_linear_torch
from edkm_cli.runtime.lut_linear import lut_linear, row_scaled_embedding, row_scaled_linear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOKENS = [1, 2, 7, 16, 64, 512]
# Tiles that fill vectors, that end inside one, that end inside a byte; single rows and columns.
SHAPES = [
    ("row:1", 24, 200),
    ("row:1", 37, 97),
    ("row:1", 1, 1),
    ("row:2", 18, 129),
    ("tensor", 33, 64),
    ("block:8x64", 32, 192),
    ("block:3x64", 21, 192),
    ("block:2x128", 22, 384),
    ("block:4x48", 20, 144),
    ("block:3x32", 21, 416),
    ("block:1x16", 5, 208),
    ("block:2x24", 6, 120),
    ("block:1x9", 17, 45),
]


@pytest.fixture(params=["kernel", "dense", "reference"])
def path(request, monkeypatch):
    """Each path in turn."""
    monkeypatch.setattr(dispatch, "forced_path", lambda: request.param)
    return request.param


def random_packed(granularity, rows, columns, bits, *, lut_dtype=torch.float16, bias=True, seed=0):
    generator = torch.Generator().manual_seed(seed + 31 * bits + columns)
    tile = Granularity.parse(granularity).tile(rows, columns)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    groups = rows // tile[0] * (columns // tile[1])
    lut = torch.randn(groups, 2**bits, generator=generator).sort(1).values.to(lut_dtype)
    return Packed(pack(codes, bits), lut, torch.randn(rows, generator=generator) if bias else None, bits, tile)


def random_scaled(rows, columns, bits, *, bias=False):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(1, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    return Packed(
        pack(codes, bits),
        torch.rand(rows, 1, generator=generator) / 2**bits,
        torch.randn(rows, generator=generator) if bias else None,
        bits,
        None,
    )


def call(x, packed):
    indices, table, bias, bits, tile = packed
    if bias is not None:
        bias = bias.to(x.dtype)
    if tile is None:
        return row_scaled_linear(x, indices, table, bias, bits=bits)
    return lut_linear(x, indices, table, bias, bits=bits, tile=tile)


def assert_as_exact_as_dense(x, packed, found, *, floor=1e-6):
    """The tolerance rule: error against float64 at most twice that of decoding and multiplying in the dtype of x."""
    bias = None if packed.bias is None else packed.bias.to(x.dtype)
    exact = torch.nn.functional.linear(
        x.double(),
        lut_linear_torch.dense(packed, x.shape[-1], torch.float64),
        None if bias is None else bias.double(),
    )
    plain = torch.nn.functional.linear(x, lut_linear_torch.dense(packed, x.shape[-1], x.dtype), bias)
    assert found.shape == plain.shape
    assert found.dtype == x.dtype
    error, allowed = (found.double() - exact).abs(), (plain.double() - exact).abs()
    scale = exact.abs().max() * torch.finfo(x.dtype).eps
    assert error.max() <= 2 * allowed.max() + floor * exact.abs().max() + scale
    assert error.mean() <= 2 * allowed.mean() + scale / 4


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("granularity", "rows", "columns"), SHAPES)
def test_products_are_as_exact_as_dense_ones(granularity, rows, columns, bits, path):
    packed = random_packed(granularity, rows, columns, bits)
    for dtype in DTYPES:
        for tokens in TOKENS if path == "kernel" else (1, 16):
            # few tokens several times: a handful of sums that F.linear happens to hit says nothing
            x = torch.randn(max(tokens, 12), columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
            assert_as_exact_as_dense(x, packed, torch.cat([call(part, packed) for part in x.split(tokens)]))


@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("lut_dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_tables_of_every_dtype(lut_dtype, bits, tokens, path):
    for dtype, granularity in itertools.product(DTYPES, ("row:1", "row:3", "block:8x16")):
        packed = random_packed(granularity, 24, 80, bits, lut_dtype=lut_dtype, bias=False)
        x = torch.randn(tokens, 80, generator=torch.Generator().manual_seed(1)).to(dtype)
        assert_as_exact_as_dense(x, packed, call(x, packed))


@pytest.mark.parametrize("bits", range(2, 9))
def test_row_scaled_products_are_as_exact_as_dense_ones(bits, path):
    for rows, columns, bias in ((40, 96, False), (19, 45, True)):
        packed = random_scaled(rows, columns, bits, bias=bias)
        for dtype, tokens in itertools.product(DTYPES, (1, 3, 16, 70)):
            x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)
            assert_as_exact_as_dense(x, packed, call(x, packed))


def test_scales_of_groups_of_columns(path):
    """By a loop over the definition in docs/format.md; no kernel takes them, so that plain PyTorch computes."""
    codes = torch.randint(1, 16, (5, 12), generator=torch.Generator().manual_seed(5), dtype=torch.uint8)
    scale = torch.rand(5, 3, generator=torch.Generator().manual_seed(6))
    weight = torch.zeros(5, 12)
    for row, column in itertools.product(range(5), range(12)):
        weight[row, column] = scale[row, column // 4] * (int(codes[row, column]) - 8)
    packed = Packed(pack(codes, 4), scale, None, 4, None)
    x = torch.randn(2, 12, generator=torch.Generator().manual_seed(7))
    assert torch.equal(dispatch.dense(packed, 12, torch.float32), weight)
    torch.testing.assert_close(row_scaled_linear(x, packed.indices, scale, None, bits=4), x @ weight.t())
    ids = torch.tensor([[4, 0], [2, 2]])
    for chosen in (ids, ids[:0]):
        rows = row_scaled_embedding(chosen, packed.indices, scale, columns=12, bits=4, dtype=torch.float32)
        assert torch.equal(rows, weight[chosen])
    with pytest.raises(ValueError, match="5 scales a row must divide its 12 columns"):
        row_scaled_linear(x, packed.indices, torch.rand(5, 5), None, bits=4)


@pytest.mark.parametrize(
    "kind", ["row:1", "block:6x64", "row:1 5 bits", "row:1 7 bits", "6-bit levels", "8-bit levels"]
)
def test_wide_sums_stay_as_exact(kind, path):
    """4,160 columns: sums in one long chain would be several times worse. Tiles end inside the rows that a thread takes."""
    if kind.endswith("levels"):
        packed = random_scaled(24, 4160, int(kind[0]))
    else:
        granularity, *bits = kind.split()
        packed = random_packed(granularity, 24, 4160, int(bits[0]) if bits else 3, bias=False)
    for dtype in DTYPES:
        for tokens in (1, 4, 33):
            x = torch.randn(tokens, 4160, generator=torch.Generator().manual_seed(2)).to(dtype)
            assert_as_exact_as_dense(x, packed, call(x, packed))


@pytest.mark.parametrize("kind", ["row:2", "block:6x64", "block:2x52", "5 bits", "levels"])
def test_more_tokens_than_share_a_decoding(kind, path):
    granularity, bits = ("row:2", 5) if kind == "5 bits" else (kind, 3)
    packed = random_scaled(22, 832, 6) if kind == "levels" else random_packed(granularity, 24, 832, bits)
    x = torch.randn(300, 832, generator=torch.Generator().manual_seed(2)).bfloat16()
    assert_as_exact_as_dense(x, packed, call(x, packed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["row:1", "block:4x48", "block:1x9", "scaled"])
def test_gradients_of_x_are_those_of_the_dense_linear(kind, dtype, path):
    packed = random_scaled(20, 144, 8) if kind == "scaled" else random_packed(kind, 20, 144, 3, bias=False)
    x = torch.randn(2, 5, 144, generator=torch.Generator().manual_seed(3)).to(dtype).requires_grad_()
    upstream = torch.randn(2, 5, 20, generator=torch.Generator().manual_seed(4)).to(dtype)
    call(x, packed).backward(upstream)
    exact = upstream.double() @ lut_linear_torch.dense(packed, 144, torch.float64)
    plain = upstream @ lut_linear_torch.dense(packed, 144, dtype)
    allowed = 2 * (plain.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (x.grad.double() - exact).abs().max() <= allowed


def test_the_gradient_saves_no_dense_weight():
    packed, kept = random_packed("row:1", 64, 256, 3, bias=False), []

    def note(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        call(torch.randn(4, 256, requires_grad=True), packed)
    assert sum(tensor.nbytes for tensor in kept) <= packed.indices.nbytes + packed.table.nbytes


def test_second_derivatives_and_the_gradient_of_a_bias():
    packed = random_packed("row:1", 6, 16, 3)._replace(bias=None)
    x = torch.randn(3, 16, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def product(x, bias):
        return lut_linear(x, packed.indices, packed.table, bias, bits=3, tile=packed.tile)

    assert torch.autograd.gradcheck(product, (x, bias))
    assert torch.autograd.gradgradcheck(product, (x, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_that_are_not_contiguous_or_empty(dtype, path):
    packed = random_packed("row:1", 12, 40, 3)
    wide = torch.randn(6, 80, generator=torch.Generator().manual_seed(5)).to(dtype)
    for x in (wide[:, ::2], wide[::2, :40], wide.t()[:40].t(), wide[:, :40].expand(2, 6, 40), wide[0, :40]):
        assert_as_exact_as_dense(x, packed, call(x, packed))
    for shape in ((0, 40), (3, 0, 40)):
        assert call(torch.empty(shape, dtype=dtype), packed).shape == (*shape[:-1], 12)


def test_rows_of_an_embedding_are_bit_for_bit_the_reference(path):
    packed = random_scaled(50, 45, 7)
    ids = torch.tensor([[0, 49, 7], [7, 7, 3]])
    for dtype in (*DTYPES, torch.float64):
        found = row_scaled_embedding(ids, packed.indices, packed.table, columns=45, bits=7, dtype=dtype)
        assert torch.equal(found, lut_linear_torch.dense(packed, 45, dtype)[ids])
    for bad in (50, -51, -1):
        with pytest.raises(IndexError):
            row_scaled_embedding(
                torch.tensor([bad]), packed.indices, packed.table, columns=45, bits=7, dtype=torch.float32
            )


@pytest.mark.parametrize("bits", [3, 8])
def test_parts_of_the_weight_are_bit_for_bit_the_reference(bits, path):
    for granularity, rows, columns in SHAPES:
        packed = random_packed(granularity, rows, columns, bits)
        for dtype in DTYPES:
            reference = lut_linear_torch.dense(packed, columns, dtype)
            assert torch.equal(dispatch.dense(packed, columns, dtype), reference)
            part = dispatch.dense(packed, columns, dtype, rows=range(rows // 2, rows), span=range(columns // 2))
            assert torch.equal(part, reference[rows // 2 :, : columns // 2])


def test_several_matrices_share_a_call():
    if lut_linear_c._calls() is None:
        pytest.skip("no extension module here")
    matrices = [random_packed("row:1", rows, 72, 3, seed=rows) for rows in (33, 16, 7)]
    products = dispatch.products(matrices, 72)
    for tokens in (1, 20):
        x = torch.randn(tokens, 72, generator=torch.Generator().manual_seed(6))
        for packed, found in zip(matrices, products(x), strict=True):
            assert torch.equal(found, call(x, packed))


@pytest.mark.parametrize("shape", [(72,), (1, 72), (2, 3, 72)], ids=str)
def test_results_are_tensors_as_new_empty_makes_them(shape):
    if lut_linear_c._calls() is None:
        pytest.skip("no extension module here")
    packed = random_packed("row:2", 18, 72, 3)
    products, prepared = dispatch.products([packed], 72), lut_linear_c.prepare([packed], 72)
    for dtype in DTYPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(dtype)
        (found,), (plain,) = products(x), lut_linear_c.linears(x, prepared)
        assert torch.equal(found, plain)
        for out in (found, plain):
            assert type(out) is torch.Tensor
            assert out.is_contiguous()
            assert (out.shape, out.dtype, out.device) == ((*shape[:-1], 18), dtype, x.device)
        found.mul_(2)
        assert torch.equal(found, plain * 2)


def test_another_way_is_taken_where_x_is_not_plain_or_a_matrix_has_moved():
    if lut_linear_c._calls() is None:
        pytest.skip("no extension module here")
    packed = random_packed("row:2", 18, 72, 3)
    products, x = dispatch.products([packed], 72), torch.ones(2, 72)
    learnt, batch = x.clone().requires_grad_(), []
    assert products(learnt) is None
    with torch.no_grad():
        assert products(learnt)[0].requires_grad is False
    others = [
        x.t().contiguous().t(),
        x[:, :71].contiguous(),
        x[:0],
        x.double(),
        x.to("meta"),
        x.to_sparse(),
        torch.tensor(1.0),
    ]
    others += [torch.nn.Parameter(x, requires_grad=False), x.numpy(), None]
    assert [products(other) for other in others] == [None] * len(others)
    torch.func.vmap(lambda row: batch.append(products(row)) or row)(x)
    with torch.utils._python_dispatch.TorchDispatchMode():
        batch.append(products(x))
    packed.table.data = packed.table.clone()
    assert [*batch, products(x)] == [None] * 3
    with pytest.raises(TypeError, match="one argument"):
        products(x, x)


def test_the_number_of_threads_changes_no_bit():
    packed, before = random_packed("row:1", 300, 1000, 3, bias=False), torch.get_num_threads()
    try:
        for tokens in (1, 16):
            x = torch.randn(tokens, 1000, generator=torch.Generator().manual_seed(7))
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(call(x, packed))
            assert all(torch.equal(found, results[0]) for found in results)
    finally:
        torch.set_num_threads(before)


def _in_child(queue):
    packed = random_packed("row:1", 300, 1000, 3, bias=False)
    queue.put(float(call(torch.ones(1, 1000), packed).sum()))


@pytest.mark.skipif(not hasattr(multiprocessing, "get_context") or sys.platform == "win32", reason="needs fork")
def test_a_forked_child_computes_although_its_parent_has_used_threads():
    packed = random_packed("row:1", 300, 1000, 3, bias=False)
    expected = float(call(torch.ones(1, 1000), packed).sum())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_in_child, args=(queue,))
    child.start()
    try:
        assert queue.get(timeout=60) == expected
    finally:
        child.kill()
        child.join()


def test_shapes_that_do_not_belong_together_are_refused():
    packed, x = random_packed("row:1", 12, 40, 3), torch.randn(1, 40)
    for changed, rule in (
        (packed._replace(table=packed.table[:5]), "the table must be"),
        (packed._replace(bits=4), "bytes"),
        (packed._replace(tile=(5, 40)), "must divide"),
        (packed._replace(bias=torch.zeros(3)), "bias must be"),
        (packed._replace(indices=packed.indices.int()), "uint8"),
    ):
        with pytest.raises(ValueError, match=rule):
            call(x, changed)


def test_a_path_that_is_none_is_refused(monkeypatch):
    monkeypatch.setenv("EDKM_LUT_LINEAR", "fast")
    with pytest.raises(UserError, match="must be one of auto, kernel, dense, reference"):
        dispatch.forced_path.__wrapped__()


def test_operators_pass_torchs_own_checks():
    lut, scaled = random_packed("row:1", 6, 16, 3), random_scaled(6, 16, 8)
    x = torch.randn(2, 16, requires_grad=True)
    ops = torch.ops.edkm
    bias = lut.bias.requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.lut_linear.default, (x, lut.indices, lut.table, bias, 3, 1, 16), test_utils=tests)
    torch.library.opcheck(ops.row_scaled_linear.default, (x, scaled.indices, scaled.table, None, 8), test_utils=tests)
    grad = torch.randn(2, 6, requires_grad=True)
    torch.library.opcheck(
        ops.lut_linear_input_gradient.default, (grad, lut.indices, lut.table, 16, 3, 1, 16), test_utils=tests
    )
    ids = torch.tensor([1, 5])
    torch.library.opcheck(
        ops.row_scaled_embedding.default, (ids, scaled.indices, scaled.table, 16, 8, torch.bfloat16), test_utils=tests
    )


class _Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.packed = random_packed("row:1", 6, 16, 3)
        self.register_buffer("indices", self.packed.indices)
        self.register_buffer("lut", self.packed.table)

    def forward(self, x):
        return torch.relu(lut_linear(x, self.indices, self.lut, None, bits=3, tile=(1, 16)))


def test_compile_and_export_take_the_operator():
    module, x = _Module(), torch.randn(4, 16)
    expected = module(x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
    rows = torch.export.Dim("rows", min=1, max=64)
    exported = torch.export.export(module, (x,), dynamic_shapes={"x": {0: rows}})
    assert torch.equal(exported.module()(torch.cat((x, x))), torch.cat((expected, expected)))
