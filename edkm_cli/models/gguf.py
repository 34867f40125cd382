"""What transformers does not read of a GGUF file, or reads otherwise than it was meant, in silence."""

import mmap
import os
import re
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from edkm_cli import model_files
from edkm_cli.config import head_size
from edkm_cli.errors import UserError, named

# Ways to split text that are GPT-2's, or differ in spaces before digits only; of a file that names none, its family.
_AS_GPT2 = ("gpt-2", "gpt2", "smollm", "starcoder", "starcoder2", "refact", "command-r", "codeshell", "exaone", "olmo",
            "jais", "mpt", "phi-2", "gptneox", "mellum", "a.x-4.0", "gigachat")  # fmt: skip
_REMEDY = "give the directory with its safetensors files"
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of a number, by its kind
_TEXT, _LIST = 8, 9


def require_whole(name: str, path: Path) -> None:
    """Raises UserError for a file whose fields do not lie within it, before `gguf`, which counts on where a file ends, reads
    any of it: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, "File Structure"."""

    def number(at: int, kind: str = "<Q") -> int:
        return int(struct.unpack_from(kind, data, at)[0])

    def behind(at: int, kind: int, count: int) -> int:
        """Where so many values of a kind that begin at a byte end."""
        if kind not in (_TEXT, _LIST):
            return at + count * _BYTES[kind]
        for _ in range(count):  # each takes bytes, and reading behind the last one raises
            at = at + 8 + number(at) if kind == _TEXT else behind(at + 12, number(at, "<I"), number(at + 4))
        return at

    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF" or not 0 < number(4, "<I") & 0xFFFF < 100:  # else of the other order of bytes
                return
            at = 24
            for _ in range(number(16)):
                at = behind(at, _TEXT, 1)
                at = behind(at + 4, number(at, "<I"), 1)
            for _ in range(number(8)):  # tensors: name, sizes, kind, place
                at = behind(at, _TEXT, 1)
                at = behind(at + 4, 10, number(at, "<I")) + 12
            if at > len(data):
                raise ValueError("it ends before its fields do")
    except (struct.error, ValueError, KeyError, OverflowError, RecursionError) as error:
        found = f"{path} is damaged ({named(error)})"
        raise UserError(f"--model {name} could not be read: {found}; fetch it again") from error


def require_few_layers(path: str) -> None:
    """Raises UserError for a number of layers that no model has: a configuration may list them."""
    layers = [value for key, value in _said(path)[0].items() if key.endswith(".block_count")]
    model_files.check_numbers(Path(path), {"num_hidden_layers": layers})


def _said(path: str) -> tuple[dict[str, Any], list[Any]]:
    """What a file says of the model, and its tensors. Its vocabulary takes seconds to read, and is let go."""
    return _read(path, os.stat(path).st_size, os.stat(path).st_mtime_ns)


@lru_cache(1)
def _read(path: str, *_state: int) -> tuple[dict[str, Any], list[Any]]:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    kept = (key for key in reader.fields if not key.startswith("tokenizer.") or key.endswith(".pre"))
    return {key: reader.fields[key].contents() for key in kept}, reader.tensors


def take_rest(name: str, path: str, config: Any) -> None:
    """Give the configuration of model `name` what transformers does not read: positions scaled linearly or as LLaMA 3's.

    Raises UserError for positions that are scaled in another way and for biases, which it does not read either, for a file
    that is one of several, and for numbers that no model has."""
    fields, tensors = _said(path)
    said = {key.split(".")[-1]: value for key, value in fields.items() if ".rope." in key}
    factors = [torch.tensor(tensor.data) for tensor in tensors if tensor.name == "rope_freqs.weight"]
    biases = [t.name for t in tensors if re.search(r"(attn_(q|k|v|output)|ffn_(gate|up|down))\.bias$", t.name)]
    model_files.check_numbers(Path(path), config.to_dict())
    if (parts := fields.get("split.count", 1)) > 1:
        raise UserError(f"--model {name} must be one file, but is one of {parts}; join them: llama-gguf-split --merge")
    unread = f"which are not read from GGUF files; {_REMEDY}"
    if biases and getattr(config, "attention_bias", None) is False:
        raise UserError(f"--model {name} must have no biases, but has {biases[0]} and others, {unread}")
    if (rope := getattr(config, "rope_parameters", None)) is None:
        return
    inner = rope.get("full_attention", rope)
    if inner.get("rope_type", "default") != "default":  # which transformers has read
        return
    inner = {**inner, "rope_theta": said.get("freq_base", inner.get("rope_theta"))}
    factor = said.get("factor", said.get("scale_linear", 1.0))
    kind = said.get("type", "none" if factor == 1.0 else "linear")  # as llama.cpp understands it
    turned = int(head_size(config) * inner.get("partial_rotary_factor", 1.0))
    right = kind in ("none", "linear") and not any(tensor.name.startswith("rope_factors_") for tensor in tensors)
    right = right and ("full_attention" in rope or said.get("dimension_count", turned) == turned)
    if right and factors:
        of_llama3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        inner = {**inner, "rope_type": "llama3", "factor": float(factors[0].max()), **of_llama3}
        right = torch.allclose(factors[0], model_files.llama3_factors(inner, 2 * len(factors[0])), rtol=1e-3)
    elif right and kind == "linear":
        inner = {**inner, "rope_type": "linear", "factor": factor}
    if not right:
        rule = f"--model {name} must have plain positions, or scaled linearly or as LLaMA 3's 8192, not others"
        raise UserError(f"{rule}, {unread}")
    config.rope_parameters = {**rope, "full_attention": inner} if "full_attention" in rope else inner


def require_all_taken(name: str, path: str, model: Any) -> None:
    """Raises UserError where a file holds more numbers than the model that was made of it: transformers passes over
    tensors that it has no place for."""
    left_out = ("rope_freqs.weight", *["output.weight"] * model.config.tie_word_embeddings)
    behind = f"blk.{model.config.get_text_config(decoder=True).num_hidden_layers}."  # what predicts further tokens
    tensors = (one for one in _said(path)[1] if one.name not in left_out and not one.name.startswith(behind))
    if sum(int(one.n_elements) for one in tensors) > sum(t.numel() for t in (*model.parameters(), *model.buffers())):
        rule = f"--model {name} holds tensors that transformers' {type(model).__name__} has no place for"
        raise UserError(f"{rule}; {_REMEDY}")


def require_known_split(name: str, path: str, tokenizer: Any) -> None:
    """Raises UserError where a file names a way to split text that transformers does not know: it takes GPT-2's then."""
    fields, backend = _said(path)[0], getattr(tokenizer, "backend_tokenizer", None)
    split = fields.get("tokenizer.ggml.pre", fields.get("general.architecture"))
    if backend is not None and type(backend.pre_tokenizer).__name__ == "ByteLevel" and split not in _AS_GPT2:
        rule = f"--model {name} splits text as {split!r}, which is not known of GGUF files"
        raise UserError(f"{rule}; {_REMEDY} and tokenizer.json")
