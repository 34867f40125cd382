"""One compression run from the model's name to a verified checkpoint: the steps of `edkm compress`, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edkm_cli import models
from edkm_cli.clustering import temperature_at
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World, open_world, peers
from edkm_cli.evaluate.limits import require_ratio, require_same_perplexity
from edkm_cli.evaluate.size import footprint
from edkm_cli.evaluate.tables import table_use, table_warnings
from edkm_cli.evaluate.texts import DENSE
from edkm_cli.export.checkpoint import DenseFormat, write_checkpoint
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.export.model_card import model_card
from edkm_cli.export.ownership import run_paths
from edkm_cli.export.rehearsal import rehearse_export
from edkm_cli.export.run import Texts, WrittenText, identity_of, machine_facts, model_digest
from edkm_cli.format import write_json
from edkm_cli.hf import load, load_source
from edkm_cli.initialize.build import Recipe, initialize, initialize_by_layer, restore
from edkm_cli.initialize.kept import KeptStart
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.sharded import build_sharded, open_layers
from edkm_cli.integrity import stored_skeleton
from edkm_cli.model_files import stored_dtypes
from edkm_cli.nn.swap import decoder_bits_per_weight
from edkm_cli.preflight import (
    Launch,
    RunPlan,
    calibration_text,
    choose_device,
    needed_tokens,
    plan_run,
    start_batches,
)
from edkm_cli.progress import Clock, Observer
from edkm_cli.self_text import NOT_WRITTEN
from edkm_cli.train.dense import train_dense
from edkm_cli.train.loop import require_accumulation, train
from edkm_cli.train.losses import Objective
from edkm_cli.train.metrics import require_trackers
from edkm_cli.train.optimizer import require_optimizer
from edkm_cli.train.packed import require_attention_within_documents
from edkm_cli.train.state import CHECKPOINTS, require_none
from edkm_cli.train.teacher import RememberedTeacher, remember


def compress(
    config: CompressConfig,
    *,
    overwrite: bool = False,
    resume: bool = False,
    observer: Observer | None = None,
    planned: Callable[[RunPlan], None] = lambda plan: None,
) -> dict[str, Any]:
    """Run `edkm compress` and return its report (its keys: docs/results.md).

    Where a launcher started several processes, all call this; the first one writes and reports.

    With `resume`, an unfinished run in `DIR.partial` goes on from its newest checkpoint and ends with the same weights
    as if it had not been interrupted; where there is none, the run starts, and a finished one is returned as it is.
    `planned` is called with the plan, before anything is loaded.

    Raises UserError for anything the user can mend, before the first expensive step wherever that is possible, PeerLost
    where another process is gone; the output directory then is as it was.
    """
    world = open_world(choose_device(config.device), sharding=config.sharding, timeout_minutes=config.timeout_minutes)
    watch = observer if observer is not None and world.main else Observer()
    with peers(world):
        return Run(config, world, watch, planned).run(overwrite=overwrite, resume=resume)


class Run:
    """One run: its plan, what it has measured so far, and its steps in order, each a method."""

    def __init__(self, config: CompressConfig, world: World, watch: Observer, planned: Callable[[RunPlan], None]):
        require_trackers(config)
        require_optimizer(config, world)
        require_accumulation(config)
        self.plan = plan = plan_run(config, Launch.of(world))
        planned(plan)
        trust = config.trust_remote_code
        rehearse_export(plan.skeleton, plan.swaps, plan.spec, plan.clustering, trust_remote_code=trust)
        self.config, self.world, self.watch = plan.config, world, watch
        self.clock = Clock()
        for warning in plan.warnings:
            watch.say(f"WARNING: {warning}")

    @property
    def exports_start(self) -> bool:
        """Whether what is exported is the start itself, so that measuring both in full would tell the same twice."""
        return not self.config.steps and self.world.size == 1

    def run(self, *, overwrite: bool, resume: bool) -> dict[str, Any]:
        config, world = self.config, self.world
        inputs = run_paths(config, "--model", config.model)
        with OutputDirectory(config.output, inputs=inputs, overwrite=overwrite, resume=resume, world=world) as output:
            output.rehearse(self.plan.needed_bytes)
            return self._run(output)

    def _run(self, output: OutputDirectory) -> dict[str, Any]:
        torch.manual_seed(self.config.seed)
        self._open_texts()
        self.identity = self._identity()
        if (report := output.finished("report.json", self.identity, asdict(self.plan.asked))) is not None:
            self.watch.say(f"{self.config.output} is finished already")
            return report
        unfinished = output.unfinished(self.identity)
        dense = self._load(output, unfinished)
        why_not = self._measure_original(dense)
        if why_not:
            self.watch.say(f"KL and agreement are not measured: {why_not}")
        if unfinished is not None:
            self.measured.restore(unfinished["measured"])
        staging = output.begin(keep=unfinished is not None)
        self._mark(output)
        teacher = self._teacher(dense, self.identity) if self.plan.distills else None
        model = self._start(dense, staging, resumed=unfinished is not None)
        del dense
        if self.exports_start:
            with self.clock.phase("evaluate"):
                self.first_windows = self.measured.first_windows(model, self.world)
        elif "start" not in self.measured.state():
            self._measure("start", model)
            self._mark(output)
        offloaded = self._train(model, teacher, staging)
        self._export(model, staging)
        del model
        if self.config.compare_dense:
            self._train_dense(teacher, staging)
        del teacher
        return self.world.on_main(lambda: self._finish(output, staging, offloaded))

    # The steps.

    def _open_texts(self) -> None:
        """Tokenizer and texts, but what the model is yet to write."""
        config, plan = self.config, self.plan
        with self.clock.phase("load"):
            self.tokenizer = models.load_tokenizer(plan.source, trust_remote_code=config.trust_remote_code)
            models.check_tokenizer(config.model, self.tokenizer, plan.architecture)
            self.texts = Texts(
                config,
                plan.texts,
                self.tokenizer,
                token_limit=needed_tokens(plan),
                watch=self.watch,
                written=NOT_WRITTEN if plan.writes_text else None,
            )
            self.measured = self.texts.measured
            if not plan.writes_text:  # too few tokens are refused before the model is read
                self.texts.data.blocks(config.sequence_length, seed=config.seed)

    def _identity(self) -> dict[str, Any]:
        """What decides the result, and what `auto` stands for: the same however many processes."""
        model = model_digest(self.plan.source, self.plan.architecture, self.world)
        return identity_of(self.config, self.texts, processes=self.world.size, model_sha256=model)

    def _mark(self, output: OutputDirectory) -> None:
        """Record what this run is, what it has measured so far, and the text that the model wrote for it."""
        found = {"perplexity": self.measured.perplexity, "measured": self.measured.state()}
        output.mark(self.identity, **found, **self.own_text.keep(self.text))

    def _load(self, output: OutputDirectory, unfinished: dict[str, Any] | None) -> Layers:
        """The dense model; what it writes itself, if `--data self` asks for it, is among the texts then."""
        config, plan = self.config, self.plan
        self.own_text, self.text = WrittenText(output.partial, self.world), None
        with self.clock.phase("load"):
            dense = self._open_dense() or Layers(self._load_dense())
            if plan.writes_text:
                options: dict[str, Any] = {"tokens": needed_tokens(plan), "seed": config.seed, "watch": self.watch}
                self.text = self.own_text.of(unfinished, dense, self.tokenizer, **options)
                self.texts.write(self.text)
            models.require_finite(plan.source, dense)
            self.data = self.texts.data
            self.blocks = self.data.blocks(config.sequence_length, seed=config.seed)
            dtype = getattr(torch, models.stored_dtype(plan.source, plan.architecture, plan.dense_dtype))
            stored = {f"{swap.name}.weight": dtype for swap in plan.swaps if not swap.reason}
            stored |= stored_dtypes(plan.source.path)
            self.dense_format = DenseFormat.of(dense.model, dtype, stored, world=self.world)
            if config.packing and config.steps:
                require_attention_within_documents(dense.model)
        return dense

    def _open_dense(self) -> Layers | None:
        """The dense model whose decoder layers stay in its files; None where all of it is needed, or the files cannot."""
        plan, config = self.plan, self.config
        if not plan.by_layer or config.dequantize:
            return None
        self.watch.say(f"reading {config.model} layer by layer ({config.dtype}, {self.world})")
        return open_layers(
            plan.source,
            dtype=getattr(torch, config.dtype),
            device=self.world.device,
            trust_remote_code=config.trust_remote_code,
        )

    def _load_dense(self) -> Any:
        config, plan, world = self.config, self.plan, self.world
        self.watch.say(f"loading {config.model} ({config.dtype}, {world})")
        if world.sharded:
            dtype, trust = getattr(torch, plan.dense_dtype), config.trust_remote_code
            return build_sharded(plan.source, world, dtype=dtype, trainable=False, trust_remote_code=trust)
        return load_source(
            plan.source,
            dequantize=config.dequantize,
            dtype=config.dtype,
            device=world.device,
            trust_remote_code=config.trust_remote_code,
        )

    def _measure_original(self, dense: Layers) -> str | None:
        with self.clock.phase("evaluate"), dense.at_hand() as model:
            return self.measured.measure_original(model, self.world)

    def _measure(self, stage: str, model: Any) -> None:
        with self.clock.phase("evaluate"):
            self.measured.measure(stage, model, self.world)

    def _teacher(self, dense: Layers, identity: dict[str, Any]) -> RememberedTeacher:
        """What the uncompressed model predicts of all that training will see."""
        with self.clock.phase("teacher"), dense.at_hand() as whole:
            sha256 = identity["model_sha256"] + models.config_digest(whole.config)
            watch: dict[str, Any] = {"track": self.watch.track, "say": self.watch.say}
            options = {"world": self.world, "mixed_precision": self.config.mixed_precision, **watch}
            return remember(whole, self.blocks, self.config, model_sha256=sha256, **options)

    def _start(self, dense: Layers, staging: Path, *, resumed: bool) -> Any:
        """The clustered model: see `initialize`; from the disk where a resumed run finds it."""
        config, plan, world = self.config, self.plan, self.world
        options: dict[str, Any] = {"build": self._rebuild() if world.sharded else None, "world": world}
        kept = KeptStart(staging / CHECKPOINTS / "start", world)
        with self.clock.phase("start"):
            state = kept.state() if resumed else None
            if state is not None:
                self.plan = plan.with_bits(state["module_bits"])
                model = restore(dense.model, Recipe.of(self.plan), kept, **options)
            else:
                require_none(staging, world)
                calibration = calibration_text(self.data, plan)
                text: dict[str, Any] = {"calibration": calibration, "fitting": start_batches(self.data, plan)}
                if plan.by_layer:
                    watch: dict[str, Any] = {"world": world, "track": self.watch.track}
                    model = initialize_by_layer(dense, Recipe.of(plan), **text, **watch, kept=kept)
                else:
                    model = initialize(dense.model, Recipe.of(plan), **text, track=self.watch.track, **options)
                self.plan = plan.after_start(model)
                kept.write(model, self.plan.spec.module_bits)
        if not config.steps:
            self.dense_format.settle(model)
        return model

    def _rebuild(self) -> Any:
        """Makes the sharded model that trains: see `build_sharded`."""
        plan = self.plan
        return partial(
            build_sharded,
            plan.source,
            self.world,
            dtype=getattr(torch, plan.config.dtype),
            trainable=True,
            trust_remote_code=self.config.trust_remote_code,
        )

    def _train(self, model: Any, teacher: RememberedTeacher | None, staging: Path) -> dict[str, Any]:
        config = self.config
        if not config.steps:
            return {}
        with self.clock.phase("train"):
            objective = Objective(teacher, label_weight=config.label_weight or 0.0)
            options = {"staging": staging, "temperature": self._temperature, **self._training()}
            offloaded = train(model, objective, self.blocks, config, **options)
        self.dense_format.settle(model)
        self._measure("trained", model)
        return offloaded

    def _temperature(self, step: int) -> float:
        c = self.config
        return temperature_at(
            step, c.steps, schedule=c.temperature_schedule, start=c.temperature, end=c.temperature_end
        )

    def _training(self) -> dict[str, Any]:
        """What both trainings get."""
        return {
            "world": self.world,
            "mixed_precision": self.config.mixed_precision,
            "measure": partial(self.measured.on_the_way, world=self.world),
            "track": self.watch.track,
            "show": self.watch.show,
        }

    def _train_dense(self, teacher: RememberedTeacher | None, staging: Path) -> None:
        """The uncompressed model, trained equally and measured."""
        with self.clock.phase("dense"):
            model = self._rebuild()() if self.world.sharded else self._load_dense()
            train_dense(model, teacher, self.blocks, self.config, staging=staging, **self._training())
        self._measure(DENSE, model)

    def _export(self, model: Any, staging: Path) -> None:
        with self.clock.phase("export"):
            watch: dict[str, Any] = {"track": self.watch.track, "world": self.world}
            write_checkpoint(model, self.tokenizer, staging, self.plan.spec, dense=self.dense_format, **watch)

    def _finish(self, output: OutputDirectory, staging: Path, offloaded: dict[str, Any]) -> dict[str, Any]:
        """On the first process: load what was written, measure it, report, and put it in its place."""
        with self.clock.phase("export"):
            exported = load(
                staging,
                dtype=getattr(torch, self.config.dtype),
                device=self.world.device,
                trust_remote_code=self.config.trust_remote_code,
            )
        with self.clock.phase("evaluate"):
            # Of several processes, each remembers what it has seen of the uncompressed model.
            here = World(device=self.world.device)
            if self.exports_start:
                read_back = self.measured.first_windows(exported, here)
                for before, after in zip(self.first_windows, read_back, strict=True):
                    require_same_perplexity({"trained": None, "start": before, "exported": after}, self.config.dtype)
            self.measured.measure("exported", exported, here, compare=self.world.size == 1)
            if self.exports_start:
                self.measured.take("start", "exported")
        for row in self.measured.rows():
            require_same_perplexity(row, self.config.dtype)
        stored = stored_skeleton(staging, trust_remote_code=self.config.trust_remote_code)
        result = self._report(output, staging, footprint(stored), offloaded)
        result["tables"] = table_use(exported)
        for line in table_warnings(result["tables"]):
            self.watch.say(line)
        write_json(staging / "report.json", result)
        for row in result["texts"]:
            require_ratio(row, self.config.max_perplexity_ratio, staging)
        source = self.plan.source
        card = model_card(result, base_model=None if source.is_local else source.location)
        (staging / "README.md").write_text(card, encoding="utf-8")
        output.commit()
        return result

    def _report(self, output: OutputDirectory, staging: Path, size: Any, offloaded: dict[str, Any]) -> dict[str, Any]:
        """report.json."""
        config, plan = self.config, self.plan
        rows = self.texts.rows()
        return {
            "model": config.model,
            "output": str(output.path),
            "perplexity": self.measured.perplexity,
            "evaluation": {name: rows[0][name] for name in ("data", "context", "windows", "tokens")},
            "texts": rows,
            "data": self.texts.summary(self.blocks),
            "allocation": config.allocation,
            "weights_bytes": models.weight_files_bytes(staging),
            "original_weights_bytes": 2 * plan.parameters,
            "parameters": size.parameters,
            "decoder_bits_per_weight": decoder_bits_per_weight(plan.swaps, plan.spec),
            "model_bits_per_weight": size.model_bits_per_weight,
            "steps": config.steps,
            "training_tokens": plan.training_tokens,
            "sharded": self.world.sharded,
            **({"offload": offloaded} if offloaded else {}),
            "swapped": [swap.to_mapping() for swap in plan.swaps if not swap.reason],
            "skipped": [swap.to_mapping() for swap in plan.swaps if swap.reason],
            "resolved": plan.resolved,
            **machine_facts(plan.asked, self.clock, self.world),
        }
