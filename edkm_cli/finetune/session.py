"""What finetune and merge do alike: the packed model, its texts, and perplexities by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from edkm_cli import data, models
from edkm_cli.data.store import TokenStore
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.export.ownership import run_paths
from edkm_cli.export.run import Texts
from edkm_cli.format import QuantizationSpec, read_spec, sha256_of
from edkm_cli.hf import load
from edkm_cli.model_files import files_digest
from edkm_cli.progress import Clock, Observer


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

    def load_model(self) -> Any:
        """The packed model, on the world's device."""
        return load(
            self.directory,
            dtype=getattr(torch, self.dtype),
            device=self.world.device,
            trust_remote_code=self.config.trust_remote_code,
        )

    def open_texts(self, *, token_limit: int, stages: tuple[str, ...], written: TokenStore | None = None) -> None:
        """The texts that are measured at `stages`, and the training data."""
        source = models.resolve(str(self.directory))
        tokenizer = models.load_tokenizer(source, trust_remote_code=self.config.trust_remote_code)
        options: dict[str, Any] = {"token_limit": token_limit, "watch": self.watch, "stages": stages}
        self.texts = Texts(self.config, self.sources, tokenizer, written=written, **options)

    def measure(self, stage: str, model: Any, *, shared: bool = True) -> None:
        """The model's perplexity on each text, by all processes, or by this one alone."""
        with self.clock.phase("evaluate"):
            self.texts.measured.measure(stage, model, self.world if shared else World(device=self.world.device))

    def digest(self, *more: Path) -> str:
        """Of the compressed model's files, and of `more`."""
        files = self.world.on_main(lambda: files_digest(self.directory))
        return " ".join([files, *map(sha256_of, more)])
