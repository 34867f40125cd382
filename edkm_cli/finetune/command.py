"""`edkm finetune`: an adapter trained on a compressed model, whose weights stay packed and as they are."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import data
from edkm_cli.distributed import World, open_world, peers
from edkm_cli.errors import UserError
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.export.run import identity_of, machine_facts
from edkm_cli.finetune.adapters import (
    adapted_layers,
    adapter_card,
    add_adapter,
    load_adapter,
    save_adapter,
    trained_parameters,
)
from edkm_cli.finetune.config import FinetuneConfig, require_data
from edkm_cli.finetune.session import Session
from edkm_cli.format import write_json
from edkm_cli.preflight import choose_device, choose_dtype
from edkm_cli.progress import Observer
from edkm_cli.train.loop import require_accumulation, train
from edkm_cli.train.losses import Objective
from edkm_cli.train.metrics import require_trackers
from edkm_cli.train.optimizer import require_optimizer
from edkm_cli.train.packed import require_attention_within_documents

REPORT = "finetune.json"
_ROOM_BYTES = 50_000_000  # beside the tensors: metrics, trackers
_PROBE_TOKENS = 64


def finetune(
    directory: str | Path,
    config: FinetuneConfig,
    *,
    overwrite: bool = False,
    resume: bool = False,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Run `edkm finetune` and return its report (its keys: docs/results.md).

    Where a launcher started several processes, all call this; each has a part of the data. With `resume`, an unfinished
    run in `DIR.partial` goes on from its newest checkpoint and ends with the same adapter as if it had not been
    interrupted.

    Raises UserError for anything the user can mend; the output directory then is as it was.
    """
    require_data(config.data, "the text to learn")
    world = open_world(choose_device(config.device), sharding="none", timeout_minutes=config.timeout_minutes)
    watch = observer if observer is not None and world.main else Observer()
    with peers(world):
        return _Run(Path(directory), config, world, watch).run(overwrite=overwrite, resume=resume)


def plan_finetune(directory: str | Path, config: FinetuneConfig) -> dict[str, Any]:
    """`edkm finetune --dry-run`: what would train, on this one process, without reading a text."""
    require_data(config.data, "the text to learn")
    run = _Run(Path(directory), config, World(device=choose_device(config.device)), Observer())
    return run.plan(run.adapted_model())


class _Run:
    """One run: its steps in order, each a method."""

    def __init__(self, directory: Path, config: FinetuneConfig, world: World, watch: Observer):
        self.config, self.world, self.watch = config, world, watch
        dtype = choose_dtype(config.dtype, world.device)
        self.session = Session(directory, config, world, watch, dtype=dtype)
        require_trackers(config)
        require_optimizer(config, world)
        require_accumulation(config)
        if any(source.needs_model for source in self.session.sources):
            raise UserError("--data self is what the model says already; name a text to learn")

    def run(self, *, overwrite: bool, resume: bool) -> dict[str, Any]:
        place, options = self.config.output, {"overwrite": overwrite, "resume": resume}
        with OutputDirectory(place, inputs=self.session.inputs, world=self.world, **options) as output:
            return self._run(output)

    def _run(self, output: OutputDirectory) -> dict[str, Any]:
        session, training = self.session, self.config
        with session.clock.phase("load"):
            token_limit = int(1.1 * self._tokens()) + training.sequence_length
            session.open_texts(token_limit=token_limit, stages=("compressed", "adapted"))
        measured, identity = session.texts.measured, self._identity()
        if (report := output.finished(REPORT, identity, asdict(self.config))) is not None:
            self.watch.say(f"{self.config.output} is finished already")
            return report
        unfinished = output.unfinished(identity)
        with session.clock.phase("load"):
            model = self.adapted_model()
            output.rehearse(self._needed_bytes(model))
            blocks = session.texts.data.blocks(training.sequence_length, seed=training.seed)
            if training.packing:
                require_attention_within_documents(model)
        plan = self.plan(model)
        if unfinished is not None:
            measured.restore(unfinished["measured"])
        else:
            session.measure("compressed", model)
        staging = output.begin(keep=unfinished is not None)
        output.mark(identity, perplexity=measured.perplexity, measured=measured.state())
        with session.clock.phase("train"):
            offloaded = train(
                model,
                Objective(),
                blocks,
                training,
                world=self.world,
                staging=staging,
                measure=partial(measured.on_the_way, world=self.world),
                track=self.watch.track,
                show=self.watch.show,
            )
        return self.world.on_main(lambda: self._finish(output, staging, model, plan, blocks, offloaded))

    def adapted_model(self) -> Any:
        """The packed model with a fresh adapter, the same on all processes."""
        model = self.session.load_model()
        torch.manual_seed(self.config.seed)
        rank, alpha = self.config.lora_rank, self.config.lora_alpha
        return add_adapter(model, rank=rank, alpha=alpha or 2.0 * rank, targets=self.config.target_modules)

    def _tokens(self) -> int:
        training = self.config
        sequences = training.batch_size * training.gradient_accumulation * self.world.size
        return training.steps * sequences * training.sequence_length

    def plan(self, model: Any) -> dict[str, Any]:
        """What trains, how much of it, and on how much text."""
        trained = trained_parameters(model).values()
        return {
            "model": str(self.session.directory),
            "output": str(Path(self.config.output).expanduser().absolute()),
            "adapted_layers": len(adapted_layers(model)),
            "trained_parameters": sum(parameter.numel() for parameter in trained),
            "adapter_bytes": sum(parameter.numel() * parameter.element_size() for parameter in trained),
            "steps": self.config.steps,
            "training_tokens": self._tokens(),
        }

    def _needed_bytes(self, model: Any) -> int:
        """The adapter, and checkpoints of it with two moments."""
        kept = (self.config.keep + 1) * bool(self.config.save_every) + 2 * self.config.keep_best
        return (1 + 3 * kept) * self.plan(model)["adapter_bytes"] + _ROOM_BYTES

    def _identity(self) -> dict[str, Any]:
        """What decides the result."""
        session = self.session
        resolved = {"model_sha256": session.digest(), "dtype": session.dtype}
        return identity_of(self.config, session.texts, processes=self.world.size, **resolved)

    def _finish(
        self,
        output: OutputDirectory,
        staging: Path,
        model: Any,
        plan: dict[str, Any],
        blocks: data.Blocks,
        offloaded: dict[str, Any],
    ) -> dict[str, Any]:
        """On the first process: write the adapter, read it back, measure what was read, and put it in its place."""
        session = self.session
        probe = session.texts.measured.texts[0].tokens[:_PROBE_TOKENS][None].to(self.world.device)
        expected = _logits(model, probe)
        save_adapter(model, staging, base=str(session.directory.resolve()))
        del model
        read = load_adapter(session.load_model(), staging)
        if not torch.equal(_logits(read, probe), expected):
            raise UserError(
                f"the adapter that was written must give the logits of the trained one, but {staging} does not; nothing was "
                "put in place, please report it with the model's name"
            )
        session.measure("adapted", read, shared=False)
        report = {
            **plan,
            "perplexity": session.texts.measured.perplexity,
            "texts": session.texts.rows(),
            "data": session.texts.summary(blocks),
            **({"offload": offloaded} if offloaded else {}),
            **machine_facts(self.config, session.clock, self.world),
        }
        write_json(staging / REPORT, report)
        (staging / "README.md").write_text(adapter_card(report), encoding="utf-8")
        output.commit()
        return report


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    return model.eval()(input_ids=ids, use_cache=False).logits
