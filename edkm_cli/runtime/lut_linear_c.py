"""lut_linear.c as Python functions: packed matrices times activations, and their rows decoded.

A call must cost microseconds: a small model makes a hundred of them for a token. So all that the kernel needs to know of
matrices is one block of bytes, made once, calls go through a small extension module where Python's headers are (calls.c),
and threads are those that PyTorch's OpenMP runtime keeps ready (threads.h), as many as `torch.set_num_threads` says. Results
do not depend on how many. tensors.c gives the operator edkm::merged_linear, without Python between a graph and the kernel.
"""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from edkm_cli.kernels import build
from edkm_cli.kernels.layout_c import DTYPES
from edkm_cli.packing import Packed, check

_TABLE_DTYPES = {**DTYPES, torch.float8_e4m3fn: 3}
_HEAD, _PART = struct.Struct("4q"), struct.Struct("3Q5q")  # structs Packed and Part of packed.h
_MOST_PARTS = 8


@functools.cache
def library() -> Any:
    """The compiled kernels of this folder; None where they cannot be had."""
    if (compiled := build.library(Path(__file__).parent)) is not None:
        number, address, block = ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p
        compiled.edkm_lut_linear.argtypes = (block, address, number, number, number, block, number)
        compiled.edkm_packed_rows.argtypes = (block, address, *(number,) * 5, address)
        compiled.edkm_sum_by_code.argtypes = (block, address, number, number, address)
        compiled.edkm_decoder_step.argtypes = (block, address, number, address)
        compiled.edkm_attend.argtypes = (block, address, number, address, address)
        compiled.edkm_merged_keep.argtypes = (block,)
        compiled.edkm_merged_forget.argtypes = (ctypes.c_uint64,)
    return compiled


@functools.cache
def level() -> int:
    """What the compiled kernels can do: 0 plain or NEON; 1 AVX2 or AVX-512; 2 AVX-512 BF16."""
    return 0 if library() is None else int(library().edkm_lut_linear_level())


def supports(packed: Packed) -> bool:
    """Whether the kernel is there and takes this matrix: on the host, contiguous, of its dtypes, one scale a row at most."""
    indices, table, bias = packed[:3]
    plain = indices.device.type == "cpu" and indices.is_contiguous() and table.is_contiguous() and not packed.grouped
    known = table.dtype in _TABLE_DTYPES and (bias is None or (bias.dtype in DTYPES and bias.is_contiguous()))
    return plain and known and library() is not None


def _part(packed: Packed, columns: int) -> bytes:
    indices, table, bias, _, tile = packed
    addresses = (0 if tensor is None else tensor.data_ptr() for tensor in (indices, table, bias))
    kinds = _TABLE_DTYPES[table.dtype], 0 if bias is None else DTYPES[bias.dtype]
    return _PART.pack(*addresses, indices.shape[0], *(tile or (1, columns)), *kinds)


class Prepared(NamedTuple):
    """Matrices as the kernel reads them. It points into their memory: whoever keeps it keeps them."""

    block: bytes
    columns: int
    rows: tuple[int, ...]
    matrices: tuple[Packed, ...]


def prepare(matrices: Sequence[Packed], columns: int) -> Prepared:
    """Matrices of equal columns, bits and kind, each of which `supports` and `check` have seen."""
    first = matrices[0]
    head = _HEAD.pack(columns, first.bits, first.tile is None, len(matrices))
    block = head + b"".join(_part(packed, columns) for packed in matrices)
    return Prepared(block, columns, tuple(packed.indices.shape[0] for packed in matrices), tuple(matrices))


def linears(x: Tensor, prepared: Prepared) -> list[Tensor]:
    """x @ W.T + bias for each matrix, in one call; x (..., in) float32, bfloat16 or float16 in host memory."""
    columns = prepared.columns
    flat = x if x.dim() == 2 else x.reshape(-1, columns)
    if not flat.is_contiguous() and flat.stride(-1) != 1:
        flat = flat.contiguous()
    lead, tokens = x.shape[:-1], flat.shape[0]
    outs = [x.new_empty((*lead, rows)) for rows in prepared.rows]
    addresses = struct.pack(f"{len(outs)}Q", *[out.data_ptr() for out in outs])
    multiply = library().edkm_lut_linear
    if multiply(prepared.block, flat.data_ptr(), DTYPES[x.dtype], flat.stride(0), tokens, addresses, 0):
        raise MemoryError(f"a product of {tokens} x {columns} activations with a packed matrix")
    return outs


Products = Callable[[Tensor], list[Tensor] | None]
ORDER = (torch.float32, torch.bfloat16, torch.float16)  # by their numbers in DTYPES
_DISPATCH_DEPTH = getattr(torch._C, "_len_torch_dispatch_stack", None)


# PyTorch's functions for extensions in C, in the order of tensors.c and of calls.c; C++ extensions link those with a _Z.
_TENSORS = "get_dim get_sizes get_dtype get_device_type is_contiguous empty_strided get_data_ptr delete_tensor_object"
_OF_TENSORS = tuple(f"aoti_torch_{name}" for name in _TENSORS.split())
_OF_OPERATORS = (
    *("aoti_torch_get_numel", "aoti_torch_library_init_impl", "aoti_torch_library_impl", "aoti_torch_call_dispatcher"),
    *("torch_delete_stable_ivalue", "torch_delete_list", "torch_exception_get_what_without_backtrace"),
    "_ZSt21__throw_runtime_errorPKc",  # of the C++ runtime: what is raised in C is a RuntimeError in Python
)
_OF_CALLS = (*_OF_TENSORS[-2:], "aoti_torch_grad_mode_is_enabled", "_Z16THPVariable_WrapRKN2at10TensorBaseE")


def _addresses(names: Sequence[str]) -> list[int]:
    """Of PyTorch's functions. Raises AttributeError or OSError where this PyTorch has not all of them."""
    loaded = ctypes.CDLL(torch._C.__file__)  # in the process already; its symbols and those of what it needs
    return [ctypes.cast(loaded[name], ctypes.c_void_p).value or 0 for name in names]


def _tell_torch(names: Sequence[str]) -> None:
    """Give tensors.c PyTorch's functions `names`, and its numbers of the dtypes `ORDER` and of host memory."""
    functions, loaded = _addresses(names), ctypes.CDLL(torch._C.__file__)
    numbers = [loaded[f"aoti_torch_dtype_{str(dtype)[6:]}"]() for dtype in ORDER]
    known = (ctypes.c_int32 * 4)(*numbers, loaded.aoti_torch_device_type_cpu())
    library().edkm_torch((ctypes.c_uint64 * len(names))(*functions), len(names), known)


@functools.cache
def _calls() -> ModuleType | None:
    module, tensor, word = build.calls(Path(__file__).parent), torch.empty(0), ctypes.c_void_p
    places = range(object.__basicsize__, Tensor.__basicsize__, 8)
    if module is None:
        return None
    try:
        _tell_torch(_OF_TENSORS)
        offset = next(at for at in places if word.from_address(id(tensor) + at).value == tensor._cdata)
        product = ctypes.cast(library().edkm_product, word).value
        module.setup(Tensor, _DISPATCH_DEPTH, offset, product, *_addresses(_OF_CALLS))
    except (OSError, AttributeError, StopIteration):
        return None
    return module


def recorded() -> bool:
    """Whether torch.compile or torch.jit.trace records operations: what does not go by PyTorch's dispatcher would be a
    constant. Raises NotImplementedError where forward-mode derivatives are asked for, which would be left out."""
    if torch.autograd.forward_ad._current_level >= 0:
        raise NotImplementedError("packed weights have no forward-mode derivatives; dequantize the model")
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def unwatched(x: Tensor, *others: Tensor | None) -> bool:
    """No gradient, nothing recorded: then the dispatcher, which costs more than a small product, is left out."""
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # by torch.func
    if type(x) is not Tensor or x.is_meta or transformed or recorded() or (_DISPATCH_DEPTH and _DISPATCH_DEPTH()):
        return False
    return not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (x, *others))


def products(prepared: Prepared, most_tokens: dict[torch.dtype, int]) -> Products | None:
    """A function of x that gives its product with each matrix, or None where another path is to be taken.

    It gives None where x is no plain contiguous tensor in host memory, has more tokens than `most_tokens` of its dtype, or
    somebody watches (`unwatched`), and where a matrix has moved since. Without the extension module there is no function.
    """
    tensors = tuple(t for packed in prepared.matrices for t in packed[:3] if t is not None)
    module, most = _calls(), tuple(most_tokens[dtype] * prepared.columns for dtype in ORDER)
    if module is None or len(prepared.rows) > _MOST_PARTS:
        return None
    return module.products(prepared.block, tensors, most)


def _decode(
    packed: Packed, columns: int, ids: Any, first: int, count: int, span: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    kept = dtype if dtype in DTYPES else torch.float32
    out = torch.empty(count, span[1] - span[0], dtype=kept, device="cpu")
    block = prepare((packed,), columns).block
    if library().edkm_packed_rows(block, ids, first, count, *span, DTYPES[kept], out.data_ptr()):
        raise IndexError(f"a row number is outside the matrix, which has {packed.indices.shape[0]} rows")
    return out.to(dtype)


def rows(packed: Packed, columns: int, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of W that ids (n,) int64 names, (n, columns) in `dtype`. Raises IndexError for one that is not there."""
    ids = ids.contiguous()
    return _decode(packed, columns, ids.data_ptr(), 0, ids.numel(), (0, columns), dtype)


def dense(packed: Packed, columns: int, dtype: torch.dtype, *, row_range: range, column_range: range) -> Tensor:
    """A part of W in `dtype`; the first column is a multiple of 16."""
    span = (column_range.start, column_range.stop)
    return _decode(packed, columns, None, row_range.start, len(row_range), span, dtype)


def sum_by_code(values: Tensor, packed: Packed, columns: int, first: int) -> Tensor:
    """`lut_linear_torch.sum_by_code` for float32 values: (rows, tiles of a row, 2**bits) float32."""
    tile = packed.tile or (1, columns)
    values = values.contiguous()
    sums = values.new_empty(values.shape[0], columns // tile[1], 2**packed.bits)
    block = prepare((packed,), columns).block
    library().edkm_sum_by_code(block, values.data_ptr(), first, values.shape[0], sums.data_ptr())
    return sums


_MERGED = struct.Struct("2Q8q")  # struct Merged of tensors.c, up to its parts


@functools.cache
def register(name: str, otherwise: str) -> bool:
    """Make tensors.c the operator `name` of edkm on a CPU; what it does not take it gives to the operator `otherwise`.
    False where there is no compiler, or this PyTorch has not what it needs."""
    if library() is None:
        return False
    try:
        _tell_torch((*_OF_TENSORS, *_OF_OPERATORS))
    except (OSError, AttributeError):
        return False
    return not library().edkm_merged_register(name.encode(), otherwise.encode())


def keep(matrices: Sequence[Packed], columns: int, most_tokens: dict[torch.dtype, int]) -> int | None:
    """Prepare matrices one below the other, whose indices and tables lie one behind the other in memory, for the operator.

    Returns what `forget` takes; None where there are too many. Whoever keeps them calls `forget` in time.
    """
    if len(matrices) > _MOST_PARTS:
        return None
    for matrix in matrices:
        check(columns, matrix)
    most = [most_tokens[dtype] * columns for dtype in ORDER]
    first, rows = matrices[0], sum(m.indices.shape[0] for m in matrices)
    sizes = sum(m.indices.numel() for m in matrices), sum(m.table.numel() for m in matrices)
    head = _MERGED.pack(first.indices.data_ptr(), first.table.data_ptr(), *sizes, columns, rows, len(matrices), *most)
    blocks = b"".join(prepare((matrix,), columns).block for matrix in matrices)
    room = blocks.ljust(len(blocks) // len(matrices) * _MOST_PARTS, b"\0")
    return None if library().edkm_merged_keep(head + room) else first.indices.data_ptr()


def forget(key: int) -> bool:
    """Hold nothing more of what `keep` prepared; whether there was something."""
    return bool(library().edkm_merged_forget(key))
