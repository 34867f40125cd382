"""What a GGUF file says of a model beside its tensors' bytes: names, the order of rows, sizes, and the tokenizer.

llama.cpp turns the halves of a head into pairs, so rows of Q and K of LLaMA and Mistral are stored with the two halves of
each head interleaved; other families keep their order. It adds nothing to Gemma's norms, so theirs are stored plus one.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import model_files, models
from edkm_cli.config import head_size
from edkm_cli.errors import UserError, explained
from edkm_cli.export.formats.options import Options
from edkm_cli.export.ownership import read_object
from edkm_cli.export.source import Compressed
from edkm_cli.files import read_json
from edkm_cli.targets import GGUF_FAMILIES, full_positions

_OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INSIDE = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_INSIDE_GEMMA = _INSIDE | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
_LAYER = re.compile(r"^(?:model\.layers|blk)\.(\d+)\.(.+)\.(weight|bias)$")
# The pattern that splits text before byte-pair encoding -> llama.cpp's name of the tokenizer.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {rf"{_WORDS}\p{{N}}{{1,3}}{_REST}": "llama-bpe", rf"{_WORDS}\p{{N}}{_REST}": "qwen2"}
_FILE_TYPES = {
    "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "IQ4_NL": 25, "MXFP4": 38,
}  # fmt: skip
_REMEDY = "give --base-gguf, a file of the same model"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)


@dataclass(frozen=True)
class Naming:
    """Names and forms of tensors in llama.cpp's `architecture`. `frequencies` are LLaMA 3's factors of rotary angles."""

    architecture: str
    heads: int
    key_heads: int
    frequencies: Tensor | None = None

    @property
    def _inside(self) -> dict[str, str]:
        return _INSIDE_GEMMA if self.architecture == "gemma3" else _INSIDE

    def name(self, name: str) -> str:
        """llama.cpp's name of a tensor. Raises UserError for one that it has none for."""
        if (match := _LAYER.match(name)) and match[2] in self._inside:
            return f"blk.{match[1]}.{self._inside[match[2]]}.{match[3]}"
        path, _, leaf = name.rpartition(".")
        if path not in _OUTSIDE:
            raise UserError(f"gguf has no name for {name} in {self.architecture}; choose another format")
        return f"{_OUTSIDE[path]}.{leaf}"

    def name_back(self, name: str) -> str:
        """transformers' name of a tensor of the file."""
        if match := _LAYER.match(name):
            back = {there: here for here, there in self._inside.items()}
            return f"model.layers.{match[1]}.{back[match[2]]}.{match[3]}"
        path, _, leaf = name.rpartition(".")
        return f"{dict(zip(_OUTSIDE.values(), _OUTSIDE, strict=True))[path]}.{leaf}"

    def order(self, name: str, rows: int) -> Tensor | slice:
        """Which row of transformers' tensor is row i of the file's; a slice of all where they are the same."""
        heads = {"q_proj": self.heads, "k_proj": self.key_heads}.get(name.split(".")[-2])
        if self.architecture != "llama" or heads is None:
            return slice(None)
        return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()

    def shift(self, name: str) -> float:
        """What is added to a tensor's numbers."""
        return 1.0 if self.architecture == "gemma3" and name.endswith("norm.weight") else 0.0


def naming_of(config: Any) -> Naming:
    """Of a model by its configuration, of a family and with rotary angles that `check_model` of targets lets pass."""
    rope = _rope(config)
    frequencies = model_files.llama3_factors(rope, head_size(config)) if rope.get("rope_type") == "llama3" else None
    return Naming(GGUF_FAMILIES[config.model_type], config.num_attention_heads, config.num_key_value_heads, frequencies)


def naming_of_file(fields: Any) -> Naming:
    """Of a file, by its metadata."""
    architecture = fields["general.architecture"].contents()
    heads = (fields[f"{architecture}.attention.head_count{kind}"].contents() for kind in ("", "_kv"))
    return Naming(architecture, *heads)


def _rope(config: Any) -> dict[str, Any]:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    return dict(rope.get("full_attention", rope))


def add_metadata(writer: Any, source: Compressed, options: Options, kind: str) -> None:
    """Everything that llama.cpp needs to know: taken over from a GGUF file, or made of configuration and tokenizer.

    Raises UserError for a file of another model, and for a tokenizer that is not known here.
    """
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(2)
    base = Path(options.base_gguf).expanduser() if options.base_gguf else _source_file(source.directory)
    _add_sizes(writer, source.config)
    if base is not None:
        _take_over(writer, base, source)
    else:
        rule = f"{source.directory / 'tokenizer.json'} is not understood"
        with explained(rule, f"; {_REMEDY}"):
            _add_tokenizer(writer, source)


def _source_file(directory: Path) -> Path | None:
    """The GGUF file that a checkpoint was made from, where it is still there."""
    name = str(read_object(directory / "report.json").get("model"))
    try:
        origin = models.resolve(name)
    except UserError:
        return None
    plain = not origin.architecture and not Path(name).is_absolute()  # another file may be there in this directory
    return origin.path if origin.gguf_file and not plain and origin.path is not None and origin.path.is_file() else None


def _take_over(writer: Any, file: Path, source: Compressed) -> None:
    from gguf import GGUFReader, GGUFValueType

    general = ("alignment", "architecture", "file_type", "name", "quantization_version")
    left_out = ("GGUF.", "split.", f"{writer.arch}.", *(f"general.{name}" for name in general))
    wanted, config = naming_of(source.config), source.config
    try:
        fields = GGUFReader(file).fields
        named, tokens = naming_of_file(fields), fields["tokenizer.ggml.tokens"].data
        sizes = named.heads, named.key_heads, fields[f"{writer.arch}.embedding_length"].contents(), len(tokens)
        if sizes != (wanted.heads, wanted.key_heads, config.hidden_size, config.vocab_size):
            raise UserError(f"--base-gguf must be a file of the same model, but {file} has other sizes; leave it out")
        for name, field in fields.items():  # tokenizer and template; sizes are the configuration's
            if not name.startswith(left_out):
                inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    except (OSError, ValueError, LookupError) as error:
        raise UserError(f"--base-gguf must be a GGUF file of {writer.arch}, but {file} is none ({error})") from error


def _add_sizes(writer: Any, config: Any) -> None:
    rope = _rope(config)
    writer.add_name(getattr(config, "_name_or_path", "").rpartition("/")[2] or config.model_type)
    writer.add_context_length(full_positions(config, by_layer=True))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_rope_dimension_count(head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    writer.add_vocab_size(config.vocab_size)
    if rope.get("rope_type") == "linear":
        from gguf import RopeScalingType

        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if config.model_type == "gemma3_text":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base_swa(float(config.rope_parameters["sliding_attention"]["rope_theta"]))


def tokenizer_fault(tokenizer: Any) -> str:
    """Why a file of the model would need `--base-gguf` for its tokenizer; "" where it would not."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        _kind(json.loads(backend.to_str()) if backend is not None else {"model": {}})
    except UserError as error:
        return str(error)
    return ""


def _kind(content: Mapping[str, Any]) -> tuple[str, str]:
    """llama.cpp's names of a tokenizer's model and of how it splits text. Raises UserError for others than it knows."""
    model = content["model"]
    if model.get("type") != "BPE":
        raise UserError(f"gguf knows tokenizers of byte pairs, got {model.get('type')}; {_REMEDY}")
    if "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")]):
        return "gpt2", _split(content.get("pre_tokenizer"))
    if model.get("byte_fallback"):
        return "llama", "default"
    raise UserError(f"gguf knows byte-level and SentencePiece tokenizers, and this is neither; {_REMEDY}")


def _add_tokenizer(writer: Any, source: Compressed) -> None:
    content = read_json(source.directory / "tokenizer.json", remedy=_REMEDY)
    model, added = content["model"], content.get("added_tokens") or []
    known, split = _kind(content)
    writer.add_tokenizer_model(known)
    writer.add_tokenizer_pre(split)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    tokens, kinds = _tokens(model, added, source.config.vocab_size)
    if known == "gpt2":
        writer.add_token_merges(merges)
    else:  # SentencePiece: a merge counts by its rank
        ranks = {pair.replace(" ", ""): -float(rank) for rank, pair in reversed([*enumerate(merges)])}
        named = zip(tokens, kinds, strict=True)
        writer.add_token_scores([ranks.get(token, -1e9 if kind == _NORMAL else 0.0) for token, kind in named])
        steps = [content.get("normalizer") or {}, content.get("pre_tokenizer") or {}]
        steps += [inner for step in steps for inner in step.get("normalizers", []) + step.get("pretokenizers", [])]
        kinds_of = ((step["type"], step.get("prepend_scheme")) for step in steps if step)
        writer.add_add_space_prefix(any(kind == "Prepend" or way not in ("never", None) for kind, way in kinds_of))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    tokenizer = models.load_tokenizer(models.resolve(str(source.directory), trust_remote_code=source.trust_remote_code))
    for kind in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{kind}_token_id", None)) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_add_bos_token(tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id])
    if template := tokenizer.chat_template:
        if isinstance(template, dict):  # several
            template = [{"name": name, "template": one} for name, one in template.items()]
        writer.add_chat_template(template)


def _tokens(model: dict[str, Any], added: list[dict[str, Any]], size: int) -> tuple[list[str], list[int]]:
    """(each token's text, its kind), as many as the embedding has rows; an added token behind them has no embedding."""
    tokens, kinds = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    for text, number in model["vocab"].items():
        is_byte = bool(model.get("byte_fallback")) and re.fullmatch(r"<0x[0-9A-F]{2}>", text)
        tokens[number], kinds[number] = text, _BYTE if is_byte else _NORMAL
    for token in (token for token in added if token["id"] < size):
        kind = _UNKNOWN if token["content"] == model.get("unk_token") else _CONTROL if token["special"] else _USER
        # llama.cpp looks for these in text before spaces are escaped, and prints them as they are.
        text = token["content"].replace("\u2581", " ") if kind == _USER else token["content"]
        tokens[token["id"]], kinds[token["id"]] = text, kind
    return tokens, kinds


def _split(pre_tokenizer: Any) -> str:
    """llama.cpp's name of how text is split before byte pairs are merged."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    for step in steps:
        if (pattern := (step.get("pattern") or {}).get("Regex", "")) in _SPLITS:
            return _SPLITS[pattern]
    kinds = [step.get("type") for step in steps]
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["ByteLevel"]:
        return "gpt-2"
    raise UserError(f"gguf does not know how this tokenizer splits text ({kinds}); {_REMEDY}")
