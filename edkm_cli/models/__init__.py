"""Where a model comes from: an alias, a hub id, a directory or a GGUF file; and loading it, with errors a user can mend."""

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import yaml

from edkm_cli import model_files
from edkm_cli.errors import UserError, brief, explained
from edkm_cli.files import read_json, sync
from edkm_cli.models import gguf
from edkm_cli.progress import no_warnings, quiet_bars
from edkm_cli.runtime.experts import split_experts
from edkm_cli.settings import DTYPES, cache_directory, configs_directory
from edkm_cli.targets import gemma_scalar

_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "architectures", "dtype")


@dataclass(frozen=True)
class ModelSource:
    """A model to load. `location` is a directory or a hub id; `architecture` is known for aliases, so that a dry run
    needs no hub. `revision` is a branch, tag or commit. Where it `splits` experts, each of their matrices is a linear.
    With `trust_remote_code` Python files that come with it are run."""

    name: str
    location: str
    gguf_file: str | None = None
    is_local: bool = False
    architecture: dict[str, Any] = field(default_factory=dict)
    splits: bool = True
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def path(self) -> Path | None:
        """The file or directory on this machine, if it is there."""
        if not self.is_local:
            return None
        return Path(self.location) / self.gguf_file if self.gguf_file else Path(self.location)

    @property
    def options(self) -> dict[str, Any]:
        """What `from_pretrained` is told beside the location."""
        told = {"local_files_only": self.is_local, "trust_remote_code": self.trust_remote_code}
        given = {"revision": self.revision, "gguf_file": self.gguf_file}
        return told | {name: value for name, value in given.items() if value is not None}


def config_digest(config: Any) -> str:
    """sha256 of what a transformers configuration says of the model: not where it lies, nor who wrote the file."""
    said = {key: value for key, value in config.to_dict().items() if key not in _NOT_THE_MODEL}
    return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()


def aliases() -> dict[str, dict[str, Any]]:
    """The table of configs/models.yaml."""
    return yaml.safe_load((configs_directory() / "models.yaml").read_text(encoding="utf-8"))


def resolve(name: str, revision: str | None = None, *, trust_remote_code: bool = False) -> ModelSource:
    """Find what `--model` means. Raises UserError where it can be nothing, or has no revisions."""
    source = _resolved(name)
    if revision is not None and source.is_local:
        raise UserError(f"--revision names a version of a model on the hub, but --model {name} is a file; leave it out")
    return replace(source, revision=revision, trust_remote_code=trust_remote_code)


def _resolved(name: str) -> ModelSource:
    if (path := Path(name).expanduser()).suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"--model names a GGUF file that does not exist: {path}; check the path")
        return ModelSource(name, str(path.parent), path.name, is_local=True)
    if path.is_dir() and ((path / "config.json").is_file() or name not in aliases()):
        if not (path / "config.json").is_file():
            raise UserError(f"--model directory must hold a config.json, but {path} has none; give a model's directory")
        model_files.require_no_adapter(path)
        return ModelSource(name, str(path), is_local=True)
    if name in (table := aliases()):
        entry, architecture = table[name], dict(table[name].get("architecture", {}))
        if "gguf" not in entry:
            return ModelSource(name, entry["hub"], architecture=architecture)
        return ModelSource(name, str(cache_directory() / name), entry["gguf"], is_local=True, architecture=architecture)
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or not all(name.split("/")):
        rule = f"--model must be an alias ({', '.join(sorted(table))}), a hub id (owner/name)"
        raise UserError(f"{rule}, a directory or a .gguf file, got {name!r}, which is none of these")
    return ModelSource(name, name)


def _require_local(source: ModelSource) -> None:
    if (path := source.path) is not None and not path.exists():
        raise UserError(f"{source.name} is not on this machine yet (looked for {path}); run scripts/get_smollm2.sh")
    if source.gguf_file:
        gguf.require_whole(source.name, Path(str(path)))


@contextmanager
def loading(source: ModelSource) -> Iterator[None]:
    """Inside, what libraries raise becomes a UserError that says what to do about it."""
    try:
        yield
    except UserError:  # says more by itself
        raise
    except Exception as error:
        name, lines = source.name, " ".join(str(error).split())
        if "trust_remote_code" in lines:
            raise model_files.needs_trust(f"--model {name}") from error
        if "safetensors" in lines and ("no file named" in lines or "not appear to have a file" in lines):
            raise model_files.needs_safetensors(name) from error
        if source.is_local:
            found, remedy = brief(error, 200), "files may be missing or damaged: fetch them again"
            why = f"could not be read ({found}); {'install that' if isinstance(error, ImportError) else remedy}"
        else:
            rule = f"could not be loaded from the Hugging Face hub as {source.location} ({brief(error)})"
            why = f"{rule}; check the name, the network and `hf auth login`, or give a local directory"
        raise UserError(f"--model {name} {why}") from error


def load_config(source: ModelSource, *, may_be_quantized: bool = False, dequantize: bool = False) -> Any:
    """The transformers configuration. An alias brings its architecture, so that planning needs neither hub nor files.

    Its `tie_word_embeddings` is what the weight files on this machine say. Raises UserError for a model that cannot be
    had, or one that is quantized already unless it `may_be_quantized`. With `dequantize` it is that of the decoded model.
    """
    import transformers

    if source.architecture:
        return transformers.AutoConfig.for_model(**source.architecture)
    _require_local(source)
    own_files = source.is_local and not source.gguf_file
    if own_files:
        path = Path(source.location) / "config.json"
        model_files.check_numbers(path, read_json(path, remedy=model_files.FETCH_AGAIN))
    with loading(source):
        if source.gguf_file:
            gguf.require_few_layers(str(source.path))
        config = transformers.AutoConfig.from_pretrained(source.location, **source.options)
    if config.return_dict is False:  # models of today's transformers cannot read what their own parts give then
        raise UserError(f"{source.name} must not have return_dict false in its config.json; remove it there")
    if source.gguf_file:
        with loading(source):
            gguf.take_rest(source.name, str(source.path), config)
        if config.model_type in ("gemma2", "gemma3_text"):
            config.query_pre_attn_scalar = gemma_scalar(config)
    if dequantize:
        model_files.as_if_dense(source.name, config)
    elif not may_be_quantized:
        model_files.require_unquantized(source.name, config)
        if own_files:
            model_files.check_model_files(Path(source.location))
    if own_files:
        model_files.settle_ties(config, Path(source.location))
    return config


def stored_dtype(source: ModelSource, config: Any, dtype: str) -> str:
    """The number format of a model's files, as its configuration names it, or `dtype`, in which it is loaded, where that is
    narrower or none is named. A GGUF file is decoded to bfloat16."""
    name = "bfloat16" if source.gguf_file else str(getattr(config, "dtype", None)).removeprefix("torch.")
    return name if name in DTYPES and dtype == "float32" else dtype


def dense_sizes(source: ModelSource, config: Any, dtype: str) -> Callable[[str], int]:
    """Bytes of a number of each tensor, by its name, that an export leaves dense: of `stored_dtype`, or of the files' where
    these hold it wider; never wider than `dtype`, in which it is loaded."""
    kinds = model_files.stored_dtypes(source.path)
    usual, most = (getattr(torch, name).itemsize for name in (stored_dtype(source, config, dtype), dtype))
    return lambda name: min(most, max(usual, kinds[name].itemsize if name in kinds else 0))


def skeleton(source: ModelSource, config: Any, *, measured: bool = False) -> Any:
    """The dense model of a configuration on the meta device: shapes without weights. Of one that is only `measured` less is
    asked for.

    Raises UserError for a configuration of which no causal LM can be built, or one with far more weights than the files.
    """
    directory = Path(source.location)
    stored = model_files.check_model_files(directory) if source.is_local and not source.gguf_file else None
    limit: Any = nullcontext()
    if stored:
        limit = model_files.no_larger_than(directory, tensors=len(stored.tensors), numbers=stored.numbers)
    rule = f"--model {source.name} must be a causal language model that transformers can build, but its config.json"
    with explained(f"{rule} describes none", "; check it, or fetch the files again"), torch.device("meta"), limit:
        own = copy.deepcopy(config)  # building a model leaves its mark on the configuration
        model = model_files.build(own, trust_remote_code=source.trust_remote_code)
        if not measured and not {"logits_to_keep", "kwargs"} & signature(model.forward).parameters.keys():
            raise UserError(f"{rule} describes one whose forward takes no logits_to_keep; give its code that argument")
    if source.splits:
        split_experts(model)
    return model


def load_dense(
    source: ModelSource, *, dtype: str, device: str = "cpu", progress: bool = True, may_be_quantized: bool = False
) -> Any:
    """A dense causal LM in `dtype`, in evaluation mode.

    A GGUF file is decoded to bfloat16 first: that is the precision of the checkpoints such files are made from, and
    what the perplexities of docs/results refer to. `config.tie_word_embeddings` says of the model what its weights say.
    Raises UserError if the model cannot be had, if its files lack a tensor, hold one too many or one of another shape,
    or if it is quantized already (unless it `may_be_quantized`).
    """
    _require_local(source)
    if not source.gguf_file:
        config = load_config(source, may_be_quantized=may_be_quantized)
        if may_be_quantized and source.is_local and model_files.quantization_method(config) is None:
            skeleton(source, config, measured=True)  # which looks at the files, and at how much is built of them
    target = getattr(torch, dtype)
    with quiet_bars(not progress):
        if source.gguf_file:
            model = _load_gguf(source)
            for parameter in model.parameters():  # parameters only: rotary frequencies stay in float32
                parameter.data = parameter.data.to(target)
        else:
            model = _from_pretrained(source, dtype=target)
    model.config._name_or_path, model.config.dtype = source.name, target
    if source.splits:
        split_experts(model)
    return model.to(device).eval()


def _from_pretrained(source: ModelSource, **options: Any) -> Any:
    safe = None if source.gguf_file else True  # never a pickle
    options |= {**source.options, "use_safetensors": safe, "ignore_mismatched_sizes": True, "output_loading_info": True}
    with loading(source), no_warnings():  # tables of what does not fit: it is named below, in one line
        model, report = model_files.from_pretrained(source.location, **options)
    model_files.require_whole(source.name, model, report)
    if getattr(model, "_hf_peft_config_loaded", False):  # one of the hub's that is an adapter, too
        raise UserError(f"--model {source.name} has an adapter among its files; give the base model, then `edkm merge`")
    head, rows = model.get_output_embeddings(), model.get_input_embeddings()
    if getattr(model.config, "tie_word_embeddings", False) and head is not None:
        tied = getattr(head, "weight", None) is getattr(rows, "weight", ())
        model.config.get_text_config(decoder=True).tie_word_embeddings = model.config.tie_word_embeddings = tied
    return model


def _load_gguf(source: ModelSource) -> Any:
    """A GGUF file as a bfloat16 model. That of an alias is decoded once: a copy (its size: two bytes a weight) is kept
    beside it, which loads in a second where reading the GGUF takes twenty."""
    import transformers

    if not (decoded := _copy_of(source)).is_dir():
        options: dict[str, Any] = {"dtype": torch.bfloat16}
        if hasattr(transformers, "GgufConfig"):  # without it (before 5.2x) transformers decodes by itself
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        options |= {} if source.architecture else {"config": load_config(source)}
        model = _from_pretrained(source, **options)
        gguf.require_all_taken(source.name, str(source.path), model)
        if not (source.architecture and _keep_copy(model, decoded)):
            return model
    # From the copy in the first run, too: its configuration is the same in all runs.
    return _from_pretrained(replace(source, location=str(decoded), gguf_file=None), dtype=torch.bfloat16)


def _copy_of(source: ModelSource, kind: str = "bfloat16") -> Path:
    """Where the decoded copy of an alias's GGUF file, or that of its tokenizer, is or will be."""
    path = source.path
    assert path is not None
    return path.with_suffix(f".{kind}-{path.stat().st_size}")


def safetensors_directory(source: ModelSource, *, fetch: bool = True) -> Path:
    """The directory with a model's configuration and safetensors files, decoded first where needed, and unless `fetch` is
    False fetched.

    Raises UserError if they cannot be had.
    """
    _require_local(source)
    if source.gguf_file:
        decoded = _copy_of(source)
        if source.architecture and not decoded.is_dir():
            _load_gguf(source)
        if not source.architecture:
            raise UserError(f"{source.name} must have safetensors files to be sharded; use --sharding none")
        if not decoded.is_dir():
            raise UserError(f"{source.name} must be decoded to {decoded}, which cannot be written; set EDKM_CACHE")
        return decoded
    if source.is_local:
        return Path(source.location)
    from huggingface_hub import snapshot_download

    patterns = ["*.safetensors", "*.json"] + (["*.py"] if source.trust_remote_code else [])
    with loading(source):
        # Some repositories hold the weights twice, the second time as other programs want them.
        only: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": ["original/*", "consolidated*"]}
        only["local_files_only"] = not fetch
        return Path(snapshot_download(source.location, revision=source.revision, **only))


def _keep_copy(part: Any, directory: Path) -> bool:
    """Save a model or tokenizer where it will be looked for, whole or not at all; False where that fails."""
    partial = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    try:
        part.save_pretrained(partial)
        for file in partial.iterdir():
            sync(file)
        os.rename(partial, directory)
    except Exception:  # safetensors' own of a full disk is no OSError
        shutil.rmtree(partial, ignore_errors=True)
    return directory.is_dir()


def load_tokenizer(source: ModelSource) -> Any:
    """The model's tokenizer; that of an alias's GGUF file, which takes seconds to read, from a copy beside it, kept by the
    first run. Raises UserError if it cannot be had."""
    from transformers import AutoTokenizer

    _require_local(source)
    copy = _copy_of(source, "tokenizer") if source.gguf_file and source.architecture else None
    with quiet_bars(), loading(source):
        if copy is None or not copy.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(source.location, **source.options)
            if source.gguf_file:
                gguf.require_known_split(source.name, str(source.path), tokenizer)
            if copy is None or not _keep_copy(tokenizer, copy):
                return tokenizer
        return AutoTokenizer.from_pretrained(copy)


def stored_bytes(source: ModelSource) -> int | None:
    """Bytes of the weight files on this machine; None for a hub model."""
    path = source.path
    return None if path is None else path.stat().st_size if path.is_file() else model_files.weight_files_bytes(path)
