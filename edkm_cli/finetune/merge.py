"""`edkm merge`: an adapter becomes part of the tables and indices of the compressed model it was trained on."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import models
from edkm_cli.config import TrainingSettings
from edkm_cli.distributed import World, launched
from edkm_cli.errors import UserError
from edkm_cli.evaluate.size import footprint
from edkm_cli.export.checkpoint import write_checkpoint
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.export.ownership import listing
from edkm_cli.export.run import machine_facts
from edkm_cli.finetune.adapters import WEIGHTS, adapted_layers, check_adapter, load_adapter, recorded
from edkm_cli.finetune.command import REPORT as FINETUNED
from edkm_cli.finetune.config import MergeConfig, require_data
from edkm_cli.finetune.recluster import cluster_again, decoded_copy
from edkm_cli.finetune.session import Session, checkpoint_card
from edkm_cli.format import sha256_of, write_json
from edkm_cli.initialize.reconstruct import reconstruct
from edkm_cli.nn.clustered import Clustering
from edkm_cli.preflight import calibration_batches, choose_device, choose_label_weight, choose_start_tokens
from edkm_cli.progress import Observer
from edkm_cli.self_text import self_text
from edkm_cli.settings import part_of
from edkm_cli.train.loop import train
from edkm_cli.train.losses import Beside, Objective
from edkm_cli.train.packed import require_attention_within_documents

REPORT = "merge.json"
_FIT_TOKENS = 256  # in a sequence: many small steps fit a decoder layer better than a few long ones


def merge(
    directory: str | Path, config: MergeConfig, *, overwrite: bool = False, observer: Observer | None = None
) -> dict[str, Any]:
    """Run `edkm merge` and return its report (its keys: docs/results.md).

    Raises UserError for anything the user can mend; the output directory then is as it was, but where the merged model
    is worse than allowed the result is left in `DIR.partial`.
    """
    directory, adapter = Path(directory), Path(config.adapter)
    if not config.adapter:
        raise UserError("--adapter is required: the directory that edkm finetune wrote")
    if launched() > 1:
        raise UserError("edkm merge is for one process; start it without torchrun or accelerate launch")
    check_adapter(adapter)
    config = with_data(config, adapter)
    run = _Run(directory, adapter, config, observer or Observer())
    require_base(run.session, adapter)
    with OutputDirectory(config.output, inputs=run.session.inputs, overwrite=overwrite) as output:
        output.rehearse(int(1.5 * models.weight_files_bytes(directory)) + 50_000_000)
        return run.run(output)


def require_base(session: Session, adapter: Path) -> None:
    """Raises UserError for an adapter that was trained on another model than the session's, or is part of it already.

    What edkm finetune wrote has the digest of its model; of another adapter only the name in its configuration is known.
    """
    directory = session.directory
    if sha256_of(adapter / WEIGHTS) in recorded(directory, REPORT).get("merged_adapters", []):
        raise UserError(f"--adapter {adapter} is part of {directory} already; merge it once")
    base = str(check_adapter(adapter).get("base_model_name_or_path") or "")
    trained_on = (listing(adapter).get("identity") or {}).get("model_sha256")
    same = trained_on == session.digest() if trained_on else not base or Path(base).resolve() == directory.resolve()
    if not same:
        raise UserError(
            f"--adapter {adapter} does not fit {directory}: it was trained on {base or 'another model'}"
            f"{', whose files were others' if trained_on else ''}; merge it into the model that it was trained on"
        )


def with_data(config: MergeConfig, adapter: Path) -> MergeConfig:
    """The configuration with the adapter's own text where none is named, and with its way to learn it where nothing else is
    asked for. Raises UserError where there is none."""
    trained_on = recorded(adapter, FINETUNED).get("config")
    trained_on = trained_on if isinstance(trained_on, dict) else {}
    defaults = {"train_on": "completions", "packing": False}
    learnt: dict[str, Any] = {
        name: trained_on.get(name, default) if getattr(config, name) is None else getattr(config, name)
        for name, default in defaults.items()
    }
    config = replace(config, **learnt)
    if config.data:
        return config
    names = _names(trained_on.get("data"))
    require_data(names, f"since {adapter} does not say what it was trained on")
    return replace(
        config,
        data=names,
        data_column=config.data_column or trained_on.get("data_column"),
        eval_data=config.eval_data or _names(trained_on.get("eval_data")),
    )


def _names(found: Any) -> tuple[str, ...]:
    return tuple(name for name in found if isinstance(name, str)) if isinstance(found, list) else ()


class _Run:
    """One run: its steps in order, each a method."""

    def __init__(self, directory: Path, adapter: Path, config: MergeConfig, watch: Observer):
        self.adapter, self.config, self.watch = adapter, config, watch
        self.world = World(device=choose_device(config.device))
        self.session = Session(directory, config, self.world, watch, dtype="float32")
        settings = part_of(TrainingSettings, config, save_every=0)
        self.settings = replace(settings, label_weight=choose_label_weight(settings, self.session.sources))
        self.trained_tokens = config.steps * config.batch_size * config.sequence_length
        self.start_tokens = config.start_tokens or choose_start_tokens(self.trained_tokens)

    def run(self, output: OutputDirectory) -> dict[str, Any]:
        session = self.session
        torch.manual_seed(self.config.seed)
        with session.clock.phase("load"):
            model = session.load_model()
            dense = session.dense_format(model)
            generation = copy.deepcopy(model.generation_config)
            model = load_adapter(model, self.adapter)
            layers = len(adapted_layers(model))
            session.open_texts(token_limit=self._tokens(), stages=("compressed", "adapted", "merged"))
            if session.writes_text:
                session.texts.write(self._write_text(model))
            if self.config.packing and self.config.steps:
                require_attention_within_documents(model)
        with model.disable_adapter():
            session.measure("compressed", model)
        session.measure("adapted", model)
        spec = session.spec
        with session.clock.phase("merge"):
            merged = cluster_again(model, Clustering(spec.bits, spec.granularity, spec.lut_dtype, palette=spec.palette))
            del model
            merged.generation_config = generation
            teacher = decoded_copy(merged) if self.config.steps else None
            self._fit(merged)
        staging = output.begin()
        output.mark({"merge": str(self.adapter)})
        if teacher is not None:
            self._train(merged, teacher, staging)
            del teacher
        with session.clock.phase("export"):
            write_checkpoint(merged, session.tokenizer, staging, spec, dense=dense, track=self.watch.track)
            del merged
            exported = session.load_model(staging)
        session.measure("merged", exported)
        report = self._report(output, staging, layers, footprint(exported))
        write_json(staging / REPORT, report)
        require_close(session.texts.measured.perplexity, self.config.max_perplexity_ratio, staging)
        title = f"{report['model']} with {report['adapter']} merged"
        card = checkpoint_card(
            report, title=title, made="the adapter is part of the lookup tables and indices", file=REPORT
        )
        (staging / "README.md").write_text(card, encoding="utf-8")
        output.commit()
        return report

    def _fit(self, merged: Any) -> None:
        """Each decoder layer by itself, to give what the adapted one gives."""
        reconstruct(
            merged,
            calibration_batches(self.session.texts.data, self.start_tokens, seed=self.config.seed, length=_FIT_TOKENS),
            passes=self.config.start_passes,
            seed=self.config.seed,
            track=self.watch.track,
            world=self.world,
        )

    def _train(self, merged: Any, teacher: Any, staging: Path) -> None:
        """All decoder layers together, to predict what the adapted model predicts."""
        merged.requires_grad_(True)
        with self.session.clock.phase("train"):
            train(
                merged,
                Objective(Beside(teacher), label_weight=self.settings.label_weight or 0.0),
                self.session.texts.data.blocks(self.config.sequence_length, seed=self.config.seed),
                self.settings,
                world=self.world,
                staging=staging,
                track=self.watch.track,
                show=self.watch.show,
            )
        merged.requires_grad_(False)

    def _tokens(self) -> int:
        """Of the text, that there is a use for."""
        return max(self.start_tokens, int(1.1 * self.trained_tokens)) + self.config.sequence_length

    def _write_text(self, model: Any) -> Tensor:
        self.watch.say("the adapted model writes its own text, once")
        return self_text(
            model,
            self.session.tokenizer,
            tokens=self._tokens(),
            seed=self.config.seed,
            weights_sha256=self.session.digest(self.adapter / WEIGHTS),
            track=self.watch.track,
        )

    def _report(self, output: OutputDirectory, staging: Path, layers: int, size: Any) -> dict[str, Any]:
        session = self.session
        earlier = recorded(session.directory, REPORT).get("merged_adapters", [])
        return {
            "model": str(session.directory),
            "adapter": str(self.adapter),
            "adapter_sha256": sha256_of(self.adapter / WEIGHTS),
            "merged_adapters": [*earlier, sha256_of(self.adapter / WEIGHTS)],
            "output": str(output.path),
            "perplexity": session.texts.measured.perplexity,
            "texts": session.texts.rows(),
            "adapted_layers": layers,
            "steps": self.config.steps,
            "weights_bytes": models.weight_files_bytes(staging),
            "original_weights_bytes": models.weight_files_bytes(session.directory),
            "model_bits_per_weight": size.model_bits_per_weight,
            **machine_facts(self.config, session.clock, self.world),
        }


def require_close(perplexity: dict[str, float | None], limit: float, staging: Path) -> None:
    """Raises UserError where the merged perplexity is more than `limit` times the adapter's."""
    adapted, merged = perplexity["adapted"], perplexity["merged"]
    if limit and adapted is not None and merged is not None and merged > limit * adapted:
        raise UserError(
            f"the merged perplexity must be at most --max-perplexity-ratio {limit:g} times the adapter's, but is "
            f"{merged:.4f} to {adapted:.4f}, {merged / adapted:.3f} times (without the adapter: "
            f"{perplexity['compressed']:.4f}); the result is in {staging}: give more --steps or --start-tokens, keep "
            "the adapter as it is, or allow more"
        )
