"""lut_linear.cu on a GPU: 1 to 32 rows of 16-bit activations times a packed matrix of 2 to 8 bits.

Compiled at first use for the GPU at hand by NVRTC, which PyTorch brings along, and launched as PyTorch's own
`torch.cuda._compile_kernel` would: that one asks for an installed CUDA toolkit, whose headers this kernel does not need.
Where compiling or launching fails, one warning says why, and matrices are decoded for cuBLAS.
"""

import ctypes
import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.packing import Packed, packed_width
from edkm_cli.runtime.lut_linear_c import unwatched

_LOG = logging.getLogger(__name__)
_NO_BIAS = -1
ROWS = 16  # of W that a block takes
TOKENS = 32  # at most; a product takes eight at a time
WARPS = 8
_LEAST_CAPABILITY = (8, 0)  # bfloat16 products
Kernel = Callable[..., None]  # of a number of blocks and the kernel's parameters: addresses and numbers


def takes(x: Tensor, packed: Packed) -> bool:
    """Whether the kernel was written for these dtypes and shapes, wherever they are; tables span rows, or scale them."""
    columns, bias = x.shape[-1], packed.bias
    known = x.dtype in (torch.bfloat16, torch.float16) and (bias is None or bias.dtype in DTYPES)
    fits = 0 < x.numel() <= TOKENS * columns and columns % 32 == 0 and packed.indices.shape[0] * columns < 1 << 40
    spans = packed.tile is None or packed_width(packed.tile[1], packed.bits) == packed.indices.shape[1]
    written = 2 <= packed.bits <= 8 and spans and not packed.grouped and packed.table.dtype in DTYPES
    return known and fits and written and packed.indices.shape[1] == packed_width(columns, packed.bits)


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
        failed = call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        if failed or call(f"nvrtcGet{what}", program, buffer):
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
_FAILURES = (RuntimeError, OSError, AttributeError, ImportError, KeyError, TypeError)


def _give_up(error: Exception) -> None:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        raise error
    if not _broken:
        _broken.append(str(error))
        _LOG.warning("the CUDA kernel of packed linears is not available, matrices are decoded (slower): %s", error)


@functools.cache
def _kernel(device: int, given: tuple[tuple[str, int], ...]) -> Kernel:
    """The compiled kernel on a GPU. Raises whatever compiling or loading raises."""
    from torch.cuda import _utils

    find = getattr(_utils, "_get_gpu_rtc_library", None) or _utils._get_nvrtc_library  # as PyTorch finds NVRTC
    driver = (getattr(_utils, "_get_gpu_runtime_library", None) or _utils._get_cuda_library)()
    major, minor = torch.cuda.get_device_capability(device)
    code, _ = compiled(source(dict(given)), f"sm_{major}{minor}", find())
    module: Any = _utils._cuda_load_module(code, ["lut_linear"])
    function, threads = module["lut_linear"], 32 * dict(given)["WARPS"]

    def launch(blocks: int, *values: int) -> None:
        numbers = (ctypes.c_uint64 * len(values))(*values)  # of which the driver reads as much as a parameter has
        first = ctypes.addressof(numbers)
        places = (ctypes.c_void_p * len(values))(*range(first, first + ctypes.sizeof(numbers), 8))
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device))
        _utils._check_cuda(driver.cuLaunchKernel(function.func, blocks, 1, 1, threads, 1, 1, 0, stream, places, None))

    return launch


def _kernel_of(x: Tensor, packed: Packed) -> Kernel:
    return _kernel(x.get_device(), tuple(settings(x, packed).items()))


def supports(x: Tensor, packed: Packed) -> bool:
    """Whether this product goes by the kernel."""
    here = not _broken and x.is_cuda and packed.indices.device == x.device and torch.version.hip is None
    return here and takes(x, packed) and torch.cuda.get_device_capability(x.device) >= _LEAST_CAPABILITY


def linear(x: Tensor, packed: Packed) -> Tensor | None:
    """x @ W.T + bias with table entries rounded to x's dtype and float32 sums; None where the kernel fails."""
    try:
        with torch.cuda.device(x.device):
            return _launch(x, packed, _kernel_of(x, packed))
    except _FAILURES as error:
        _give_up(error)
        return None


def products(matrices: Sequence[Packed], columns: int) -> Callable[[Tensor], list[Tensor] | None]:
    """A function of x that gives its product with each matrix, or None where another path is to be taken: its kernels are
    found once, and the dispatcher, which takes longer than a product of one token, is left out."""
    kernels: dict[tuple[torch.dtype, int], list[Kernel]] = {}
    trained = [tensor for packed in matrices for tensor in packed[1:3]]

    def product(x: Tensor) -> list[Tensor] | None:
        tokens = x.numel() // columns
        if tokens > TOKENS or x.shape[-1:] != (columns,) or not unwatched(x, *trained):
            return None
        if x.get_device() != torch.cuda.current_device():
            return None
        try:
            if (x.dtype, tokens) not in kernels:
                if not all(supports(x, packed) for packed in matrices):
                    return None
                kernels[x.dtype, tokens] = [_kernel_of(x, packed) for packed in matrices]
            found = kernels[x.dtype, tokens]
            return [_launch(x, packed, kernel) for packed, kernel in zip(matrices, found, strict=True)]
        except _FAILURES as error:
            _give_up(error)
            kernels.clear()
            return None

    return product


def _aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at an address that the widest loads take."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _launch(x: Tensor, packed: Packed, kernel: Kernel) -> Tensor:
    indices, table, bias, _, tile = packed
    rows, columns = indices.shape[0], x.shape[-1]
    x, out = _aligned(x), x.new_empty(*x.shape[:-1], rows)
    indices, table, bias = _aligned(indices), _aligned(table), bias if bias is None else bias.contiguous()
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (x, indices, table, bias, out))
    kernel(-(-rows // ROWS), *addresses, rows, columns, x.numel() // columns, tile[0] if tile else 1)
    return out
