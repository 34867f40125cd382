"""What finetune and merge do alike: the packed model, its texts, and perplexities by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import data, models
from edkm_cli.config import CompressConfig
from edkm_cli.data.store import TokenStore
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.format import QuantizationSpec, read_spec
from edkm_cli.hf import load
from edkm_cli.preflight import data_options, evaluation_documents
from edkm_cli.progress import Clock, Observer


def require_palettized(directory: Path) -> QuantizationSpec:
    """The format of a compressed model. Raises UserError for another directory."""
    if not directory.is_dir():
        raise UserError(f"DIR must be the directory of a compressed model, but there is no directory {directory}")
    spec = read_spec(directory) if (directory / "config.json").is_file() else None
    if spec is None:
        raise UserError(
            f"DIR must be what edkm compress wrote, but {directory} is not; to train an uncompressed model with updates "
            "while it is compressed use edkm compress --lora-rank, to train it as it is use peft"
        )
    return spec


class Session:
    """One run on the compressed model in `directory`, with the data settings of `config`, by the processes of `world`."""

    def __init__(self, directory: Path, config: CompressConfig, world: World, watch: Observer, *, dtype: str):
        self.directory, self.config, self.world, self.watch, self.dtype = directory, config, world, watch, dtype
        self.spec = require_palettized(directory)
        self.clock = Clock()
        self.perplexity: dict[str, float | None] = {}
        self.overlap = (0, 0)

    def load_model(self) -> Any:
        """The packed model, on the world's device."""
        return load(
            self.directory,
            dtype=getattr(torch, self.dtype),
            device=self.world.device,
            trust_remote_code=self.config.trust_remote_code,
        )

    def open_texts(self, *, token_limit: int, written: dict[str, TokenStore] | None = None) -> None:
        """Tokenizer, the text that is measured, and the training data. A text that is yet to be written cannot be
        measured: Python's documentation takes its place."""
        config = self.config
        self.tokenizer = models.load_tokenizer(
            models.resolve(str(self.directory)), trust_remote_code=config.trust_remote_code
        )
        own = data.parse_source(config.data[0]).needs_model
        self.measured_name = config.eval_data or (data.BUILTIN if own else f"held-out part of {config.data[0]}")
        documents = evaluation_documents(config, self.tokenizer, config.eval_data or (data.BUILTIN if own else None))
        self.held_out: Tensor = data.tokenize(documents, self.tokenizer)
        self.data = data.open_training_data(
            config.data,
            self.tokenizer,
            options=data_options(config),
            token_limit=token_limit,
            written=written or {},
            say=self.watch.say,
        )
        self.overlap = self.data.found_in(documents)
        if self.overlap[0]:
            self.watch.say(data.overlap_warning(*self.overlap))

    def measure(self, name: str, model: Any, *, shared: bool = True) -> None:
        """The model's perplexity, by all processes, or by this one alone."""
        with self.clock.phase("evaluate"):
            self.perplexity[name] = perplexity(
                model,
                self.held_out,
                context=self.config.context,
                max_windows=self.config.eval_windows,
                track=self.watch.track,
                description=f"perplexity, {name}",
                world=self.world if shared else World(device=self.world.device),
            ).perplexity

    def perplexities(self, model: Any) -> dict[str, float]:
        """By text, in the middle of training."""
        config = self.config
        found = perplexity(
            model, self.held_out, context=config.context, max_windows=config.eval_windows, world=self.world
        )
        return {self.measured_name: found.perplexity}

    def evaluation(self) -> dict[str, Any]:
        """What was measured, as reports have it."""
        return {
            "data": self.measured_name,
            "context": self.config.context,
            "windows": min(self.config.eval_windows, max(1, self.held_out.numel() // self.config.context)),
            "tokens": self.held_out.numel(),
        }
