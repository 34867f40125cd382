"""`squeezellm`: the packed layers of SqueezeLLM (SqueezeAILab/SqueezeLLM at a5fd71f), without its sparse part.

A linear P of shape (out, in) stores

    P.qweight       int32 (in / 32 * bits, out): column o is row o of the matrix, as one little-endian bit stream of 32-bit
                    words, index i in bits i * bits and up; at 3 bits two of 32 indices cross the border of two words
    P.lookup_table  float32 (out, 2**bits): a table for each row
    P.bias          float32 (out), if there is one

and everything else stays a plain tensor. A row of our packed indices is the same bit stream in bytes (docs/format.md), so
it is viewed as words and transposed. Tables that rows share are repeated.

The project's reader is a CUDA kernel and its packing is a loop over words (`squeezellm/quant.py`); `read` follows that
loop: which word and bits an index is in, not how bytes were viewed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.export.formats.folder import read_model, read_tensors, write_config, write_tensors
from edkm_cli.export.formats.options import Options, rounded
from edkm_cli.export.formats.rows import require_fit, row_tables
from edkm_cli.export.source import Compressed
from edkm_cli.progress import Track, no_progress

_WORD_BITS = 32
_KERNEL_WIDTH = 128  # columns and rows that one block of the project's kernels takes


def check(source: Compressed, options: Options) -> None:
    """3 or 4 bits, tables of rows, columns in whole words."""
    require_fit("squeezellm", source)


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    """What export.json says."""
    narrow = sorted({tensor.shape for tensor in source.linears if any(side % _KERNEL_WIDTH for side in tensor.shape)})
    notes = [
        "SqueezeLLM's llama.py reads a file of torch.save: torch.save(safetensors.torch.load_file(FILE), 'model.pt')"
    ]
    if narrow:
        shapes = ", ".join(f"{rows} x {columns}" for rows, columns in narrow)
        notes.append(
            f"SqueezeLLM's CUDA kernels take {_KERNEL_WIDTH} rows and columns at once and check no borders; they would read "
            f"beyond these matrices: {shapes}"
        )
    return {"dtype": str(options.torch_dtype("float32")).removeprefix("torch."), "notes": notes}


def needed_bytes(source: Compressed, options: Options) -> int:
    """Disk that the export takes, about."""
    return sum(_bytes(dtype, shape) for dtype, shape in _announced(source, options).values())


def write(source: Compressed, folder: Path, options: Options, track: Track = no_progress) -> None:
    """Write the model, one tensor after another."""
    dtype, bits = options.torch_dtype("float32"), source.spec.bits

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for tensor in track(source.tensors.values(), "writing squeezellm", len(source.tensors)):
            if tensor.linear:
                stream = source.stored(f"{tensor.module}.indices")  # (out, in * bits / 8) bytes
                yield f"{tensor.module}.qweight", stream.view(torch.int32).t().contiguous()
                yield f"{tensor.module}.lookup_table", row_tables(source, tensor)
            elif _is_bias(source, tensor.name):
                yield tensor.name, source.dense(tensor.name)
            else:
                yield tensor.name, rounded(source.dense(tensor.name), dtype, tensor.name)

    write_tensors(folder, _announced(source, options), tensors())
    write_config(source.directory, folder, {"dtype": "float16"})
    (folder / "quant_config.json").write_text(json.dumps({"wbits": bits}, indent=4) + "\n", encoding="utf-8")


def read(folder: Path, options: Options) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, by the project's rules for words."""
    bits = json.loads((folder / "quant_config.json").read_text(encoding="utf-8"))["wbits"]
    files = read_tensors(folder)
    for name, file in files.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "qweight":
            table = files[f"{path}.lookup_table"].get_tensor(f"{path}.lookup_table")
            indices = _indices_of_words(file.get_tensor(name), bits)
            yield f"{path}.weight", table.gather(1, indices)
        elif leaf != "lookup_table":
            yield name, file.get_tensor(name).float()


def _indices_of_words(words: Tensor, bits: int) -> Tensor:
    """(out, in) int64 from (in / 32 * bits, out) int32: bit by bit, as a number's bits follow each other over words."""
    unsigned = words.long() & 0xFFFFFFFF
    columns = words.shape[0] * _WORD_BITS // bits
    indices = torch.zeros(words.shape[1], columns, dtype=torch.int64)
    for bit in range(bits):
        place = torch.arange(columns) * bits + bit
        indices |= ((unsigned[place // _WORD_BITS].t() >> (place % _WORD_BITS)) & 1) << bit
    return indices


def stated(source: Compressed, name: str, options: Options) -> tuple[Tensor, Tensor]:
    """Tables and biases are float32; the rest has the dtype of the options."""
    exact = source.dense(name)
    kept = source.tensors[name].linear or _is_bias(source, name)
    return exact if kept else exact.to(options.torch_dtype("float32")).float(), exact


def load(folder: Path, source: Compressed, options: Options) -> Any:
    """The dense model with the weights that `read` gives."""
    return read_model(folder, read(folder, options), trust_remote_code=options.trust_remote_code)


def _is_bias(source: Compressed, name: str) -> bool:
    """Whether a tensor is the bias of a linear with tables."""
    path, _, leaf = name.rpartition(".")
    weight = source.tensors.get(f"{path}.weight")
    return leaf == "bias" and weight is not None and weight.linear


def _announced(source: Compressed, options: Options) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for tensor in source.tensors.values():
        if tensor.linear:
            out, columns = tensor.shape
            words = columns // _WORD_BITS * source.spec.bits
            found[f"{tensor.module}.qweight"] = (torch.int32, (words, out))
            found[f"{tensor.module}.lookup_table"] = (torch.float32, (out, 2**source.spec.bits))
        else:
            dtype = torch.float32 if _is_bias(source, tensor.name) else options.torch_dtype("float32")
            found[tensor.name] = (dtype, tensor.shape)
    return found


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return dtype.itemsize * torch.Size(shape).numel()
