"""The kernels of packed products as other processors run them: the same C, built otherwise, run here as far as that goes."""

import functools
import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from edkm_cli.granularity import Granularity
from edkm_cli.kernels import build
from edkm_cli.packing import Packed, pack
from edkm_cli.runtime import dispatch, lut_linear_c, lut_linear_torch

SHAPES = [
    ("row:1", 24, 200), ("row:1", 37, 97), ("row:1", 1, 1), ("row:2", 18, 129), ("tensor", 33, 64), ("row:1", 40, 832),
    ("row:1", 49, 600),
    ("block:8x64", 32, 192), ("block:3x64", 21, 192), ("block:2x24", 6, 120), ("block:1x9", 17, 45),
]  # fmt: skip
FLAGS = ["-mavx2 -mfma -mf16c", "-mavx512bw -mavx512vl -mavx512dq -mfma -mf16c", ""]
PAIRS = ("avx512_bf16", "avx512_vbmi")
EMULATED = f"-march=native -include {Path(__file__).parent / 'amx_emulation.h'}"


def has(*features):
    lines = Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    return lut_linear_c.library() is not None and all(feature in lines for feature in features)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """compiled(flags): the kernels built with these flags, once; without flags, those of this machine."""
    installed = lut_linear_c.library()

    @functools.cache
    def library(flags):
        if flags is None:
            return Path(installed._name)
        file = tmp_path_factory.mktemp("built") / "kernels.so"
        sources = [file for file in Path(lut_linear_c.__file__).parent.glob("*.c") if file.name != "calls.c"]
        options = ["-O1", "-shared", "-fPIC", "-Wno-psabi", f"-I{Path(build.__file__).parent}", *flags.split()]
        subprocess.run(["cc", *options, *sources, "-o", file, "-lm"], check=True)
        return file

    return library


@pytest.fixture
def use(monkeypatch, tmp_path, compiled):
    """use(flags, **environment): the kernels built with these flags, in this test, with nothing measured yet."""

    def built(flags, **environment):
        copy = shutil.copy(compiled(flags), tmp_path / f"kernels{len(list(tmp_path.iterdir()))}.so")
        loaded = build.ctypes.CDLL(str(copy))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(build, "library", lambda wing: loaded)
        lut_linear_c.library.cache_clear()
        lut_linear_c.level.cache_clear()

    monkeypatch.setattr(dispatch, "forced_path", lambda: "kernel")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # emulated tiles are those of one thread
    yield built
    torch.set_num_threads(threads)
    lut_linear_c.library.cache_clear()
    lut_linear_c.level.cache_clear()


def matrices(bits):
    for granularity, rows, columns in SHAPES:
        generator = torch.Generator().manual_seed(bits + columns)
        tile = Granularity.parse(granularity).tile(rows, columns)
        codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator)
        lut = torch.randn(rows // tile[0] * (columns // tile[1]), 2**bits, generator=generator).half()
        yield columns, Packed(pack(codes, bits), lut, torch.randn(rows, generator=generator), bits, tile)
    if bits > 1:
        generator = torch.Generator().manual_seed(bits)
        codes = torch.randint(0, 2**bits, (19, 45), dtype=torch.uint8, generator=generator)
        yield 45, Packed(pack(codes, bits), torch.rand(19, 1, generator=generator), None, bits, None)


@functools.cache
def expected(bits, dtype, tokens):
    """(x, matrix, exact product, errors of decoding and `F.linear`) of all matrices, the same for all builds."""
    found = []
    for columns, packed in matrices(bits):
        # few tokens several times: one sum that F.linear happens to hit says nothing
        x = torch.randn(max(tokens, 12), columns, generator=torch.Generator().manual_seed(8)).to(dtype)
        packed = packed._replace(bias=None if packed.bias is None else packed.bias.to(dtype))
        bias = None if packed.bias is None else packed.bias.double()
        exact = torch.nn.functional.linear(x.double(), lut_linear_torch.dense(packed, columns, torch.float64), bias)
        dense = lut_linear_torch.dense(packed, columns, dtype)
        plain = torch.cat([torch.nn.functional.linear(part, dense, packed.bias) for part in x.split(tokens)])
        found.append((x, packed, exact, (plain.double() - exact).abs()))
    return found


def product(x, packed):
    return lut_linear_c.linears(x, lut_linear_c.prepare((packed,), x.shape[-1]))[0]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [*FLAGS, EMULATED], ids=["avx2", "avx512", "plain", "amx"])
def test_builds_for_other_processors_give_the_same(flags, use):
    if not has(*(PAIRS if flags == EMULATED else (flag[2:] for flag in flags.split()))):
        pytest.skip("this machine cannot build or run it")
    use(flags)
    dtypes = (torch.bfloat16,) if flags == EMULATED else (torch.float32, torch.bfloat16, torch.float16)
    many = (20, 70, 300) if flags == EMULATED else (20, 70)  # tiles divide tokens and columns otherwise
    for bits, dtype, tokens in itertools.product(range(1, 9), dtypes, (1, 3, *many)):
        for x, packed, exact, allowed in expected(bits, dtype, tokens):
            prepared = lut_linear_c.prepare((packed,), x.shape[-1])
            found = torch.cat([lut_linear_c.linears(part, prepared)[0] for part in x.split(tokens)])
            error = (found.double() - exact).abs()
            rounding = exact.abs().max() * torch.finfo(dtype).eps
            assert error.max() <= 2 * allowed.max() + rounding
            assert error.mean() <= 2 * allowed.mean() + rounding / 4


@pytest.mark.skipif(not has(*PAIRS), reason="one way to multiply")
def test_how_pairs_are_multiplied_changes_no_bit(use):
    """It is measured on each machine, so that it must not matter. Tiny numbers count as zero in both."""
    found = {}
    for way in ("pairs", "ones"):
        use(None, EDKM_MULTIPLY=way)
        results = []
        for bits, scale, tokens in itertools.product((1, 3, 4, 5, 8), (1.0, 1e-30), (17, 40)):
            for columns, packed in matrices(bits):
                x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(8)) * scale
                results.append(product(x.bfloat16(), packed))
        found[way] = results
    for one, other in zip(found["pairs"], found["ones"], strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(not has("avx512_fp16"), reason="no products of float16 here")
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_products_in_float16_neither_overflow_nor_lose_small_numbers(tokens):
    """Activations with outliers, tables of every size, and what is not finite."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 8, (48, 1500), dtype=torch.uint8, generator=generator)
    for of_table, of_x, outlier in itertools.product((6e4, 1.0, 1e-4), (1e30, 1.0, 1e-30), (1, 3000)):
        lut = (torch.rand(48, 8, generator=generator) * 2 - 1).mul(of_table).half()
        x = torch.randn(tokens, 1500, generator=generator)
        x[:, 7] *= outlier
        x = (x * of_x).bfloat16()
        packed = Packed(pack(codes, 3), lut, None, 3, (1, 1500))
        exact = x.double() @ lut_linear_torch.dense(packed, 1500, torch.float64).t()
        plain, found = lut_linear_torch.linear(x, packed), product(x, packed)
        allowed = 2 * (plain.double() - exact).abs().max() + exact.abs().max() * torch.finfo(torch.bfloat16).eps
        assert (found.double() - exact).abs().max() <= allowed
    for bad in (float("inf"), float("nan")):
        x[:, 3] = bad
        assert not product(x, packed).isfinite().any()


def test_an_unknown_way_is_measured(use):
    use(None if has(*PAIRS) else "", EDKM_MULTIPLY="somehow")
    columns, packed = next(iter(matrices(3)))
    assert product(torch.ones(40, columns, dtype=torch.bfloat16), packed).isfinite().all()
    assert os.environ["EDKM_MULTIPLY"] == "somehow"


def test_every_header_compiles_alone(tmp_path):
    if not has():
        pytest.skip("no C compiler here")
    folders = [Path(build.__file__).parent, Path(lut_linear_c.__file__).parent]
    for header in (file for folder in folders for file in folder.glob("*.h")):
        command = ["cc", "-fsyntax-only", "-xc", "-Wno-psabi", f"-I{folders[0]}", header]
        assert subprocess.run(command, check=False).returncode == 0, header
