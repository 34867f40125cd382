"""A Core ML program read back from disk and computed in float32: what stands in for Apple hardware in the gate.

It knows the operations that `coreml_graph` writes, by their definition in MIL, and nothing of how that file combines them.
Sums are in float32 where a device has float16, so that what differs from the source is the program and not rounding. A
result that float16 could not hold is refused.
"""

from collections.abc import Callable
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from edkm_cli.errors import UserError

_LARGEST = 65504.0


class Program(nn.Module):
    """A program as a causal LM: called with `input_ids` (1, tokens), it gives `logits`. With a cache, states start empty
    and `position` tokens came before."""

    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, function: Any, length: int):
        super().__init__()
        self._length, self._outputs = length, function.outputs
        self.config = PretrainedConfig(vocab_size=int(function.outputs[0].shape[-1]))
        self.register_buffer("place", torch.empty(0))  # where it computes: its constants are no state
        self._operations: list[Any] = []  # that compute
        self.states: dict[str, Tensor] = {}
        self._constants: dict[str, Any] = {}
        for operation in function.operations:
            kind, name = operation.op_type, operation.outputs[0].name
            if kind == "const":
                self._constants[name] = _as_tensor(operation.val.val)
            elif kind in _KINDS or kind in ("read_state", "coreml_update_state"):
                self._operations.append(operation)
            else:
                self._constants[name] = dense_of(operation)

    def get_input_embeddings(self) -> None:
        """It has none of its own: the program is one part."""

    @torch.no_grad()
    def forward(self, input_ids: Tensor, *, position: int = 0, **_: Any) -> Any:
        if position + input_ids.shape[1] > self._length:
            raise UserError(f"the program takes at most {self._length} tokens, got {position + input_ids.shape[1]}")
        values = {**self._constants, "input_ids": input_ids, "position": torch.tensor([position])}
        for operation in self._operations:
            for variable, result in zip(operation.outputs, self._result(operation, values), strict=True):
                _require_range(variable, result)
                values[variable.name] = result
        return SimpleNamespace(logits=values[self._outputs[0].name])

    def _result(self, operation: Any, values: dict[str, Any]) -> tuple[Any, ...]:
        if operation.op_type == "read_state":
            if (name := operation.inputs["input"].name) not in self.states:
                self.states[name] = torch.zeros(tuple(int(side) for side in operation.outputs[0].shape))
            return (self.states[name],)
        if operation.op_type == "coreml_update_state":
            self.states[operation.inputs["state"].name] = values[operation.inputs["value"].name]
            return (values[operation.inputs["value"].name],)
        given = {name: _value(variable, values) for name, variable in operation.inputs.items() if variable is not None}
        result = _KINDS[operation.op_type](**given)
        return result if isinstance(result, tuple) else (result,)


def dense_of(operation: Any) -> Tensor:
    """The float32 tensor that a constexpr operation stands for, by its definition. Raises UserError for any other kind."""
    if operation.op_type == "constexpr_lut_to_dense":
        index, table = _as_tensor(operation.indices.val), _as_tensor(operation.lut.val)  # table (.., .., entries, 1)
        row = torch.arange(index.shape[0]) // (index.shape[0] // table.shape[0])
        column = torch.arange(index.shape[1]) // (index.shape[1] // table.shape[1])
        return table[row[:, None], column[None, :], index.long(), 0]
    if operation.op_type == "constexpr_blockwise_shift_scale":
        data, scale = _as_tensor(operation.data.val), _as_tensor(operation.scale.val)  # scale (rows, groups)
        product = data.float() * scale.repeat_interleave(data.shape[1] // scale.shape[1], 1)
        return product.half().float() if operation.scale.val.dtype == np.float16 else product
    raise UserError(f"the program must consist of operations that it was written with, but holds {operation.op_type}")


def _as_tensor(value: Any) -> Any:
    """A constant: numbers with a fraction in float32, whole ones in int64; texts and flags as they are."""
    if isinstance(value, (str, bool, np.bool_)):
        return value
    array = np.asarray(value)
    return torch.from_numpy(np.array(array, dtype=np.float32 if array.dtype.kind == "f" else np.int64))


def _value(variable: Any, values: dict[str, Any]) -> Any:
    if isinstance(variable, (list, tuple)):
        return [_value(one, values) for one in variable]
    # Else it is an argument that is written in place.
    return values[variable.name] if variable.name in values else _as_tensor(variable.val)


def _require_range(variable: Any, result: Any) -> None:
    """Raises UserError where a device, which computes in float16, would get infinity."""
    from coremltools.converters.mil.mil import types

    if getattr(variable, "dtype", None) is types.fp16 and result.numel() and float(result.abs().max()) > _LARGEST:
        rule = f"activations of a Core ML program are float16, at most {_LARGEST:g}, but {variable.name} reaches"
        raise UserError(f"{rule} {float(result.abs().max()):g}; this model cannot be exported to coreml")


def _numbers(tensor: Tensor) -> tuple[int, ...]:
    return tuple(int(number) for number in tensor.reshape(-1))


def _slices(begin: Tensor, end: Tensor) -> tuple[slice, ...]:
    return tuple(map(slice, _numbers(begin), _numbers(end)))


def _slice_update(x: Tensor, update: Tensor, begin: Tensor, end: Tensor, **_: Any) -> Tensor:
    result = x.clone()
    result[_slices(begin, end)] = update
    return result


_KINDS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "less_equal": lambda x, y: x <= y,
    "rsqrt": lambda x, epsilon: (x + epsilon).rsqrt(),
    "silu": lambda x: nn.functional.silu(x),
    "softmax": lambda x, axis: x.softmax(int(axis)),
    "reduce_mean": lambda x, axes, keep_dims: x.mean(_numbers(axes), keepdim=bool(keep_dims)),
    "cast": lambda x, dtype: x.float() if dtype in ("fp16", "fp32") else x.long(),
    "shape": lambda x: torch.tensor(x.shape),
    "gather": lambda x, indices, axis, **_: x[indices],
    "range_1d": lambda end, start, step: torch.arange(int(start), int(end), int(step)),
    "concat": lambda values, axis, **_: torch.cat(values, int(axis)),
    "split": lambda x, num_splits, axis, **_: x.chunk(int(num_splits), int(axis)),
    "expand_dims": lambda x, axes: reduce(Tensor.unsqueeze, sorted(_numbers(axes)), x),
    "squeeze": lambda x, axes: x.squeeze(_numbers(axes)),
    "reshape": lambda x, shape: x.reshape(_numbers(shape)),
    "transpose": lambda x, perm: x.permute(_numbers(perm)),
    "slice_by_size": lambda x, begin, size: x[_slices(begin, begin + size)],
    "slice_by_index": lambda x, begin, end, **_: x[_slices(begin, end)],
    "slice_update": _slice_update,
    "linear": nn.functional.linear,
    "matmul": lambda x, y, transpose_x=False, transpose_y=False: (
        (x.mT if transpose_x else x) @ (y.mT if transpose_y else y)
    ),
    "identity": lambda x: x,
}
