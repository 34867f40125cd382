"""`edkm finetune`: training on a compressed model, whose weights stay packed: an adapter beside it, or its tables."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import model_files
from edkm_cli.distributed import World, open_world, peers
from edkm_cli.errors import UserError
from edkm_cli.evaluate.limits import require_same_perplexity
from edkm_cli.evaluate.texts import ORIGINAL
from edkm_cli.export.checkpoint import write_checkpoint
from edkm_cli.files import write_json
from edkm_cli.finetune.config import TABLES, FinetuneConfig, require_data
from edkm_cli.finetune.session import PackedSession, Reference, adapted_layers, add_adapter, load_adapter, save_adapter
from edkm_cli.nn.clustered import hold_packed, lut_layers
from edkm_cli.preflight import choose_device, choose_dtype, choose_label_weight
from edkm_cli.progress import Observer
from edkm_cli.summaries import card
from edkm_cli.train.loop import require_launch, train
from edkm_cli.train.losses import Objective
from edkm_cli.train.packed import require_attention_within_documents
from edkm_cli.train.teacher import require_place

REPORT = "finetune.json"
_RANK = 16
_PROBE_TOKENS = 64


def finetune(
    directory: str | Path, config: FinetuneConfig, *, observer: Observer | None = None, **options: bool
) -> dict[str, Any]:
    """Run `edkm finetune` and return its report (its keys: docs/results.md).

    Where a launcher started several processes, all call this; each has a part of the data. With the option `resume`, an
    unfinished run in `DIR.partial` goes on from its newest checkpoint and ends with the same adapter as if it had not been
    interrupted; with `overwrite` a result that is there already is replaced.

    Raises UserError for anything the user can mend; the output directory then is as it was.
    """
    require_data(config.data, "the text to learn")
    world = open_world(choose_device(config.device), sharding="none", timeout_minutes=config.timeout_minutes)
    watch = observer if observer is not None and world.main else Observer()
    with peers(world):
        return _Run(Path(directory).expanduser(), config, world, watch).run("DIR", directory, **options)


def plan_finetune(directory: str | Path, config: FinetuneConfig) -> dict[str, Any]:
    """`edkm finetune --dry-run`: what would train, on this one process, without reading a text."""
    require_data(config.data, "the text to learn")
    run = _Run(Path(directory).expanduser(), config, World(device=choose_device(config.device)), Observer())
    return run.plan(run.trained_model())


class _Run(PackedSession):
    """One run: its steps in order, each a method."""

    def __init__(self, directory: Path, config: FinetuneConfig, world: World, watch: Observer):
        super().__init__(directory, config, world, watch, dtype=choose_dtype(config.dtype, world.device))
        if self.writes_text and not config.reference:
            raise UserError("--data self is what the model says already; name a text to learn")
        require_launch(config, world)
        self.tables = config.train == TABLES
        self.reference = Reference(self) if config.reference else None
        checkpointing = config.gradient_checkpointing
        self.config = replace(
            config,
            lora_rank=None if self.tables else config.lora_rank or _RANK,
            gradient_checkpointing=self.tables if checkpointing is None else checkpointing,
            label_weight=choose_label_weight(config, self.sources) if self.reference else None,
        )

    def steps(self) -> dict[str, Any]:
        config, reference = self.config, self.reference
        with self.clock.phase("load"):
            stages = ("compressed", *(("trained", "exported") if self.tables else ("adapted",)))
            token_limit = int(1.1 * config.trained_tokens(self.world.size)) + config.sequence_length
            stages = (ORIGINAL, *stages) if reference else stages
            self.open_texts(self.architecture, token_limit=token_limit, stages=stages)
        resolved = {"model_sha256": self.digest(), "dtype": self.dtype}
        resolved |= {} if reference is None else {"reference_sha256": reference.sha256}
        if (report := self.finished(REPORT, config, **resolved)) is not None:
            return report
        with self.clock.phase("load"):
            if not self.writes_text:  # too few tokens are refused before a model is read
                self.lay_out()
            dense = None if reference is None else reference.open()
            model = self.trained_model()
            plan = self.plan(model)
            trained = plan["trained_bytes"] if self.tables else plan["adapter_bytes"]
            result = int(1.1 * model_files.weight_files_bytes(self.directory)) if self.tables else trained
            # The result, and checkpoints of what trains with two moments.
            self.output.rehearse(result + 3 * config.most_checkpoints * trained)
            if config.packing:
                require_attention_within_documents(model)
            if dense is not None:
                require_place()
            self.write_text(dense)
        if dense is not None:
            self.measure_original(dense)
        if self.unfinished is None:
            self.measure("compressed", model)
        staging = self.begin()
        teacher = None if dense is None or reference is None else self.remember(dense, reference.sha256)
        del dense
        with self.clock.phase("train"):
            objective = Objective(teacher, label_weight=config.label_weight or 0.0)
            offloaded = train(model, objective, self.blocks, config, **self.training(staging))
        if self.tables:
            self.stored_format.settle(model)
            self.measure("trained", model)
        write = self._write_tables if self.tables else self._write_adapter
        return self.world.on_main(lambda: self._finish(staging, {**plan, **write(model, staging)}, offloaded))

    def trained_model(self) -> Any:
        """The packed model with what trains of it: a fresh adapter, the same on all processes, or its tables."""
        model, config = self.load_model(self.directory), self.config
        torch.manual_seed(config.seed)
        if self.tables:
            self.stored_format = self.dense_format(model)
            hold_packed(model, self.clustering)
            return model
        rank = config.lora_rank
        assert rank is not None
        return add_adapter(model, rank=rank, alpha=config.lora_alpha or 2.0 * rank, targets=config.target_modules)

    def plan(self, model: Any) -> dict[str, Any]:
        """What trains, how much of it, and on how much text."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        size = sum(parameter.numel() * parameter.element_size() for parameter in trained)
        adapter = {"adapted_layers": len(adapted_layers(model)), "adapter_bytes": size}
        return {
            "model": str(self.directory),
            "output": str(Path(self.config.output).expanduser().absolute()),
            **({"trained_layers": len(lut_layers(model)), "trained_bytes": size} if self.tables else adapter),
            "trained_parameters": sum(parameter.numel() for parameter in trained),
            "steps": self.config.steps,
            "training_tokens": self.config.trained_tokens(self.world.size),
        }

    # On the first process: what was trained is written, read back and compared.

    def _write_adapter(self, model: Any, staging: Path) -> dict[str, Any]:
        probe = next(iter(self.measured.texts.values()))[:_PROBE_TOKENS][None].to(self.world.device)
        expected = _logits(model, probe)
        save_adapter(model, staging, base=str(self.directory.resolve()))
        del model
        read = load_adapter(self.load_model(self.directory), staging)
        if not bool(expected.isfinite().all()):
            raise UserError("the trained adapter must give numbers, but gives NaN or Inf; lower --learning-rate")
        if not torch.equal(_logits(read, probe), expected):
            rule = f"the adapter that was written must give the logits of the trained one, but {staging} does not"
            raise UserError(f"{rule}; nothing was put in place, please report it with the model's name")
        self.measure("adapted", read, shared=False)
        return {}

    def _write_tables(self, model: Any, staging: Path) -> dict[str, Any]:
        with self.clock.phase("export"):
            options: dict[str, Any] = {"dense": self.stored_format, "track": self.watch.track}
            write_checkpoint(model, self.tokenizer, staging, self.spec, **options)
            self.copy_processor(self.source, staging)
            read = self.load_model(staging)
        self.measure("exported", read, shared=False)
        for row in self.measured.rows():
            require_same_perplexity(row, self.dtype)
        return {"weights_bytes": model_files.weight_files_bytes(staging)}

    def _finish(self, staging: Path, result: dict[str, Any], offloaded: dict[str, Any]) -> dict[str, Any]:
        """On the first process: report, and put the result in its place."""
        offload = {"offload": offloaded} if offloaded else {}
        report = {**result, **self.facts(self.config), **offload, "data": self.trained_on()}
        write_json(staging / REPORT, report)
        made = f"tables, norms and biases of {report['model']} trained for {report['steps']} steps"
        about = {"title": f"{report['model']}, trained on", "made": made, "file": REPORT}
        page = card("checkpoint", report, **about) if self.tables else card("adapter", report)
        (staging / "README.md").write_text(page, encoding="utf-8")
        self.output.commit()
        return report


@torch.no_grad()
def _logits(model: Any, ids: Tensor) -> Tensor:
    return model.eval()(input_ids=ids, use_cache=False).logits
