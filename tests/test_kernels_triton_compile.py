"""The Triton kernels, compiled for GPUs that are not here, with what the functions that launch them give to each. Their
results are looked at in the interpreter (test_kernels_triton.py)."""

import pytest
import torch

from edkm_cli.packing import Packed, pack

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402 - only where it is installed
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import mangle_type  # noqa: E402

from edkm_cli.kernels import attention_triton, closed_form, palette_triton, rounding_triton  # noqa: E402
from edkm_cli.runtime import lut_linear_triton  # noqa: E402


@pytest.fixture(params=[80, 90], ids=lambda capability: f"sm_{capability}")
def compiled(request, monkeypatch):
    """Machine code of all launches, by kernel: (name, how many)."""
    target, made = GPUTarget("cuda", request.param, 32), []

    def compiling(kernel):
        class Launch:
            def __getitem__(self, grid):
                assert all(size > 0 for size in grid)
                return self

            def __call__(self, *given, num_warps=4, **constants):
                names = [parameter.name for parameter in kernel.params]
                values = dict(zip(names, given, strict=False)) | constants
                fixed = {p.name: values[p.name] for p in kernel.params if p.is_constexpr}
                types = {name: "constexpr" if name in fixed else mangle_type(values[name]) for name in names}
                source = ASTSource(kernel, types, constexprs=fixed)
                code = triton.compile(source, target=target, options={"num_warps": num_warps}).asm["cubin"]
                made.append((kernel.__name__, len(code)))

        return Launch()

    for module in (attention_triton, palette_triton, rounding_triton, lut_linear_triton):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, compiling(kernel))
    return made


def test_clustering_compiles(compiled):
    weight, start = torch.randn(2, 300).bfloat16(), torch.randn(2, 8)
    passes = attention_triton.TritonPasses(weight, (1, 300), torch.rand(2, 300))
    spread = closed_form.relative_temperature(*passes.spread(), 0.05)
    passes.iterate(start, spread.tau, 3)
    passes.soft(start, spread.tau, torch.bfloat16)
    passes.backward(start, spread, 3, weight, start)
    assert [name for name, size in compiled if size > 1000] == [
        "_forward_kernel",
        "_forward_kernel",
        "_backward_kernel",
    ]


def test_palettes_compile(compiled):
    weight, luts = torch.randn(2, 300).bfloat16(), torch.randn(2, 8)
    palette_triton.nearest(weight, luts, (1, 300))
    palette_triton.snap(weight, luts, (1, 300), torch.bfloat16)
    palette_triton.sum_by_entry(weight, luts, weight, (1, 300))
    assert [name for name, size in compiled if size > 1000] == ["_snap_kernel", "_snap_kernel", "_sum_kernel"]


@pytest.mark.parametrize("bits", [3, 8])
def test_packed_products_compile(compiled, bits):
    indices, table = pack(torch.zeros(4, 96, dtype=torch.uint8), bits), torch.randn(4, 2**bits)
    for entries in (table.half(), table.to(torch.float8_e4m3fn)):
        lut_linear_triton.dense(Packed(indices, entries, None, bits, (1, 96)), 96, torch.bfloat16)
    packed = Packed(indices, torch.rand(4, 1), None, bits, None)
    lut_linear_triton.dense(packed, 96, torch.bfloat16)
    lut_linear_triton.sum_by_code(torch.randn(4, 96).bfloat16(), packed, 96, 0)
    assert [name for name, size in compiled if size > 1000] == ["_dense_kernel"] * 3 + ["_sum_kernel"]


@pytest.mark.parametrize("k", [8, 256])
def test_rounding_compiles(compiled, k):
    luts, factor, tiles = torch.randn(16, 1, k).sort(-1).values, torch.eye(128), torch.zeros(128, dtype=torch.int64)
    block, tables = torch.randn(128, 16), luts.permute(1, 2, 0).contiguous()
    rounding_triton.round_columns(block, tables, tiles, factor, torch.bfloat16)
    rounding_triton.changes(torch.zeros(16, 128, dtype=torch.uint8), block.t().contiguous(), luts, factor, 0, 128)
    assert [name for name, size in compiled if size > 1000] == ["_round_kernel", "_descend_kernel"]
