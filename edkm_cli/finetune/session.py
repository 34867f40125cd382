"""What finetune and merge do alike: the packed model, its texts, perplexities by name, and the page of what they write."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from edkm_cli import data, models
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.export.checkpoint import DenseFormat
from edkm_cli.export.ownership import run_paths
from edkm_cli.export.run import Texts
from edkm_cli.format import QuantizationSpec, read_spec, sha256_of
from edkm_cli.hf import load
from edkm_cli.model_files import files_digest, stored_dtypes
from edkm_cli.progress import Clock, Observer
from edkm_cli.self_text import NOT_WRITTEN


def require_palettized(directory: Path) -> QuantizationSpec:
    """The format of a compressed model. Raises UserError for another directory."""
    if not directory.is_dir():
        raise UserError(f"DIR must be the directory of a compressed model, but there is no directory {directory}")
    spec = read_spec(directory) if (directory / "config.json").is_file() else None
    if spec is None:
        raise UserError(
            f"DIR must be what edkm compress wrote, but {directory} is not; to compress a model while it "
            "learns a text use edkm compress, to train it as it is use peft"
        )
    return spec


class Session:
    """One run on the compressed model in `directory`, with the data settings of `config`, by the processes of `world`."""

    def __init__(self, directory: Path, config: Any, world: World, watch: Observer, *, dtype: str):
        self.directory, self.config, self.world, self.watch, self.dtype = directory, config, world, watch, dtype
        self.spec = require_palettized(directory)
        self.sources = data.parse_sources(config.data) if config is not None else []
        self.clock = Clock()

    @property
    def inputs(self) -> list[tuple[str, Path]]:
        """(option, path) of what the run reads."""
        return run_paths(self.config, "DIR", self.directory)

    @property
    def writes_text(self) -> bool:
        """Whether a model writes some of the training text."""
        return any(source.needs_model for source in self.sources)

    @cached_property
    def tokenizer(self) -> Any:
        source = models.resolve(str(self.directory))
        return models.load_tokenizer(source, trust_remote_code=self.config.trust_remote_code)

    def load_model(self, directory: Path | None = None) -> Any:
        """The packed model, or what was made of it in `directory`, on the world's device."""
        return load(
            directory or self.directory,
            dtype=getattr(torch, self.dtype),
            device=self.world.device,
            trust_remote_code=self.config.trust_remote_code,
        )

    def dense_format(self, model: Any) -> DenseFormat:
        """How the files of a model as it was loaded hold what is not packed."""
        source = models.resolve(str(self.directory))
        trust = self.config.trust_remote_code
        stored = models.load_config(source, trust_remote_code=trust, may_be_quantized=True).dtype
        return DenseFormat.of(model, stored or torch.float32, stored_dtypes(self.directory))

    def open_texts(self, *, token_limit: int, stages: tuple[str, ...]) -> None:
        """The texts that are measured at `stages`, and the training data, but what a model is yet to write."""
        written = NOT_WRITTEN if self.writes_text else None
        options: dict[str, Any] = {"token_limit": token_limit, "watch": self.watch, "stages": stages}
        self.texts = Texts(self.config, self.sources, self.tokenizer, written=written, **options)

    def measure(self, stage: str, model: Any, *, shared: bool = True) -> None:
        """The model's perplexity on each text, by all processes, or by this one alone."""
        with self.clock.phase("evaluate"):
            world = self.world if shared else World(device=self.world.device)
            # Of several processes, each remembers what it has seen of the uncompressed model.
            self.texts.measured.measure(stage, model, world, compare=world.size == self.world.size)

    def digest(self, *more: Path) -> str:
        """Of the compressed model's files, and of `more`."""
        files = self.world.on_main(lambda: files_digest(self.directory))
        return " ".join([files, *map(sha256_of, more)])


def checkpoint_card(report: dict[str, Any], *, title: str, made: str, file: str) -> str:
    """README.md of a compressed model that was made of another one, with the metadata block the hub reads."""
    measured = report["texts"][0]
    stages = [f"{stage} {value:.3f}" for stage, value in report["perplexity"].items() if value is not None]
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- edkm
- palettization
- quantized
---

# {title}

Made by edkm {report["versions"].get("edkm-cli", "")}: {made}.

```python
import edkm_cli

model = edkm_cli.load("PATH")  # PATH: this directory
```

Perplexity on {measured["data"]}, {measured["windows"]} windows of {measured["context"]} tokens: {", ".join(stages)}.
All settings and versions are in `{file}`.
"""
