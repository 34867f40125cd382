"""What a file of llama.cpp holds, from its header: the sizes of a row `gguf:FILE`."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError

_DECODER = re.compile(r"blk\.\d+\..*weight")


def file_facts(path: str | Path) -> dict[str, Any]:
    """`bits`, `granularity` (the commonest tensor type), `decoder_bits_per_weight`, `weights_bytes` and a `note`.

    A type's blocks hold their scales, so bits per weight are the bytes of the decoder's matrices by their weights.
    Raises UserError for a file that is no GGUF.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(Path(path))
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise UserError(f"gguf:FILE must name a file of llama.cpp, but {path} cannot be read ({error})") from error
    matrices = [one for one in reader.tensors if len(one.shape) > 1 and _DECODER.fullmatch(one.name)]
    if not matrices:
        raise UserError(f"gguf:FILE must hold a language model, but {path} has no matrices blk.N.*")
    weights: Counter[str] = Counter()
    for one in matrices:
        weights[one.tensor_type.name] += int(one.n_elements)
    common = weights.most_common(1)[0][0]
    bits = re.search(r"Q(\d)", common)
    bits_per_weight = 8 * sum(int(one.n_bytes) for one in matrices) / sum(weights.values())
    mixed = ", ".join(f"{count / sum(weights.values()):.0%} {kind}" for kind, count in weights.most_common())
    others = sorted(
        {one.tensor_type.name for one in reader.tensors if one.name in ("token_embd.weight", "output.weight")}
    )
    note = f"decoder {mixed}; embeddings {', '.join(others)}; decoded to bfloat16"
    matrix = reader.fields.get("quantize.imatrix.dataset")
    return {
        "bits": int(bits[1]) if bits else round(bits_per_weight),
        "granularity": common,
        "decoder_bits_per_weight": bits_per_weight,
        "weights_bytes": sum(int(one.n_bytes) for one in reader.tensors),
        "note": note + (f"; importance matrix from {matrix.contents()}" if matrix is not None else ""),
    }
