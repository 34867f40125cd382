"""One compression run from the model's name to a verified checkpoint: the steps of `edkm compress`, in order."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edkm_cli import model_files, models
from edkm_cli.clustering import temperature_at
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World, open_world, peers
from edkm_cli.errors import UserError
from edkm_cli.evaluate.limits import require_ratio, require_same_perplexity
from edkm_cli.evaluate.size import footprint, table_use, table_warnings
from edkm_cli.evaluate.texts import DENSE
from edkm_cli.export.checkpoint import DenseFormat, rehearse_export, write_checkpoint
from edkm_cli.export.formats.gguf_model import tokenizer_fault
from edkm_cli.export.run import Session, model_digest
from edkm_cli.files import require_room, write_json
from edkm_cli.hf import load_source
from edkm_cli.initialize.build import Recipe, initialize, restore
from edkm_cli.initialize.compensate import few_tokens, rerouted
from edkm_cli.initialize.kept import STATE, KeptStart
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.sharded import build_sharded, open_layers
from edkm_cli.integrity import stored_skeleton
from edkm_cli.model_files import stored_dtypes
from edkm_cli.nn.clustered import lut_layers
from edkm_cli.nn.hooks import language_model
from edkm_cli.preflight import RunPlan, calibration_text, choose_device, needed_tokens, plan_run, start_batches
from edkm_cli.progress import Observer
from edkm_cli.summaries import card
from edkm_cli.train.loop import require_launch, train, train_dense
from edkm_cli.train.losses import Objective
from edkm_cli.train.packed import require_attention_within_documents
from edkm_cli.train.state import CHECKPOINTS, require_none
from edkm_cli.train.teacher import RememberedTeacher, require_place

Planned = Callable[[RunPlan], None]


def compress(
    config: CompressConfig, *, observer: Observer | None = None, planned: Planned = lambda plan: None, **options: bool
) -> dict[str, Any]:
    """Run `edkm compress` and return its report (its keys: docs/results.md).

    Where a launcher started several processes, all call this; the first one writes and reports.

    With the option `resume`, an unfinished run in `DIR.partial` goes on from its newest checkpoint and ends with the same
    weights as if it had not been interrupted; where there is none, the run starts, and a finished one is returned as it is.
    With `overwrite` a result that is there already is replaced.
    `planned` is called with the plan, before anything is loaded.

    Raises UserError for anything the user can mend, before the first expensive step wherever that is possible, PeerLost
    where another process is gone; the output directory then is as it was.
    """
    world = open_world(choose_device(config.device), sharding=config.sharding, timeout_minutes=config.timeout_minutes)
    watch = observer if observer is not None and world.main else Observer()
    with peers(world):
        return Run(config, world, watch, planned).run("--model", config.model, **options)


class Run(Session):
    """One run: its plan, what it has measured so far, and its steps in order, each a method."""

    def __init__(self, config: CompressConfig, world: World, watch: Observer, planned: Planned):
        require_launch(config, world)
        self.plan = plan = plan_run(config, world)
        planned(plan)
        rehearse_export(plan)
        resolved = plan.config
        super().__init__(resolved, plan.texts, world, watch, dtype=resolved.dtype, mixed=resolved.mixed_precision)
        self.few_tokens: dict[str, int] = {}  # of experts that few tokens of the start's reached
        self.rerouted: dict[str, float] = {}  # shares of these tokens that go to other experts than before

    @property
    def exports_start(self) -> bool:
        """Whether what is exported is the start itself, so that measuring both in full would tell the same twice."""
        return not self.config.steps and self.world.size == 1

    def steps(self) -> dict[str, Any]:
        self.output.rehearse(self.plan.needed_bytes)
        torch.manual_seed(self.config.seed)
        self._open_texts()
        state = partial(model_files.files_state, self.plan.source.path)
        files = self.world.on_main(state)
        sha256 = model_digest(self.plan.source, self.plan.architecture)
        if (report := self.finished("report.json", self.plan.asked, model_sha256=sha256)) is not None:
            return report
        remedy = "free some, or set TMPDIR to another disk"
        waiting = 0 if (self.output.partial / CHECKPOINTS / "start" / STATE).is_file() else self.plan.waiting_bytes
        require_room(Path(tempfile.gettempdir()), waiting, "temporary files of the start need", remedy)
        if self.plan.distills:
            require_place()
        dense = self._load()
        self.measure_original(dense)
        staging = self.begin()
        if language_model(self.plan.skeleton) and self.world.main:
            self.copy_processor(self.plan.source, staging)
        teacher = self.remember(dense, sha256) if self.plan.distills else None
        model = self._start(dense, staging)
        del dense
        if self.world.on_main(state) != files:
            raise UserError(f"--model {self.config.model} changed while it was read; start again when it is whole")
        if self.exports_start:
            with self.clock.phase("evaluate"):
                self.first_windows = self.measured.first_windows(model, self.world)
        elif "start" not in self.measured.by_stage:
            self.measure("start", model)
            self.mark()
        offloaded = self._train(model, teacher, staging)
        with self.clock.phase("export"):
            options: dict[str, Any] = {"track": self.watch.track, "world": self.world}
            write_checkpoint(model, self.tokenizer, staging, self.plan.spec, dense=self.dense_format, **options)
        del model
        if self.config.compare_dense:
            self._train_dense(teacher, staging)
        del teacher
        return self.world.on_main(lambda: self._finish(staging, offloaded))

    def _open_texts(self) -> None:
        """Tokenizer and texts, but what the model is yet to write."""
        config, plan = self.config, self.plan
        with self.clock.phase("load"):
            self.tokenizer = models.load_tokenizer(plan.source)
            model_files.check_tokenizer(config.model, self.tokenizer, plan.architecture)
            gguf = (config.target or "").startswith("gguf") and not plan.source.gguf_file
            if gguf and (fault := tokenizer_fault(self.tokenizer)):
                self.watch.say(f"WARNING: edkm export will need --base-gguf: {fault}")
            written = needed_tokens(plan, written=True)
            self.open_texts(plan.architecture, token_limit=needed_tokens(plan), written_limit=written)
            if not plan.writes_text:  # too few tokens are refused before the model is read
                self.lay_out()

    def _load(self) -> Layers:
        """The dense model; what it writes itself, if `--data self` asks for it, is among the texts then."""
        config, plan = self.config, self.plan
        with self.clock.phase("load"):
            dense = None
            if plan.streams:  # decoder layers stay in the files, where these can be read so
                self.watch.say(f"reading {config.model} layer by layer ({config.dtype}, {self.world})")
                options: dict[str, Any] = {"device": self.world.device, "dequantize": config.dequantize}
                dense = open_layers(plan.source, dtype=getattr(torch, config.dtype), **options)
            dense = dense or Layers(self._load_dense())
            model_files.require_finite(config.model, dense)
            dtype = getattr(torch, models.stored_dtype(plan.source, plan.architecture, plan.dense_dtype))
            stored = {f"{swap.name}.weight": dtype for swap in plan.swaps if not swap.reason}
            stored |= stored_dtypes(plan.source.path or models.safetensors_directory(plan.source))
            self.dense_format = DenseFormat.of(dense, dtype, stored, world=self.world)
            if config.packing and config.steps:
                with dense.at_hand() as model:
                    require_attention_within_documents(model)
            self.write_text(dense)
        return dense

    def _load_dense(self) -> Any:
        config, plan, world = self.config, self.plan, self.world
        self.watch.say(f"loading {config.model} ({config.dtype}, {world})")
        if world.sharded:
            return self._build(plan.dense_dtype, trainable=False)
        return load_source(plan.source, dequantize=config.dequantize, dtype=config.dtype, device=world.device)

    def _build(self, dtype: str, *, trainable: bool, **steps: Any) -> Any:
        """The sharded model: see `build_sharded`."""
        return build_sharded(self.plan.source, self.world, dtype=getattr(torch, dtype), trainable=trainable, **steps)

    def _start(self, dense: Layers, staging: Path) -> Any:
        """The clustered model: see `initialize`; from the disk where a resumed run finds it."""
        config, plan, world = self.config, self.plan, self.world
        build = partial(self._build, config.dtype, trainable=True) if world.sharded else None
        options: dict[str, Any] = {"world": world, "build": build}
        kept = KeptStart(staging / CHECKPOINTS / "start", world)
        with self.clock.phase("start"):
            state = kept.state() if self.unfinished is not None else None
            if state is not None:
                self.plan = plan.with_bits(state["module_bits"])
                model = restore(dense.model, Recipe.of(self.plan), kept, **options)
            else:
                require_none(staging, world)
                calibration, fitting = calibration_text(self.data, plan), start_batches(self.data, plan)
                options |= {"kept": kept if plan.by_layer else None, "track": self.watch.track}
                model = initialize(dense, Recipe.of(plan), calibration=calibration, fitting=fitting, **options)
                self.plan = plan.with_bits({name: one.clustering.bits for name, one in lut_layers(model).items()})
                kept.write(model, self.plan.spec.module_bits)
        if config.start != "kmeans":
            self.few_tokens = few_tokens(model, self.watch.say)
            self.rerouted = rerouted(model, self.watch.say)
        if not config.steps:
            self.dense_format.settle(model)
        return model

    def _train(self, model: Any, teacher: RememberedTeacher | None, staging: Path) -> dict[str, Any]:
        config = self.config
        if not config.steps:
            return {}
        with self.clock.phase("train"):
            objective = Objective(teacher, label_weight=config.label_weight or 0.0)
            ends = {"start": config.temperature, "end": config.temperature_end}
            at = partial(temperature_at, steps=config.steps, schedule=config.temperature_schedule, **ends)
            offloaded = train(model, objective, self.blocks, config, temperature=at, **self.training(staging))
        self.dense_format.settle(model)
        self.measure("trained", model)
        return offloaded

    def _train_dense(self, teacher: RememberedTeacher | None, staging: Path) -> None:
        """The uncompressed model, trained equally and measured."""
        with self.clock.phase("dense"):
            model = self._build(self.config.dtype, trainable=True) if self.world.sharded else self._load_dense()
            train_dense(model, teacher, self.blocks, self.config, **self.training(staging))
        self.measure(DENSE, model)

    def _finish(self, staging: Path, offloaded: dict[str, Any]) -> dict[str, Any]:
        """On the first process: load what was written, measure it, report, and put it in its place."""
        with self.clock.phase("export"):
            exported = self.load_model(staging)
        if self.exports_start:
            with self.clock.phase("evaluate"):
                read_back = self.measured.first_windows(exported, self.world)
            for before, after in zip(self.first_windows, read_back, strict=True):
                require_same_perplexity({"trained": None, "start": before, "exported": after}, self.dtype)
        self.measure("exported", exported, shared=False)
        if self.exports_start:
            self.measured.by_stage["start"] = self.measured.by_stage["exported"]
        for row in self.measured.rows():
            require_same_perplexity(row, self.dtype)
        stored = stored_skeleton(staging, trust_remote_code=self.config.trust_remote_code)
        result = {**self._report(staging, footprint(stored), offloaded), "tables": table_use(exported)}
        for line in table_warnings(result["tables"]):
            self.watch.say(line)
        write_json(staging / "report.json", result)
        for row in result["texts"]:
            about = self.config.max_perplexity_ratio, staging, "train longer, use more bits, or allow more"
            require_ratio(row, ("original", "exported"), *about)
        source = self.plan.source
        page = card("model", result, base_model=None if source.is_local else source.location)
        (staging / "README.md").write_text(page, encoding="utf-8")
        self.output.commit()
        return result

    def _report(self, staging: Path, size: Any, offloaded: dict[str, Any]) -> dict[str, Any]:
        """What report.json holds (docs/results.md)."""
        config, plan, facts = self.config, self.plan, self.facts(self.plan.asked)
        return {
            "model": config.model,
            "output": str(self.output.path),
            "evaluation": {name: facts["texts"][0][name] for name in ("data", "context", "windows", "tokens")},
            "data": self.trained_on(),
            "allocation": config.allocation,
            "weights_bytes": model_files.weight_files_bytes(staging),
            "original_weights_bytes": 2 * plan.parameters,
            "parameters": size.parameters,
            "decoder_bits_per_weight": size.decoder_bits_per_weight,
            "model_bits_per_weight": size.model_bits_per_weight,
            "steps": config.steps,
            "training_tokens": plan.training_tokens,
            "sharded": self.world.sharded,
            **({"offload": offloaded} if offloaded else {}),
            "swapped": [swap.to_mapping() for swap in plan.swaps if not swap.reason],
            "skipped": [swap.to_mapping() for swap in plan.swaps if swap.reason],
            **({"few_tokens": self.few_tokens, "rerouted": self.rerouted} if plan.spec.split_experts else {}),
            "resolved": plan.resolved,
            **facts,
        }
