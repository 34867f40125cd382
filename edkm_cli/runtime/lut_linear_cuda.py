"""lut_linear.cu on a GPU: 1 to 32 rows of 16-bit activations times a packed matrix of 2 to 8 bits.

Compiled at first use for the GPU at hand by NVRTC, which PyTorch brings along, and launched as PyTorch's own
`torch.cuda._compile_kernel` would: that one asks for an installed CUDA toolkit, whose headers this kernel does not need.
Where compiling or launching fails, one warning says why, and matrices are decoded for cuBLAS.
"""

import ctypes
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.packing import packed_width
from edkm_cli.runtime.packed import Packed

_LOG = logging.getLogger(__name__)
_NO_BIAS = -1
ROWS = 16  # of W that a block takes
TOKENS = 32  # at most; a product takes eight at a time
WARPS = 8
_LEAST_CAPABILITY = (8, 0)  # bfloat16 products


def reads(packed: Packed) -> bool:
    """Whether the kernel was written for a matrix of this width, tables and layout: tables that span rows, or row scales."""
    rows_of = packed.tile is None or packed_width(packed.tile[1], packed.bits) == packed.indices.shape[1]
    return 2 <= packed.bits <= 8 and rows_of and not packed.grouped and packed.table.dtype in DTYPES


def takes(x: Tensor, packed: Packed) -> bool:
    """Whether the kernel was written for these dtypes and shapes, wherever they are."""
    columns, bias = x.shape[-1], packed.bias
    known = x.dtype in (torch.bfloat16, torch.float16) and (bias is None or bias.dtype in DTYPES)
    fits = 0 < x.numel() <= TOKENS * columns and columns % 32 == 0 and packed.indices.shape[0] * columns < 1 << 40
    return known and fits and reads(packed)


def settings(x: Tensor, packed: Packed) -> dict[str, int]:
    """What lut_linear.cu is compiled with for this product."""
    return {
        "BITS": packed.bits,
        # Of one load: a run of 128 columns fills four words. Larger tables take few registers for codes.
        "VECTOR": 4 if x.shape[-1] % 128 == 0 and packed.bits <= 4 else 1,
        "TILES": 1 << (-(-x.numel() // (8 * x.shape[-1])) - 1).bit_length(),  # of eight rows of x: 1, 2 or 4
        "HALF": int(x.dtype == torch.float16),
        "LEVELS": int(packed.tile is None),
        "LUT": DTYPES[packed.table.dtype],
        "BIAS": _NO_BIAS if packed.bias is None else DTYPES[packed.bias.dtype],
        "WARPS": WARPS,
    }


def source(given: dict[str, int]) -> str:
    """The text that is compiled."""
    text = (Path(__file__).parent / "lut_linear.cu").read_text(encoding="utf-8")
    return "".join(f"#define {name} {value}\n" for name, value in given.items()) + text


def compiled(text: str, architecture: str, nvrtc: Any, *options: str) -> tuple[bytes, str]:
    """(Machine code for `architecture`, such as sm_90; the compiler's log). `nvrtc`: the library, by ctypes.

    Raises RuntimeError with the log where it does not compile.
    """
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *arguments: Any) -> int:
        return int(getattr(nvrtc, name)(*arguments))

    def read(what: str) -> bytes:
        if call(f"nvrtcGet{what}Size", program, ctypes.byref(size)):
            raise RuntimeError(f"NVRTC gives no {what}")
        buffer = ctypes.create_string_buffer(size.value)
        if call(f"nvrtcGet{what}", program, buffer):
            raise RuntimeError(f"NVRTC gives no {what}")
        return buffer.raw

    if call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), b"lut_linear.cu", 0, None, None):
        raise RuntimeError("NVRTC takes no program")
    try:
        flags = [f"--gpu-architecture={architecture}".encode(), *(option.encode() for option in options)]
        failed = call("nvrtcCompileProgram", program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
        log = read("ProgramLog").decode(errors="replace").strip("\0\n ")
        if failed:
            raise RuntimeError(f"lut_linear.cu does not compile for {architecture}: {log[:500]}")
        return read("CUBIN"), log
    finally:
        call("nvrtcDestroyProgram", ctypes.byref(program))


_broken: list[str] = []  # why the kernel is not used in this process, once it failed


@functools.cache
def _kernel(device: int, given: tuple[tuple[str, int], ...]) -> Callable[..., None]:
    """The compiled kernel on a GPU. Raises whatever compiling or loading raises."""
    from torch.cuda import _utils

    find = getattr(_utils, "_get_gpu_rtc_library", None) or _utils._get_nvrtc_library  # as PyTorch finds NVRTC
    major, minor = torch.cuda.get_device_capability(device)
    code, _ = compiled(source(dict(given)), f"sm_{major}{minor}", find())
    found: Any = _utils._cuda_load_module(code, ["lut_linear"])
    return found["lut_linear"]


def supports(x: Tensor, packed: Packed) -> bool:
    """Whether this product goes by the kernel."""
    here = not _broken and x.is_cuda and packed.indices.device == x.device and torch.version.hip is None
    return here and takes(x, packed) and torch.cuda.get_device_capability(x.device) >= _LEAST_CAPABILITY


def linear(x: Tensor, packed: Packed) -> Tensor | None:
    """x @ W.T + bias with table entries rounded to x's dtype and float32 sums; None where the kernel fails."""
    try:
        with torch.cuda.device(x.device):
            return _launch(x, packed, _kernel(x.device.index, tuple(settings(x, packed).items())))
    except (RuntimeError, OSError, AttributeError, ImportError, KeyError, TypeError) as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        if not _broken:
            _broken.append(str(error))
            _LOG.warning("the CUDA kernel of packed linears is not available, matrices are decoded (slower): %s", error)
        return None


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at an address that the widest loads take."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _launch(x: Tensor, packed: Packed, kernel: Callable[..., None]) -> Tensor:
    indices, table, bias, _, tile = packed
    rows, columns = indices.shape[0], x.shape[-1]
    flat, out = _aligned(x), x.new_empty(*x.shape[:-1], rows)
    tensors = [flat, _aligned(indices), _aligned(table), flat if bias is None else bias.contiguous(), out]
    numbers = [rows, columns, x.numel() // columns, tile[0] if tile else 1]
    kernel(grid=(-(-rows // ROWS), 1, 1), block=(32 * WARPS, 1, 1), args=[*tensors, *numbers])
    return out
