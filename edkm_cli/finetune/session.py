"""What finetune and merge do alike: the packed model, its texts, and perplexities by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from edkm_cli import data, models
from edkm_cli.config import CompressConfig
from edkm_cli.data.store import TokenStore
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.evaluate.texts import MeasuredText
from edkm_cli.format import QuantizationSpec, read_spec
from edkm_cli.hf import load
from edkm_cli.preflight import data_options, evaluation_documents
from edkm_cli.progress import Clock, Observer, Track, no_progress


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
        self.texts: list[MeasuredText] = []
        self.found: dict[str, dict[str, float | None]] = {}  # stage -> text -> perplexity
        self.overlap: dict[str, tuple[int, int]] = {}

    def load_model(self) -> Any:
        """The packed model, on the world's device."""
        return load(
            self.directory,
            dtype=getattr(torch, self.dtype),
            device=self.world.device,
            trust_remote_code=self.config.trust_remote_code,
        )

    def open_texts(self, *, token_limit: int, written: dict[str, TokenStore] | None = None) -> None:
        """Tokenizer, the texts that are measured, and the training data. Raises UserError where a file of theirs changes
        meanwhile."""
        texts = data.parse_sources(self.config.data)
        with data.unchanged([*texts, *data.parse_sources(self.config.eval_data, "--eval-data")]):
            self._open_texts(texts, token_limit, written or {})

    def _open_texts(self, texts: list[data.Source], token_limit: int, written: dict[str, TokenStore]) -> None:
        config = self.config
        self.tokenizer = models.load_tokenizer(
            models.resolve(str(self.directory)), trust_remote_code=config.trust_remote_code
        )
        documents = evaluation_documents(config, texts, self.tokenizer)
        self.texts = [MeasuredText(name, data.tokenize(found, self.tokenizer)) for name, found in documents.items()]
        self.data = data.open_training_data(
            texts,
            self.tokenizer,
            options=data_options(config),
            token_limit=token_limit,
            written=written,
            say=self.watch.say,
        )
        self.overlap = data.overlaps(self.data, documents, say=self.watch.say)

    def measure(self, stage: str, model: Any, *, shared: bool = True) -> None:
        """The model's perplexity on each text, by all processes, or by this one alone."""
        with self.clock.phase("evaluate"):
            world = self.world if shared else World(device=self.world.device)
            self.found[stage] = self._perplexities(model, world, self.watch.track, f"perplexity, {stage}")

    def on_the_way(self, model: Any) -> dict[str, dict[str, float | None]]:
        """In the middle of training: figure -> text -> value."""
        return {"perplexity": self._perplexities(model, self.world, no_progress, "")}

    def _perplexities(self, model: Any, world: World, track: Track, description: str) -> dict[str, float | None]:
        return {
            text.name: perplexity(
                model,
                text.tokens,
                context=self.config.context,
                max_windows=self.config.eval_windows,
                track=track,
                description=description,
                world=world,
            ).perplexity
            for text in self.texts
        }

    @property
    def perplexity(self) -> dict[str, float | None]:
        """Stage -> perplexity of the first text."""
        return {stage: values[self.texts[0].name] for stage, values in self.found.items()}

    def rows(self) -> list[dict[str, Any]]:
        """What was measured, text by text, as reports have it."""
        config = self.config
        return [
            {
                **text.facts(context=config.context, max_windows=config.eval_windows),
                **{stage: values[text.name] for stage, values in self.found.items()},
            }
            for text in self.texts
        ]
