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

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.export.formats.folder import Entry, codes_in, read_packed, row_tables
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, DenseTensor
from edkm_cli.files import write_json

_WORD_BITS = 32
_KERNEL_WIDTH = 128  # columns and rows that one block of the project's kernels takes


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    narrow = sorted({tensor.shape for tensor in source.linears if any(side % _KERNEL_WIDTH for side in tensor.shape)})
    notes = ["SqueezeLLM's llama.py wants torch.save(safetensors.torch.load_file(FILE), 'model.pt')"]
    if narrow:
        shapes = ", ".join(f"{rows} x {columns}" for rows, columns in narrow)
        rule = f"SqueezeLLM's CUDA kernels take {_KERNEL_WIDTH} rows and columns at once and check no borders"
        notes.append(f"{rule}; they would read beyond these matrices: {shapes}")
    if dense := next((name for name in source.spec.skipped if ".layers." in name), ""):
        notes.append(f"SqueezeLLM's llama.py takes all linears but lm_head for packed; {dense} would be zero there")
    return {"dtype": options.dtype_name(), "notes": notes}


def entries(source: Compressed, tensor: DenseTensor, options: Options) -> Iterator[Entry]:
    path, _, leaf = tensor.name.rpartition(".")
    weight = source.tensors.get(f"{path}.weight")
    if leaf == "bias" and weight is not None and weight.linear:
        yield Entry(tensor.name, torch.float32, tensor.shape, lambda: source.dense(tensor.name))
    if not tensor.linear:
        return
    bits, (out, columns) = source.spec.bits, tensor.shape
    words = (columns // _WORD_BITS * bits, out)
    yield Entry(f"{path}.qweight", torch.int32, words, lambda: source.words(path).t().contiguous())
    yield Entry(f"{path}.lookup_table", torch.float32, (out, 2**bits), lambda: row_tables(source, tensor))


def settings(source: Compressed, folder: Path, options: Options) -> dict[str, Any]:
    """quant_config.json, and changes of config.json."""
    write_json(folder / "quant_config.json", {"wbits": source.spec.bits})
    return {"dtype": "float16"}


def read(folder: Path, options: Options) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, by the project's rules for words."""
    bits = json.loads((folder / "quant_config.json").read_text(encoding="utf-8"))["wbits"]

    def decode(words: Tensor, table: Tensor) -> Tensor:
        return table.gather(1, codes_in(words.t(), bits, words.shape[0] * _WORD_BITS // bits))

    return read_packed(folder, "qweight", "lookup_table", decode)
