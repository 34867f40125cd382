"""What the files of a model say, before anything is built of them: no numbers that no model has, no file outside of the
directory, no tensor in two places, no weights of integers. Whoever wrote the files may be careless, or hostile."""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from edkm_cli.distributed import ALONE, World, full, local
from edkm_cli.errors import UserError, brief
from edkm_cli.files import TORCH_DTYPES, is_plain_name, read_json, safetensors_writer, sha256_of
from edkm_cli.format import QUANT_METHOD

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What belongs to a model beside its weights.
BESIDE_WEIGHTS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
                  "vocab.*", "merges.txt", "*.model", "chat_template*", "additional_chat_templates/*", "*.py",
                  "*.index.json", "*processor_config.json", "tekken.json")  # fmt: skip
FETCH_AGAIN = "fetch the files again"
# What is built one by one, and how many of them a model may have; and what any number of a configuration may be.
_COUNTED, _MAX_COUNT = ("layer", "expert", "block", "depth", "num_hidden"), 100_000
_MAX_NUMBER = 2**48
_TIMES_STORED = 8
_WHERE = ("local_files_only", "trust_remote_code", "revision", "gguf_file")  # of a model's files
# Our own checkpoints, weights in float8 with a scale for each block (DeepSeek's), and gpt-oss' experts in FP4.
FP8, MXFP4 = "fp8", "mxfp4"
DECODABLE = (QUANT_METHOD, FP8, MXFP4)
_DECODE_OUTSIDE = "decode it first, which --dequantize cannot: from_pretrained(...).dequantize().save_pretrained(...)"


class StoredTensor(NamedTuple):
    """A tensor in a file: the file's name, the dtype as safetensors calls it, the shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


class TensorFiles:
    """The tensors of a directory's safetensors files: what they are is read at once, each itself when asked for.

    `tensors` has them by name, of `model.safetensors` or of the files that the index names, as transformers chooses.

    Raises UserError for a directory without such files, an index that names files elsewhere, none, or tensors that its
    files do not hold, a file that is not whole, and for a tensor in two files: transformers takes one of the two.
    """

    def __init__(self, directory: Path, *, remedy: str = FETCH_AGAIN):
        self.directory, self._remedy = directory, remedy
        placed = self._placed()
        self.tensors: dict[str, StoredTensor] = {}
        for file in sorted(set(placed.values())) if placed is not None else [SINGLE]:
            for name, dtype, shape in header(directory / file, remedy=remedy):
                if (there := self.tensors.get(name)) is not None:
                    raise UserError(f"{directory} holds {name[:100]} in {there.file} and in {file}; {remedy}")
                self.tensors[name] = StoredTensor(file, dtype, shape)
        for name, file in sorted((placed or {}).items()):
            if name not in self.tensors or self.tensors[name].file != file:
                raise UserError(f"{directory / file} lacks {name[:100]}, which {INDEX} names; {remedy}")

    def _placed(self) -> dict[str, str] | None:
        """Tensor -> file, as the index says; None where one file holds all."""
        directory, index, remedy = self.directory, self.directory / INDEX, self._remedy
        if (directory / SINGLE).is_file():  # transformers prefers it, too
            return None
        if not index.is_file():
            raise UserError(f"{directory} has no {SINGLE} and no index of several files; {remedy}")
        placed = read_json(index, remedy=remedy).get("weight_map")
        if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
            raise UserError(f"{index} must map tensors to files, but does not; {remedy}")
        for file in sorted(set(placed.values())):
            if not is_plain_name(file):
                raise UserError(f"{index} must name files of its own directory, got {file[:100]!r}; {remedy}")
            if not (directory / file).is_file():
                raise UserError(f"{directory} lacks {file[:100]}, which {INDEX} names; {remedy}")
        return placed

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """The file that holds a tensor, by safetensors. Raises UserError where none does."""
        if name not in self.tensors:
            raise UserError(f"the weights in {self.directory} must hold {name}, but do not; {self._remedy}")
        # Opened anew for each tensor: a file that stays open keeps in memory all that has been read of it.
        with safe_open(self.directory / self.tensors[name].file, framework="pt") as file:
            yield file

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU as stored. Raises UserError where the files don't have it."""
        with self.opened(name) as file:
            return file.get_tensor(name)

    @property
    def numbers(self) -> int:
        """In all tensors together."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())


def files_digest(path: Path) -> str:
    """One sha256 over the names and bytes of a model's files that say what it is: weights, configuration, tokenizer, code.
    `path` is its directory, or a file that holds all of it."""
    if path.is_file():
        return sha256_of(path)
    weights = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    beside = {file for pattern in BESIDE_WEIGHTS for file in path.glob(pattern) if file.is_file()}
    total = hashlib.sha256()
    for file in [*weights, *sorted(beside)]:
        total.update(f"{file.name} {sha256_of(file)}\n".encode())
    return total.hexdigest()


def require_finite(name: str, model: Any) -> None:
    """Raises UserError naming the first parameter that holds NaN or Inf: of such a model every figure would be NaN."""
    for path, parameter in model.named_parameters():
        parts = local(parameter.detach()).flatten().split(2**22)  # the question makes copies
        if not all(bool(part.isfinite().all()) for part in parts):
            rule = f"--model {name} must have finite weights, but {path} holds NaN or Inf; fetch the files again"
            raise UserError(f"{rule}, or use --dtype float32 where another format is too narrow for them")


def files_state(path: Path | None) -> dict[str, list[int]] | None:
    """Sizes and times of the files of a model on this machine; None for one of the hub, which its name stands for."""
    if path is None:
        return None
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("config.json")])
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def check_numbers(path: Path, config: Any, *, remedy: str = FETCH_AGAIN, key: str = "") -> None:
    """Raises UserError for a number in a config.json that no model has: to build such a model would not end."""
    if isinstance(config, dict):
        for name, value in config.items():
            check_numbers(path, value, remedy=remedy, key=str(name))
    elif isinstance(config, list):
        for value in config:
            check_numbers(path, value, remedy=remedy, key=key)
    elif isinstance(config, int) and not isinstance(config, bool):
        counted = "vocab" not in key and any(part in key for part in _COUNTED)
        limit = _MAX_COUNT if counted else _MAX_NUMBER
        if abs(config) > limit:
            raise UserError(f"{path}: {key} must be at most {limit}, got {str(config)[:40]}; {remedy}")


def require_no_adapter(directory: Path) -> None:
    """Raises UserError for a directory with an adapter beside the model, which transformers would add in silence."""
    if (directory / "adapter_config.json").is_file():
        raise UserError(f"{directory} holds an adapter beside the model (adapter_config.json); move it elsewhere")


def has_safetensors(directory: Path) -> bool:
    """Whether a directory has weight files of the only kind that is read."""
    return (directory / SINGLE).is_file() or (directory / INDEX).is_file()


def weight_files(directory: Path) -> list[Path]:
    """A model's safetensors files; all that there are where none is named as those of a model."""
    if not has_safetensors(directory):
        return sorted(directory.glob("*.safetensors"))
    return [directory / name for name in sorted({tensor.file for tensor in TensorFiles(directory).tensors.values()})]


def weight_files_bytes(directory: str | Path) -> int:
    """Bytes of the safetensors files of a model or an adapter."""
    return sum(file.stat().st_size for file in weight_files(Path(directory)))


def check_model_files(directory: Path) -> TensorFiles | None:
    """Look at the headers of the safetensors files that transformers will read; None where there are none.

    Raises UserError as `TensorFiles` does, for weights in files of another kind only, and for weights that are no real
    numbers: transformers turns integers and the real parts of complex numbers into weights.
    """
    if not has_safetensors(directory):
        if any(directory.glob("pytorch_model*.bin")):
            raise needs_safetensors(str(directory))
        return None
    files = TensorFiles(directory)
    for name, (file, dtype, _) in files.tensors.items():
        if name.endswith("weight") and not dtype.startswith(("F", "BF")):
            rule = f"{directory / file} must hold weights of real numbers, but {name[:100]} is {dtype}"
            raise UserError(f"{rule}; give the model that it was made from")
    return files


def needs_trust(name: str) -> UserError:
    """The error for a model that brings code."""
    rule = f"{name} brings Python files of its own, which would be run"
    return UserError(f"{rule}; read them, and if you trust them give --trust-remote-code (trust_remote_code=True)")


def needs_safetensors(name: str) -> UserError:
    """For a model whose weights are in files of another kind."""
    rule = f"--model {name} must have its weights in safetensors files, and has none"
    why = "those of pickle (pytorch_model.bin) can run code while they are read"
    how = f"AutoModelForCausalLM.from_pretrained({name!r}).save_pretrained(NEW), and the tokenizer likewise"
    return UserError(f"{rule}: {why}; convert a model that you trust, with transformers: {how}")


def stored_dtypes(directory: Path | None) -> dict[str, Any]:
    """Tensor name -> number format in a directory's safetensors files, as PyTorch calls it; empty where there are none."""
    if directory is None or not has_safetensors(directory):
        return {}
    tensors = TensorFiles(directory).tensors.items()
    return {name: TORCH_DTYPES[tensor.dtype] for name, tensor in tensors if tensor.dtype in TORCH_DTYPES}


def require_whole(name: str, model: Any, report: dict[str, Any]) -> None:
    """Raises UserError unless the files hold the model's tensors, all of them and no others: transformers fills what
    lacks with random numbers."""
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    mismatched = sorted(f"{one} is {tuple(own)} for {tuple(wanted)}" for one, own, wanted in report["mismatched_keys"])
    problems = [
        f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", mismatched))
        if names
    ]
    if report.get("error_msgs"):
        problems.append(brief(report["error_msgs"], 200))
    if problems:
        rule = f"--model {name} must hold the tensors of a {type(model).__name__}, but there are {'; '.join(problems)}"
        raise UserError(f"{rule}; fetch the files again, or check that config.json belongs to them")


def header(file: Path, *, remedy: str = FETCH_AGAIN) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype as safetensors calls it, shape) of each tensor of a file. Raises UserError for one that is not whole."""
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                yield name, str(part.get_dtype()), tuple(part.get_shape())
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} is not a whole safetensors file ({brief(error)}); {remedy}") from error
    except RuntimeError as error:  # a file that is mapped counts as memory to the system
        rule = f"{file} must fit into memory and swap to be read ({brief(error)}); save the model in smaller files"
        raise UserError(f"{rule}: save_pretrained(..., max_shard_size='5GB')") from error


def llama3_factors(rope: dict[str, Any], size: int) -> Tensor:
    """What llama.cpp divides rotary frequencies by, (size / 2,) float32: as `rope_type` llama3 of transformers."""
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float()


def save_tensors(path: Path, tensors: Mapping[str, Tensor], world: World = ALONE) -> None:
    """Write a safetensors file of tensors that may be sharded, one after the other: without the copy of all of them that
    `safetensors.torch.save_file` makes. All processes call alike; the first one writes."""
    announced = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with safetensors_writer(path, announced) if world.main else nullcontext() as write:
        for name, tensor in tensors.items():
            whole = full(tensor)  # a collective where it is sharded
            if write is not None:
                write(name, whole)


@contextmanager
def no_larger_than(
    directory: Path, *, tensors: int, numbers: int | None = None, remedy: str = FETCH_AGAIN
) -> Iterator[None]:
    """Inside, raises UserError as soon as models register many more parameters than the `tensors` of a directory's files,
    or, unless it is None, parameters of many more than so many `numbers`: files that hold fewer cannot fill them."""
    count = size = 0

    def registered(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal count, size
        count, size = count + 1, size + (0 if parameter is None else parameter.numel())
        # Tied ones and those of modules that take another's place are registered twice; fused ones are stored apart.
        too_many = count > _TIMES_STORED * tensors + 1000
        if too_many or (numbers is not None and size > _TIMES_STORED * numbers + 2**20):
            what = f"{tensors} tensors" if too_many else f"{numbers} weights"
            raise UserError(f"{directory}/config.json describes a model far larger than its {what}; {remedy}")

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def settle_ties(config: Any, directory: Path) -> None:
    """Let `config.tie_word_embeddings` say what the weights say, in place: where the files hold an output embedding of
    its own, which differs from the input embedding, the two are not tied, whatever the flag. transformers decides so,
    too, while it loads; here it is known before, and for every way to read the files."""
    if getattr(config, "tie_word_embeddings", False) and head_differs(directory):
        config.get_text_config(decoder=True).tie_word_embeddings = config.tie_word_embeddings = False


def head_differs(directory: Path) -> bool:
    """Whether an output embedding in a directory's safetensors files is not equal to the input embedding."""
    if not has_safetensors(directory):
        return False
    files = TensorFiles(directory)
    heads = [name for name in files.tensors if name.split(".")[-2:] in _HEADS]
    inputs = [name for name in files.tensors if name.split(".")[-2:] in _INPUTS]
    if len(heads) != 1 or len(inputs) != 1:
        return False
    with files.opened(heads[0]) as one, files.opened(inputs[0]) as other:
        head, rows = one.get_slice(heads[0]), other.get_slice(inputs[0])
        if head.get_shape() != rows.get_shape() or head.get_dtype() != rows.get_dtype():
            return True
        parts = (slice(first, first + _COMPARED_ROWS) for first in range(0, head.get_shape()[0], _COMPARED_ROWS))
        return not all(bool((head[part] == rows[part]).all()) for part in parts)


# What families call their output and their token embedding.
_HEADS = (["lm_head", "weight"], ["embed_out", "weight"])
_INPUTS = tuple([name, "weight"] for name in ("embed_tokens", "embed_in", "wte", "word_embeddings", "embedding"))
_COMPARED_ROWS = 4096


def auto_class(config: Any) -> Any:
    """What of transformers makes the model of a configuration: a language model that reads images, too, is made whole.
    Raises UserError for one of another kind."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto import modeling_auto as known

    kind, named = getattr(config, "model_type", ""), getattr(config, "architectures", None) or [""]
    texts, images = known.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    if kind in images and (kind not in texts or images[kind] == named[0]):
        return AutoModelForImageTextToText
    if kind not in texts and not hasattr(config, "auto_map"):
        raise UserError(f"--model must be a causal language model, but transformers has none of the kind {kind!r}")
    return AutoModelForCausalLM


def build(config: Any, **options: Any) -> Any:
    """The dense model of a configuration, with random weights. `options`: those of `from_config`."""
    return auto_class(config).from_config(config, **options)


def from_pretrained(location: str | Path, **options: Any) -> Any:
    """What transformers loads from a directory or the hub. `options`: those of `from_pretrained`."""
    from transformers import AutoConfig

    where = {name: options[name] for name in options if name in _WHERE}
    return auto_class(AutoConfig.from_pretrained(location, **where)).from_pretrained(location, **options)


def stays_wide(model: Any, name: str, dtype: torch.dtype) -> bool:
    """Whether a tensor of a model in `dtype` is float32: with rounded corrections routers choose other experts, say."""
    return any(re.search(part, name) for part in model._get_dtype_plan(dtype))


def quantization_method(config: Any) -> str | None:
    """The `quant_method` of a transformers configuration; None of a dense model (a GGUF file counts as one: it is
    decoded always), `unknown` where it does not say."""
    if (given := getattr(config, "quantization_config", None)) is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    method = getattr(method, "value", method)
    return None if method == "gguf" else str(method or "unknown")


def require_unquantized(name: str, config: Any) -> None:
    """Raises UserError for a checkpoint whose weights are quantized: clustering needs the numbers themselves."""
    if (method := quantization_method(config)) is not None:
        remedy = "--dequantize, to start from what is left of it" if method in DECODABLE else _DECODE_OUTSIDE
        rule = f"--model must not be quantized yet, but {name} is ({method})"
        raise UserError(f"{rule}; give the model it was made from, or {remedy}")


def as_if_dense(name: str, config: Any) -> dict[str, Any]:
    """Let a configuration describe the decoded model, in place; returns its `quantization_config`, empty of a dense model.
    Raises UserError for what cannot be decoded here."""
    if (method := quantization_method(config)) is None:
        return {}
    if method not in DECODABLE:
        require_unquantized(name, config)
    quantized = config.quantization_config
    del config.quantization_config
    return dict(quantized if isinstance(quantized, dict) else quantized.to_dict())


def check_tokenizer(name: str, tokenizer: Any, config: Any) -> None:
    """Raises UserError for a tokenizer with tokens beyond the model's vocabulary; added ones count where they end texts."""
    rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    added = set(getattr(tokenizer, "added_tokens_decoder", ())) - {tokenizer.eos_token_id, tokenizer.bos_token_id}
    highest = max((number for number in tokenizer.get_vocab().values() if number not in added), default=0)
    if rows is not None and highest >= rows:
        rule = f"the tokenizer of {name} has token {highest}, but the model has {rows} rows of embeddings"
        raise UserError(f"{rule}; give the directory the tokenizer that belongs to the model")
