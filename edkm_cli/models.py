"""Where a model comes from: an alias, a hub id, a directory or a GGUF file; and loading it, with errors a user can mend."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from edkm_cli.config import UserError, configs_directory

DTYPES = ("float32", "bfloat16", "float16")


def check_dtype(dtype: str) -> None:
    """Raises UserError for a dtype that models are not loaded in."""
    if dtype not in DTYPES:
        raise UserError(f"--dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


@dataclass(frozen=True)
class ModelSource:
    """A model to load. `location` is a directory or a hub id; `architecture` is known for aliases, so that a dry run
    needs no hub."""

    name: str
    location: str
    gguf_file: str | None = None
    is_local: bool = False
    architecture: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path | None:
        """The file or directory on this machine, if it is there."""
        if not self.is_local:
            return None
        return Path(self.location) / self.gguf_file if self.gguf_file else Path(self.location)


def cache_directory() -> Path:
    """Where scripts/get_smollm2.sh puts its model: $EDKM_CACHE, or edkm/ in the user's cache directory."""
    if "EDKM_CACHE" in os.environ:
        return Path(os.environ["EDKM_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edkm"


def aliases() -> dict[str, dict[str, Any]]:
    """The table of configs/models.yaml."""
    return yaml.safe_load((configs_directory() / "models.yaml").read_text(encoding="utf-8"))


def resolve(name: str) -> ModelSource:
    """Find what `--model` means. Raises UserError where it can be nothing."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"--model names a GGUF file that does not exist: {path}; check the path")
        return ModelSource(name, str(path.parent), path.name, is_local=True)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"--model directory must hold a config.json, but {path} has none; give a model's directory")
        return ModelSource(name, str(path), is_local=True)
    table = aliases()
    if name in table:
        return _from_alias(name, table[name])
    if name.startswith((".", "/", "~")) or name.count("/") != 1 or not all(name.split("/")):
        raise UserError(
            f"--model must be an alias ({', '.join(sorted(table))}), a hub id (owner/name), a directory or a .gguf "
            f"file, got {name!r}, which is none of these"
        )
    return ModelSource(name, name)


def _from_alias(name: str, entry: dict[str, Any]) -> ModelSource:
    architecture = dict(entry.get("architecture", {}))
    if "gguf" not in entry:
        return ModelSource(name, entry["hub"], architecture=architecture)
    directory, file = cache_directory() / name, entry["gguf"]
    return ModelSource(name, str(directory), file, is_local=True, architecture=architecture)


def _require_local(source: ModelSource) -> None:
    path = source.path
    if path is not None and not path.exists():
        raise UserError(f"{source.name} is not on this machine yet (looked for {path}); run scripts/get_smollm2.sh")


def _loading_error(source: ModelSource, error: Exception) -> UserError:
    lines = " ".join(str(error).split())
    text = lines[:160] + ("..." if len(lines) > 160 else "")
    if source.is_local:
        return UserError(
            f"--model {source.name} could not be read ({text}); the files may be damaged: fetch them again"
        )
    return UserError(
        f"--model {source.name} could not be loaded from the Hugging Face hub as {source.location} ({text}); check the "
        "name, the network and `hf auth login`, or give a local directory"
    )


def load_config(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration. An alias brings its architecture, so that planning needs neither hub nor files."""
    import transformers

    if source.architecture:
        return transformers.AutoConfig.for_model(**source.architecture)
    _require_local(source)
    options = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    try:
        return transformers.AutoConfig.from_pretrained(
            source.location, trust_remote_code=trust_remote_code, local_files_only=source.is_local, **options
        )
    except Exception as error:
        raise _loading_error(source, error) from error


def load_dense(
    source: ModelSource, *, dtype: str, device: str = "cpu", trust_remote_code: bool = False, progress: bool = True
) -> Any:
    """A dense causal LM in `dtype`, in evaluation mode.

    A GGUF file is decoded to bfloat16 first: that is the precision of the checkpoints such files are made from, and
    what the perplexities of docs/results refer to. Raises UserError if the model cannot be had.
    """
    import torch

    _require_local(source)
    target = getattr(torch, dtype)
    with quiet_bars(not progress):
        if source.gguf_file:
            model = _load_gguf(source)
        else:
            model = _from_pretrained(source, trust_remote_code=trust_remote_code, dtype=target)
    model.config._name_or_path = source.name
    for parameter in model.parameters():  # parameters only: rotary frequencies stay in float32
        parameter.data = parameter.data.to(target)
    model.config.dtype = target
    return model.to(device).eval()


def _from_pretrained(source: ModelSource, **options: Any) -> Any:
    import transformers

    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            source.location,
            local_files_only=source.is_local,
            use_safetensors=None if "gguf_file" in options else True,  # never a pickle
            **options,
        )
    except Exception as error:
        raise _loading_error(source, error) from error


def _load_gguf(source: ModelSource) -> Any:
    """A GGUF file as a bfloat16 model. That of an alias is decoded once: a copy (its size: two bytes a weight) is kept
    beside it, which loads in a second where reading the GGUF takes twenty."""
    import torch
    import transformers

    decoded = _decoded_copy(source)
    if not (decoded / "config.json").is_file():
        options: dict[str, Any] = {"gguf_file": source.gguf_file, "dtype": torch.bfloat16}
        if hasattr(transformers, "GgufConfig"):  # without it (before 5.2x) transformers decodes by itself
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = _from_pretrained(source, **options)
        if not (source.architecture and _keep_copy(model, decoded)):
            return model
    # From the copy in the first run, too: its configuration is the same in all runs.
    return _from_pretrained(replace(source, location=str(decoded), gguf_file=None), dtype=torch.bfloat16)


def _decoded_copy(source: ModelSource) -> Path:
    """Where the decoded copy of an alias's GGUF file is, or will be."""
    path = source.path
    assert path is not None
    return path.with_suffix(f".bfloat16-{path.stat().st_size}")


def safetensors_directory(source: ModelSource, *, trust_remote_code: bool = False) -> Path:
    """The directory with a model's configuration and safetensors files, fetched or decoded first where needed.

    Raises UserError if they cannot be had.
    """
    _require_local(source)
    if source.gguf_file:
        if source.architecture and not (_decoded_copy(source) / "config.json").is_file():
            _load_gguf(source)
        if not source.architecture or not (_decoded_copy(source) / "config.json").is_file():
            raise UserError(
                f"{source.name} must be a directory with safetensors files to be sharded; use --sharding none"
            )
        return _decoded_copy(source)
    if source.is_local:
        return Path(source.location)
    import huggingface_hub

    patterns = ["*.safetensors", "*.json"] + (["*.py"] if trust_remote_code else [])
    try:
        return Path(huggingface_hub.snapshot_download(source.location, allow_patterns=patterns))
    except Exception as error:
        raise _loading_error(source, error) from error


def _keep_copy(model: Any, directory: Path) -> bool:
    """Save a model where it will be looked for, whole or not at all; False where the cache cannot be written to."""
    partial = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    try:
        model.save_pretrained(partial)
        os.rename(partial, directory)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
    return (directory / "config.json").is_file()


def load_tokenizer(source: ModelSource, *, trust_remote_code: bool = False) -> Any:
    """The model's tokenizer. Raises UserError if it cannot be had."""
    import transformers

    _require_local(source)
    options = {"gguf_file": source.gguf_file} if source.gguf_file else {}
    with quiet_bars(True):
        try:
            return transformers.AutoTokenizer.from_pretrained(
                source.location, trust_remote_code=trust_remote_code, local_files_only=source.is_local, **options
            )
        except Exception as error:
            raise _loading_error(source, error) from error


class LateTokenizer:
    """A model's tokenizer, loaded when something of it is first asked for."""

    def __init__(self, source: ModelSource, *, trust_remote_code: bool = False):
        self._source, self._trust = source, trust_remote_code

    @cached_property
    def tokenizer(self) -> Any:
        """Raises UserError if it cannot be had."""
        return load_tokenizer(self._source, trust_remote_code=self._trust)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


class quiet_bars:
    """Turns transformers' own progress bars off for a while."""

    def __init__(self, quiet: bool):
        self._quiet = quiet

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._was_on = logging.is_progress_bar_enabled()
        if self._quiet:
            logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        if self._quiet and self._was_on:
            logging.enable_progress_bar()


def stored_bytes(source: ModelSource) -> int | None:
    """Bytes of the weight files on this machine; None for a hub model."""
    path = source.path
    if path is None:
        return None
    if path.is_file():
        return path.stat().st_size
    return weight_files_bytes(path)


def weight_files_bytes(directory: str | Path) -> int:
    """Bytes of a directory's safetensors files."""
    return sum(file.stat().st_size for file in Path(directory).glob("*.safetensors"))
