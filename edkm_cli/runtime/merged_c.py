"""merged.c as Python functions: the operator edkm::merged_linear without Python between a graph and the kernel."""

import ctypes
import functools
import struct
from collections.abc import Sequence

from edkm_cli.runtime import dispatch, lut_linear_c
from edkm_cli.runtime.lut_linear_c import library
from edkm_cli.runtime.packed import Packed, check

_MOST_PARTS = 8
_MERGED = struct.Struct("2Q8q")  # struct Merged of merged.c, up to its parts
_TENSORS = "get_dim get_numel get_sizes get_dtype get_device_type is_contiguous get_data_ptr empty_strided"
_OF_TORCH = (
    *(f"aoti_torch_{name}" for name in ("library_init_impl", "library_impl", "call_dispatcher", *_TENSORS.split())),
    *("aoti_torch_delete_tensor_object", "torch_delete_stable_ivalue", "torch_delete_list"),
    "torch_exception_get_what_without_backtrace",
    "_ZSt21__throw_runtime_errorPKc",  # of the C++ runtime: what is raised in C is a RuntimeError in Python
)


@functools.cache
def register(name: str, otherwise: str) -> bool:
    """Make merged.c the operator `name` of edkm on a CPU; it calls `otherwise` (with its namespace) where it is not the way.
    False where there is no compiler, or this PyTorch has not what it needs."""
    compiled, found = library(), lut_linear_c.of_torch(_OF_TORCH)
    if compiled is None or found is None:
        return False
    addresses, numbers = found[0], (*found[1], found[2])
    functions, known = (ctypes.c_uint64 * len(addresses))(*addresses), (ctypes.c_int32 * len(numbers))(*numbers)
    return not compiled.edkm_merged_register(functions, known, name.encode(), otherwise.encode())


def keep(matrices: Sequence[Packed], columns: int) -> int | None:
    """Prepare matrices one below the other, whose indices and tables lie one behind the other in memory, for the operator.

    Returns what `forget` takes; None where the kernel does not take them all. Whoever keeps them calls `forget` in time.
    """
    if library() is None or dispatch.forced_path() not in ("auto", "kernel") or len(matrices) > _MOST_PARTS:
        return None
    if not all(m.indices.shape[0] and lut_linear_c.supports(m) for m in matrices):
        return None
    for matrix in matrices:
        check(columns, matrix)
    most = [dispatch.most_tokens(dtype) * columns for dtype in lut_linear_c.ORDER]
    first, rows = matrices[0], sum(m.indices.shape[0] for m in matrices)
    sizes = sum(m.indices.numel() for m in matrices), sum(m.table.numel() for m in matrices)
    addresses = first.indices.data_ptr(), first.table.data_ptr()
    head = _MERGED.pack(*addresses, *sizes, columns, rows, len(matrices), *most)
    blocks = b"".join(lut_linear_c.prepare((matrix,), columns).block for matrix in matrices)
    room = blocks.ljust(len(blocks) // len(matrices) * _MOST_PARTS, b"\0")
    return None if library().edkm_merged_keep(head + room) else first.indices.data_ptr()


def forget(key: int) -> None:
    """Hold nothing more of what `keep` prepared."""
    library().edkm_merged_forget(key)


def kept() -> int:
    """How many are prepared."""
    return 0 if library() is None else int(library().edkm_merged_count())
