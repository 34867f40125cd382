"""What every run does that writes a directory: its texts, its identity, what its report says of the machine.

`edkm compress`, `finetune` and `merge` tell the rest, each as the story of one run: open the output (`OutputDirectory`) and
the texts, compare the identity with what is there, train in `DIR.partial`, read back, measure, commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from edkm_cli import data, models
from edkm_cli.config import TextSettings
from edkm_cli.distributed import World
from edkm_cli.environment import hardware, peak_memory_bytes, versions
from edkm_cli.errors import UserError
from edkm_cli.evaluate.texts import STAGES, MeasuredText, Measurements
from edkm_cli.format import digest
from edkm_cli.initialize.layers import Layers
from edkm_cli.model_files import files_digest
from edkm_cli.progress import Clock, Observer
from edkm_cli.self_text import keep_text, kept_text, self_text, store_of
from edkm_cli.settings import part_of

SELF_TEXT = "self-text.safetensors"  # among the checkpoints: what the model wrote for this run

# What may differ between a run and its resumption without changing the result.
_FREE = (
    *("output", "save_every", "keep", "trust_remote_code", "model", "log_with", "timeout_minutes", "memory"),
    "max_perplexity_ratio",
    *("data_workers", "rebuild_cache"),
    *("compare_dense", "dense_learning_rate"),  # a training of its own, known by its rate
)
_LONGEST_TOKEN = 20  # characters, on average over any text
# These decide together, by their product with the number of processes, what a step sees.
_BATCH = ("batch_size", "gradient_accumulation")


def identity_of(config: Any, texts: Texts, *, processes: int, model_sha256: str, **more: Any) -> dict[str, Any]:
    """What decides a run's result: settings, sequences a step, digests of the model's files and of all tokens, and `more`.

    Batch size, accumulation and the number of processes may change as long as their product stays: the run then goes
    on with the same data, equal to rounding. Text that the model writes itself follows from the rest; a run keeps it.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in (*_FREE, *_BATCH)}
    return {
        **settings,
        "sequences_per_step": config.batch_size * config.gradient_accumulation * processes,
        "model_sha256": model_sha256,
        "tokens_sha256": texts.sha256,
        "evaluation_sha256": digest((text.name, text.tokens) for text in texts.measured.texts),
        **more,
    }


def model_digest(source: models.ModelSource, architecture: Any, world: World) -> str:
    """What tells a model from another: its files, or of one of the hub its revision."""
    if source.path is not None:
        return world.on_main(partial(files_digest, source.path))
    return getattr(architecture, "_commit_hash", None) or models.config_digest(architecture)


class Texts:
    """The texts of a run: what is measured, with its figures, and what is trained on. `config` is that of any command."""

    def __init__(
        self,
        config: Any,
        sources: Sequence[data.Source],
        tokenizer: Any,
        *,
        token_limit: int,
        watch: Observer,
        stages: Sequence[str] = STAGES,
        written: data.TokenStore | None = None,
    ):
        """Raises UserError where a text cannot be had, or changes while it is read.

        Args:
            sources: what `config.data` names.
            token_limit: of the training data, that there is a use for.
            stages: at which the measured texts are measured.
            written: what the model has written itself; `self_text.NOT_WRITTEN` where it is yet to (`write`).
        """
        self.tokenizer, self._watch, config = tokenizer, watch, part_of(TextSettings, config)
        with data.unchanged([*sources, *data.parse_sources(config.eval_data, "--eval-data")]):
            self.documents = evaluation_documents(config, sources, tokenizer)
            self.measured = Measurements(
                [MeasuredText(name, data.tokenize(text, tokenizer)) for name, text in self.documents.items()],
                context=config.context,
                max_windows=config.eval_windows,
                track=watch.track,
                stages=stages,
            )
            self.data = data.open_training_data(
                sources,
                tokenizer,
                options=data_options(config),
                token_limit=token_limit,
                written={data.SELF: written} if written is not None else None,
                say=watch.say,
            )
        self.sha256 = self.data.sha256
        self.overlap = data.overlaps(self.data, self.documents, say=watch.say)

    def write(self, text: Tensor) -> None:
        """Take up the text that the model has written itself, (sequences, length) token ids."""
        self.data = self.data.with_written(store_of(text))
        self.overlap = data.overlaps(self.data, self.documents, say=lambda line: None)

    def rows(self) -> list[dict[str, Any]]:
        """`texts` of a report: what was measured, text by text, and how much of each is trained on, too."""
        rows = self.measured.rows()
        for row in rows:
            row["measured_and_trained_on"] = dict(zip(("found", "of"), self.overlap[row["data"]], strict=True))
        return rows

    def summary(self, blocks: data.Blocks) -> dict[str, Any]:
        """`data` of a report."""
        overlap = [sum(counts) for counts in zip(*self.overlap.values(), strict=True)]
        return {
            **self.data.summary(blocks),
            "measured_and_trained_on": dict(zip(("found", "of"), overlap, strict=True)),
        }


def data_options(config: TextSettings) -> data.DataOptions:
    """How training data are read and laid out."""
    return data.DataOptions(
        column=config.data_column,
        streaming=config.streaming,
        train_on=config.train_on,
        packing=config.packing,
        long_records=config.long_records,
        workers=config.data_workers,
        rebuild=config.rebuild_cache,
    )


def evaluation_names(config: TextSettings, texts: Sequence[data.Source]) -> dict[str, str]:
    """What the measured texts are called in reports -> the source that they are or are held out of: each --eval-data, or
    a part of the first --data. A text that the model is yet to write cannot be measured on: `builtin` takes its place.
    `texts` are what `config.data` names."""
    names = config.eval_data or ((data.BUILTIN,) if texts[0].needs_model else ())
    return {name: name for name in names} or {f"held-out part of {config.data[0]}": config.data[0]}


def evaluation_documents(config: TextSettings, texts: Sequence[data.Source], tokenizer: Any) -> dict[str, list[str]]:
    """The texts that are measured, by name; `texts` are what is trained on. Raises UserError where one cannot be had, or is
    trained on."""
    needed = _LONGEST_TOKEN * config.eval_windows * config.context  # of a text that is not read as a whole
    documents = {}
    for name, text in evaluation_names(config, texts).items():
        held_out = name != text
        source = data.parse_source(text, "--data" if held_out else "--eval-data")
        if not held_out:
            data.require_held_out(list(texts), source)
        documents[name] = data.load_documents(
            source, "test" if held_out else None, tokenizer=tokenizer, options=data_options(config), characters=needed
        )
    return documents


class WrittenText:
    """The text that a model writes itself for a run, kept in `DIR.partial`: on another machine, without the cache, the
    model would write another one, and training could not go on."""

    def __init__(self, directory: Path, world: World):
        self._path, self._world = directory / "checkpoints" / SELF_TEXT, world

    def read(self, recorded: Mapping[str, Any] | None) -> Tensor | None:
        """What an unfinished run kept. Raises UserError where it is damaged, or none is left that it had."""
        sha256 = recorded.get("text_sha256") if recorded is not None else None
        if sha256 is None:
            return None
        text = kept_text(self._path) if self._world.main else None
        if not self._world.on_main(lambda: text is not None and _sha256(text) == sha256):
            raise UserError(
                f"--resume needs the text that the model wrote for this run, but {self._path} is damaged or missing; start "
                "again with --overwrite",
                everywhere=True,
            )
        return self._world.broadcast_whole(text)

    def of(
        self,
        recorded: Mapping[str, Any] | None,
        layers: Layers,
        tokenizer: Any,
        *,
        tokens: int,
        seed: int,
        watch: Observer,
    ) -> Tensor:
        """What an unfinished run kept, or else what the model of `layers` writes now."""
        text = self.read(recorded)
        if text is not None:
            return text
        watch.say("the model writes its own text, once")
        sha256 = digest((name, parameter.detach()) for name, parameter in layers.named_parameters())
        options: dict[str, Any] = {"tokens": tokens, "seed": seed, "weights_sha256": sha256, "track": watch.track}
        return self._world.broadcast(self_text(layers.model, tokenizer, gathered=layers.gathered(), **options))

    def keep(self, text: Tensor | None) -> dict[str, Any]:
        """Write it down; returns what the run's mark says of it."""
        if text is None:
            return {}
        if self._world.main and not self._path.is_file():
            keep_text(self._path, text)
        return {"text_sha256": _sha256(text)}


def _sha256(text: Tensor) -> str:
    return hashlib.sha256(text.numpy().tobytes()).hexdigest()


def machine_facts(config: Any, clock: Clock, world: World) -> dict[str, Any]:
    """What every report says of its run: settings, time and memory, versions and hardware."""
    return {
        "processes": world.size,
        "seconds": clock.seconds,
        "peak_memory_bytes": peak_memory_bytes(world.device),
        "config": asdict(config),
        "versions": versions(),
        "hardware": hardware(world.device),
    }
