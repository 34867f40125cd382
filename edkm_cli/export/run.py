"""What every run does that writes a directory: its texts, its identity, how it begins and goes on, what its report says.

`edkm compress`, `finetune` and `merge` are each a `Session` that tells the rest as the story of one run: open the output and
the texts, compare the identity with what is there, train in `DIR.partial`, read back, measure, commit.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

from edkm_cli import data, models
from edkm_cli.config import CHECKPOINTS, TextSettings, TrainingSettings, lengths_of, too_long
from edkm_cli.data.training import overlaps, require_held_out, unchanged
from edkm_cli.distributed import World
from edkm_cli.environment import hardware, peak_memory_bytes, versions
from edkm_cli.errors import Preempted, UserError
from edkm_cli.evaluate.texts import STAGES, Measurements
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.export.ownership import run_paths
from edkm_cli.files import digest
from edkm_cli.hf import load
from edkm_cli.initialize.layers import Layers
from edkm_cli.model_files import files_digest
from edkm_cli.progress import Clock, Observer
from edkm_cli.self_text import NOT_WRITTEN, keep_text, kept_text, self_text, text_shape
from edkm_cli.settings import part_of
from edkm_cli.train.teacher import RememberedTeacher, remember, require_labels

SELF_TEXT = "self-text.safetensors"  # among the checkpoints: what the model wrote for this run

# What may differ between a run and its resumption without changing the result.
_FREE = (
    *("output", "save_every", "keep", "trust_remote_code", "model", "log_with", "timeout_minutes", "memory"),
    *("max_perplexity_ratio", "gradient_checkpointing", "offload"),  # kept or computed again: the same numbers
    *("data_workers", "rebuild_cache"),
    *("compare_dense", "dense_learning_rate"),  # a training of its own, known by its rate
)
# These decide together, by their product with the number of processes, what a step sees.
_BATCH = ("batch_size", "gradient_accumulation")


class Session:
    """One run of a command that trains: `config` is the command's with nothing left open, `sources` what its `data` names.

    Its steps stand here in their order; models are loaded in `dtype`.
    """

    tokenizer: Any
    blocks: data.Blocks
    unfinished: dict[str, Any] | None = None
    text: Tensor | None = None  # that a model wrote for this run

    def __init__(
        self, config: Any, sources: Sequence[data.Source], world: World, watch: Observer, dtype: str, mixed: str = "no"
    ):
        self.config, self.sources, self.world, self.watch = config, sources, world, watch
        self.dtype, self.mixed_precision, self.clock = dtype, mixed, Clock()

    def run(self, option: str, model: str | Path, **options: bool) -> dict[str, Any]:
        """The run on the model that `option` names, and its report; `options` are those of `OutputDirectory`."""
        inputs = run_paths(self.config, option, model)
        with OutputDirectory(self.config.output, inputs=inputs, world=self.world, **options) as self.output:
            try:
                return self.steps()
            except Preempted:
                if self.world.on_main(lambda: self.output.marked() is not None):  # for all: `mark` is a collective
                    self.mark()  # with the time that this part has taken
                raise

    def steps(self) -> dict[str, Any]:
        """What the run does, in order."""
        raise NotImplementedError

    @property
    def writes_text(self) -> bool:
        """Whether a model writes some of the training text."""
        return any(source.needs_model for source in self.sources)

    def open_texts(
        self, architecture: Any, *, token_limit: int, written_limit: int | None = None, stages: Sequence[str] = STAGES
    ) -> None:
        """The texts that are measured at `stages`, and the training data, of which there is a use for so many tokens, but
        what a model is yet to write (`written_limit` tokens, if it is given). Raises UserError where a text cannot be had,
        changes while it is read, or has tokens that the model of this configuration has no embeddings of."""
        config, say = part_of(TextSettings, self.config), self.watch.say
        for warning in too_long(architecture, lengths_of(self.config)):
            say(f"WARNING: {warning}")
        self._written_limit = written_limit or token_limit
        with unchanged([*self.sources, *data.parse_sources(config.eval_data, "--eval-data")]):
            self._documents = evaluation_documents(config, self.sources, self.tokenizer)
            texts = {name: data.tokenize(text, self.tokenizer) for name, text in self._documents.items()}
            self.measured = Measurements(texts, config.context, config.eval_windows, self.watch.track, stages)
            about: dict[str, Any] = {"options": config, "token_limit": token_limit, "say": say}
            about["written"] = NOT_WRITTEN if self.writes_text else None
            self.data = data.open_training_data(self.sources, self.tokenizer, **about)
        rows = getattr(architecture.get_text_config(decoder=True), "vocab_size", len(self.tokenizer))
        if rows < len(self.tokenizer) and (highest := self.data.highest_token()) >= rows:  # one that was added
            raise UserError(f"--data has token {highest}, the model has {rows} embeddings; leave out what has it")
        self._overlap = overlaps(self.data, self._documents, say=say)

    def copy_processor(self, source: models.ModelSource, directory: Path) -> None:
        """Copy what says how a model gets images, where there is any. Raises UserError if it cannot be had."""
        where = {"revision": source.revision, "local_files_only": source.is_local}
        for name in ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"):
            with models.loading(source):
                file = cached_file(source.location, name, _raise_exceptions_for_missing_entries=False, **where)
            if file is not None:
                shutil.copyfile(file, directory / name)

    def lay_out(self) -> None:
        """Divide the training text into blocks. Raises UserError where it is too short, or no step has a token to learn."""
        self.blocks = self.data.blocks(self.config.sequence_length, seed=self.config.seed)
        require_labels(self.blocks, part_of(TrainingSettings, self.config), self.world)

    def finished(self, report: str, asked: Any, **resolved: Any) -> dict[str, Any] | None:
        """To resume: the report of a finished run that is this one. Where there is none, `unfinished` is what is recorded of
        one that was interrupted.

        A run is known by its settings, sequences a step, digests of all tokens, and `resolved`, the digest of the model's
        files among it. Batch size, accumulation and the number of processes may change as long as their product stays: the
        run then goes on with the same data, equal to rounding. Text that the model writes itself follows from the rest.
        """
        config, output = self.config, self.output
        self.identity = {
            **{key: value for key, value in asdict(config).items() if key not in (*_FREE, *_BATCH)},
            "sequences_per_step": config.step_sequences(self.world.size) if config.steps else 0,
            "tokens_sha256": self.data.sha256,
            "evaluation_sha256": digest(self.measured.texts.items()),
            **resolved,
        }
        if self.world.any(self.world.on_main(lambda: self.identity) != self.identity):
            rule = "all processes must have the same settings, model and texts, but they differ"
            raise UserError(f"{rule}; give each node the same files", everywhere=True)
        if (content := output.finished(report, self.identity, asdict(asked))) is None:
            self.unfinished = output.unfinished(self.identity)
        else:
            self.watch.say(f"{config.output} is finished already")
        return content

    def write_text(self, layers: Layers | None) -> None:
        """Take up the text that the model of `layers` writes itself, where the data ask for it, and lay out all of it.

        What an unfinished run kept is taken instead: on another machine, without the cache, the model would write another
        one, and training could not go on. Raises UserError where that is damaged, or, before anything is written, where it
        will be too short.
        """
        if self.writes_text:
            assert layers is not None
            as_long = torch.zeros(text_shape(layers.model.config, self._written_limit), dtype=torch.int64)
            self.data = self.data.with_written(data.store_of(as_long.numpy()))
            self.lay_out()
            sha256 = (self.unfinished or {}).get("text_sha256")
            self.text = self._new_text(layers) if sha256 is None else self._kept_text(sha256)
            self.data = self.data.with_written(data.store_of(self.text.numpy()))
            self._overlap = overlaps(self.data, self._documents, say=lambda line: None)
            self.lay_out()

    def _new_text(self, layers: Layers) -> Tensor:
        self.watch.say("the model writes its own text, once")
        about: dict[str, Any] = {"tokens": self._written_limit, "seed": self.config.seed}
        about |= {"weights_sha256": self.weights_sha256(layers), "track": self.watch.track}
        return self.world.broadcast(self_text(layers.model, self.tokenizer, gathered=layers.gathered(), **about))

    def weights_sha256(self, layers: Layers) -> str:
        """A digest that tells the model that writes the text from others."""
        return digest(layers.named_parameters())

    def _kept_text(self, sha256: str) -> Tensor:
        path = self.output.partial / CHECKPOINTS / SELF_TEXT
        text = kept_text(path) if self.world.main else None
        if not self.world.on_main(lambda: text is not None and digest([("", text)]) == sha256):
            rule = f"--resume needs the text that the model wrote for this run, but {path} is damaged or missing"
            raise UserError(f"{rule}; start again with --overwrite", everywhere=True)
        return self.world.broadcast_whole(text)

    def measure_original(self, layers: Layers) -> None:
        """Measure the uncompressed model, and remember what later stages are compared with."""
        with self.clock.phase("evaluate"), layers.at_hand() as model:
            why_not = self.measured.measure_original(model, self.world)
        if why_not:
            self.watch.say(f"KL and agreement are not measured: {why_not}")

    def measure(self, stage: str, model: Any, *, shared: bool = True) -> None:
        """The model's perplexity on each text, by all processes, or by this one alone."""
        with self.clock.phase("evaluate"):
            world = self.world if shared else World(device=self.world.device)
            # Of several processes, each remembers what it has seen of the uncompressed model.
            self.measured.measure(stage, model, world, compare=world.size == self.world.size)

    def begin(self) -> Path:
        """Make the place of the unfinished result; what an interrupted run left there stays, and counts as measured."""
        staging = self.output.begin(keep=self.unfinished is not None)
        if self.unfinished is not None:
            self.measured.by_stage.update(self.unfinished["measured"])
            for phase, seconds in self.unfinished.get("seconds", {}).items():
                self.clock.seconds[phase] = round(self.clock.seconds.get(phase, 0.0) + seconds, 3)
        self.mark()
        return staging

    def mark(self) -> None:
        """Record what this run is, what it has measured so far, and the text that the model wrote for it."""
        figures: dict[str, Any] = {"measured": self.measured.by_stage, "seconds": self.clock.seconds}
        if self.text is not None:
            path = self.output.partial / CHECKPOINTS / SELF_TEXT
            figures["text_sha256"] = digest([("", self.text)])
            if self.world.main and not path.is_file():
                keep_text(path, self.text)
        self.output.mark(self.identity, **figures)

    def remember(self, layers: Layers, model_sha256: str) -> RememberedTeacher:
        """What the uncompressed model predicts of all that training will see, kept on disk."""
        with self.clock.phase("teacher"), layers.at_hand() as model:
            options: dict[str, Any] = {"track": self.watch.track, "say": self.watch.say, "world": self.world}
            options["model_sha256"] = model_sha256 + models.config_digest(model.config)
            return remember(model, self.blocks, self.config, mixed_precision=self.mixed_precision, **options)

    def training(self, staging: Path) -> dict[str, Any]:
        """What every training gets, beside what trains, by which objective, settings and text."""
        shown: dict[str, Any] = {"track": self.watch.track, "show": self.watch.show}
        shown["measure"] = partial(self.measured.on_the_way, world=self.world)
        return {"staging": staging, "world": self.world, "mixed_precision": self.mixed_precision, **shown}

    def load_model(self, directory: Path) -> Any:
        """A compressed model, on the world's device."""
        dtype, trust = getattr(torch, self.dtype), self.config.trust_remote_code
        return load(directory, dtype=dtype, device=self.world.device, trust_remote_code=trust)

    def facts(self, config: Any) -> dict[str, Any]:
        """What every report says of its run: figures, settings as they were given, time, memory, versions and hardware."""
        rows = self.measured.rows()
        for row in rows:  # how much of each measured text is trained on, too
            row["measured_and_trained_on"] = dict(zip(("found", "of"), self._overlap[row["data"]], strict=True))
        return {
            "perplexity": self.measured.perplexity,
            "texts": rows,
            "processes": self.world.size,
            "seconds": self.clock.seconds,
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "config": asdict(config),
            "versions": versions(),
            "hardware": hardware(self.world.device),
        }

    def trained_on(self) -> dict[str, Any]:
        """`data` of a report."""
        overlap = [sum(counts) for counts in zip(*self._overlap.values(), strict=True)]
        measured = dict(zip(("found", "of"), overlap, strict=True))
        return {**self.data.summary(self.blocks), "measured_and_trained_on": measured}


def model_digest(source: models.ModelSource, architecture: Any) -> str:
    """What tells a model from another: its files, or of one of the hub its revision."""
    if source.path is not None:
        return files_digest(source.path)
    return getattr(architecture, "_commit_hash", None) or models.config_digest(architecture)


def evaluation_names(config: TextSettings, texts: Sequence[data.Source]) -> dict[str, str]:
    """What the measured texts are called in reports -> the source that they are or are held out of: each --eval-data, or
    a part of the first --data. A text that the model is yet to write cannot be measured on: `builtin` takes its place.
    `texts` are what `config.data` names."""
    names = config.eval_data or ((data.BUILTIN,) if texts[0].needs_model else ())
    return {name: name for name in names} or {f"held-out part of {config.data[0]}": config.data[0]}


def evaluation_documents(config: TextSettings, texts: Sequence[data.Source], tokenizer: Any) -> dict[str, list[str]]:
    """The measured texts, by name; `texts` are trained on. Raises UserError where one cannot be had, or is among these."""
    needed = data.characters_of(config.eval_windows * config.context)  # of a text that is not read as a whole
    documents = {}
    for name, text in evaluation_names(config, texts).items():
        held_out = name != text
        source = data.parse_source(text, "--data" if held_out else "--eval-data")
        if not held_out:
            require_held_out(list(texts), source)
        split = "test" if held_out else None
        documents[name] = data.load_documents(source, split, tokenizer=tokenizer, options=config, characters=needed)
    return documents
