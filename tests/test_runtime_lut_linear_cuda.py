"""The CUDA kernel of packed linears: its source run on a CPU against float64, and on a GPU where there is one.

tests/cuda_on_cpu.c runs the very text that NVRTC compiles, a block's threads taking turns, with byte permutes and
tensor-core products written out after the PTX manual. So indexing and arithmetic are held here; speed needs a GPU.
"""

import ctypes
import logging
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edkm_cli.packing import Packed, pack
from edkm_cli.runtime import dispatch, lut_linear_cuda, lut_linear_torch

DTYPES = [torch.bfloat16, torch.float16]
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
WARPS = 2  # of a block here: fewer threads to take turns, and runs that go round


def random_packed(rows, columns, bits, *, tile_rows=1, lut_dtype=torch.float16, bias=None, device="cpu"):
    generator = torch.Generator().manual_seed(31 * bits + columns + rows)
    codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
    lut = torch.randn(rows // (tile_rows or 1), 2**bits, generator=generator).sort(1).values.to(lut_dtype)
    given = None if bias is None else torch.randn(rows, generator=generator).to(device, bias)
    if not tile_rows:  # levels
        return Packed(pack(codes, bits).to(device), lut[:, :1].abs().to(device), given, bits, None)
    return Packed(pack(codes, bits).to(device), lut.to(device), given, bits, (tile_rows, columns))


def activations(tokens, columns, dtype):
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def assert_as_exact_as_dense(x, packed, found):
    """The tolerance rule: error against float64 at most twice that of decoding and `F.linear` in the dtype of x."""
    x, packed, found = x.cpu(), Packed(*(t.cpu() if isinstance(t, torch.Tensor) else t for t in packed)), found.cpu()
    bias = None if packed.bias is None else packed.bias.double()
    exact = torch.nn.functional.linear(x.double(), lut_linear_torch.dense(packed, x.shape[-1], torch.float64), bias)
    plain = torch.nn.functional.linear(
        x, lut_linear_torch.dense(packed, x.shape[-1], x.dtype), None if bias is None else bias.to(x.dtype)
    )
    assert (found.shape, found.dtype) == (plain.shape, x.dtype)
    error, allowed = (found.double() - exact).abs(), (plain.double() - exact).abs()
    scale = exact.abs().max() * torch.finfo(x.dtype).eps
    assert error.max() <= 2 * allowed.max() + scale
    assert error.mean() <= 2 * allowed.mean() + scale / 4


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """A launch of the kernel on this processor; each setting is compiled once."""
    if COMPILER is None:
        pytest.skip("no C compiler here")
    folder, libraries = tmp_path_factory.mktemp("cuda"), {}
    shim = Path(__file__).with_name("cuda_on_cpu.c")

    def library(given):
        key = tuple(given.values())
        if key not in libraries:
            built = folder / f"{len(libraries)}.so"
            flags = [f"-D{name}={value}" for name, value in given.items()]
            here = Path(lut_linear_cuda.__file__).parent
            command = [COMPILER, "-O0", "-shared", "-fPIC", "-I", str(here), *flags, str(shim), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if "_Float16" in done.stderr:
                pytest.skip("a compiler without _Float16")
            assert done.returncode == 0, done.stderr
            libraries[key] = ctypes.CDLL(str(built))
        return libraries[key]

    def kernel_of(given):
        def kernel(blocks, *values):
            assert given["WARPS"] == WARPS
            passed = [ctypes.c_void_p(value or None) for value in values[:5]] + [
                ctypes.c_int(value) for value in values[5:]
            ]
            library(given).launch(ctypes.c_int(blocks), *passed)

        return kernel

    before, lut_linear_cuda.WARPS = lut_linear_cuda.WARPS, WARPS

    def linear(x, packed):
        assert lut_linear_cuda.takes(x, packed)
        return lut_linear_cuda._launch(x, packed, kernel_of(lut_linear_cuda.settings(x, packed)))

    linear.kernel_of = kernel_of
    yield linear
    lut_linear_cuda.WARPS = before


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "tile_rows"),
    [(16, 128, 1), (37, 96, 1), (1, 32, 1), (24, 640, 2), (18, 1408, 18), (33, 288, 3), (17, 96, 0)],
)
def test_the_source_is_as_exact_as_a_dense_product(rows, columns, tile_rows, dtype, bits, on_cpu):
    packed = random_packed(rows, columns, bits, tile_rows=tile_rows)
    for tokens in (1, 7, 9, 32) if rows * columns < 10000 else (2, 8, 17):
        x = activations(tokens, columns, dtype)
        assert_as_exact_as_dense(x, packed, on_cpu(x, packed))


@pytest.mark.parametrize(
    ("lut_dtype", "bias", "bits"),
    [(torch.float32, torch.bfloat16, 4), (torch.bfloat16, torch.float16, 3), (torch.float16, torch.float32, 3)],
)
def test_tables_and_biases_of_every_dtype(lut_dtype, bias, bits, on_cpu):
    packed = random_packed(20, 64, bits, lut_dtype=lut_dtype, bias=bias)
    x = activations(3, 64, torch.bfloat16)
    assert_as_exact_as_dense(x, packed, on_cpu(x, packed))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_code_finds_its_entry(bits, on_cpu):
    """One column at a time: powers of two are exact in any order."""
    lut = 2.0 ** torch.arange(2**bits).float().sub(4)
    packed = random_packed(16, 128, bits)._replace(table=lut.half().repeat(16, 1))
    dense = lut_linear_torch.dense(packed, 128, torch.float32)
    for first in range(0, 128, 8):
        x = torch.eye(128, dtype=torch.float16)[first : first + 8]
        assert torch.equal(on_cpu(x, packed).float(), dense[:, first : first + 8].T)


def test_what_lies_beyond_a_row_is_no_part_of_a_sum(on_cpu):
    """Lanes without columns left multiply zeros, even where a table holds what is not finite."""
    packed = random_packed(16, 96, 3)
    packed.indices[:] = pack(torch.full((16, 96), 5, dtype=torch.uint8), 3)
    packed.table[:, 0] = float("inf")
    x = activations(2, 96, torch.bfloat16)
    assert_as_exact_as_dense(x, packed, on_cpu(x, packed))


def test_views_and_odd_addresses(on_cpu):
    packed = random_packed(16, 64, 3)
    wide = activations(4, 2 * 64 + 1, torch.bfloat16)
    for x in (wide[:, ::2][:, :64], wide.flatten()[1 : 1 + 64], wide[:, 1:65].reshape(2, 2, 64)):
        assert_as_exact_as_dense(x, packed, on_cpu(x, packed))


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 1, "table": torch.zeros(16, 2)},
        {"tile": (8, 32)},
        {"table": torch.zeros(16, 8).to(torch.float8_e4m3fn)},
    ],
)
def test_products_that_the_kernel_was_not_written_for_go_elsewhere(change):
    packed = random_packed(16, 64, 3)
    x = activations(1, 64, torch.bfloat16)
    assert lut_linear_cuda.takes(x, packed)
    assert not lut_linear_cuda.takes(x, packed._replace(**change))
    assert not lut_linear_cuda.takes(x.float(), packed)
    assert not lut_linear_cuda.takes(activations(33, 64, torch.bfloat16), packed)
    for columns in (32, 48, 96):
        assert not lut_linear_cuda.takes(activations(1, columns, torch.bfloat16), packed)
        levels = random_packed(16, 64, 3, tile_rows=0)
        assert not lut_linear_cuda.takes(activations(1, columns, torch.bfloat16), levels)


def test_a_modules_products_are_prepared_once_and_give_way_to_gradients(on_cpu, monkeypatch):
    """On a processor that takes itself for a GPU: where the kernel comes from is the only difference."""
    made, kernel_of = [], on_cpu.kernel_of
    monkeypatch.setattr(lut_linear_cuda, "_broken", [])
    monkeypatch.setattr(lut_linear_cuda, "supports", lut_linear_cuda.takes)
    monkeypatch.setattr(lut_linear_cuda, "_kernel", lambda device, given: made.append(given) or kernel_of(dict(given)))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # what a tensor in host memory says of itself
    matrices = [
        random_packed(16, 64, 3),
        random_packed(32, 64, 5, tile_rows=0),
        random_packed(8, 64, 3, bias=torch.float32),
    ]
    product = lut_linear_cuda.products(matrices, 64)
    for _ in range(2):
        for tokens in (1, 9):
            x = activations(tokens, 64, torch.bfloat16)
            with torch.no_grad():
                found = product(x)
            assert all(torch.equal(one, on_cpu(x, packed)) for one, packed in zip(found, matrices, strict=True))
    assert len(made) == 2 * 3
    assert product(activations(33, 64, torch.bfloat16)) is None
    assert product(activations(1, 64, torch.float32)) is None
    for wrong in (activations(2, 32, torch.bfloat16), activations(1, 128, torch.bfloat16)):
        assert product(wrong) is None
    assert product(activations(1, 64, torch.bfloat16).requires_grad_()) is None
    monkeypatch.setattr(lut_linear_cuda, "_launch", lambda *given: 1 / torch.cuda.missing)
    assert product(activations(1, 64, torch.bfloat16)) is None
    assert lut_linear_cuda._broken


@pytest.mark.parametrize(("bits", "tiles"), [(2, 1), (3, 1), (4, 1), (3, 2), (4, 4), (6, 1), (8, 2)])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_it_without_headers_and_without_spills(architecture, bits, tiles):
    """Where NVRTC is installed (`pip install nvidia-cuda-nvrtc-cu12`); it needs no GPU."""
    found = [file for folder in sys.path for file in Path(folder).glob("nvidia/*/lib/libnvrtc.so.*")]
    if not found:
        pytest.skip("no NVRTC here")
    given = lut_linear_cuda.settings(activations(8 * tiles, 128, torch.bfloat16), random_packed(16, 128, bits))
    given["WARPS"] = 8
    assert given["TILES"] == tiles
    nvrtc = ctypes.CDLL(str(found[0]))
    code, log = lut_linear_cuda.compiled(lut_linear_cuda.source(given), architecture, nvrtc, "--ptxas-options=-v")
    assert len(code) > 1000
    assert " 0 bytes spill stores" in log
    registers = int(re.search(r"Used (\d+) registers", log)[1])
    assert registers <= (128 if tiles < 4 else 168)  # two blocks of 256 threads on a multiprocessor
    with pytest.raises(RuntimeError, match="does not compile"):
        lut_linear_cuda.compiled("nonsense", architecture, nvrtc)


@pytest.mark.parametrize("stage", ["compile", "launch"])
def test_a_failing_kernel_warns_once_and_is_left(stage, monkeypatch, caplog):
    """On whatever device: what compiles or launches here does not exist, as on a GPU without NVRTC."""

    def fails(*given, **named):
        raise RuntimeError("no NVRTC, no launch")

    monkeypatch.setattr(lut_linear_cuda, "_broken", [])
    monkeypatch.setattr(lut_linear_cuda, "_kernel", fails if stage == "compile" else lambda *given: fails)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(dispatch, "_path", lambda x, packed: "reference" if lut_linear_cuda._broken else "cuda")
    packed, x = random_packed(16, 64, 3), activations(2, 64, torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert torch.equal(dispatch.linear(x, packed), lut_linear_torch.linear(x, packed))
            assert not lut_linear_cuda.supports(x, packed)
    assert sum("CUDA kernel" in record.message for record in caplog.records) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("bits", "levels"), [(2, False), (3, False), (4, False), (5, False), (6, False), (8, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(16, 128), (37, 96), (4096, 4096), (1376, 11008)], ids=str)
def test_on_a_gpu_the_kernel_runs_and_is_as_exact(shape, dtype, bits, levels):
    packed = random_packed(*shape, bits, tile_rows=not levels, device="cuda")
    for tokens in (1, 5, 8, 13, 32):
        x = activations(tokens, shape[1], dtype).cuda()
        assert lut_linear_cuda.supports(x, packed)
        found = lut_linear_cuda.linear(x, packed)
        assert not lut_linear_cuda._broken
        assert_as_exact_as_dense(x, packed, found)
