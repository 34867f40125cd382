"""`edkm merge`: an adapter becomes part of the tables and indices of the compressed model it was trained on.

The update B A of a layer is small beside the gaps of its table: rounded to the nearest entries, nearly every weight would
fall back to the entry it had. So weights are compensated column by column and corrected decoder layer by decoder layer, to
give what the adapted one gives (`edkm_cli.initialize.reconstruct`), from the tables that are there; then all train, to
predict what the adapted model predicts. Layers without an update are clustered, too: their weights are entries of their
tables already.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from edkm_cli import model_files
from edkm_cli.config import TrainingSettings
from edkm_cli.distributed import World
from edkm_cli.errors import Preempted, UserError, explained
from edkm_cli.evaluate.limits import require_ratio
from edkm_cli.evaluate.size import footprint
from edkm_cli.export.checkpoint import write_checkpoint
from edkm_cli.export.ownership import listing, read_object, remove
from edkm_cli.files import sha256_of, write_json
from edkm_cli.finetune.command import REPORT as FINETUNED
from edkm_cli.finetune.config import MergeConfig, require_data
from edkm_cli.finetune.session import WEIGHTS, PackedSession, adapted_layers, check_adapter, load_adapter
from edkm_cli.initialize.compensate import compensate
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.reconstruct import reconstruct
from edkm_cli.integrity import stored_skeleton
from edkm_cli.nn.clustered import ClusteredLinear, Clustering, clustered_layers, parameters_of, with_scale_of
from edkm_cli.nn.hooks import layers_form_a_chain
from edkm_cli.preflight import choose_device, choose_label_weight, choose_start_tokens
from edkm_cli.progress import Observer
from edkm_cli.runtime.palettized import PackedModule, PalettizedLinear
from edkm_cli.settings import part_of
from edkm_cli.summaries import card
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
    directory, adapter = Path(directory).expanduser(), Path(config.adapter).expanduser()
    if not config.adapter:
        raise UserError("--adapter is required: the directory that edkm finetune wrote")
    check_adapter(adapter)
    run = _Run(directory, adapter, with_data(config, adapter), observer or Observer())
    require_base(run, adapter)
    return run.run("DIR", directory, overwrite=overwrite)


def require_base(session: PackedSession, adapter: Path) -> None:
    """Raises UserError for an adapter that was trained on another model than the session's, or is part of it already.

    What edkm finetune wrote has the digest of its model; of another adapter only the name in its configuration is known.
    """
    directory = session.directory
    if sha256_of(adapter / WEIGHTS) in read_object(directory / REPORT).get("merged_adapters", []):
        raise UserError(f"--adapter {adapter} is part of {directory} already; merge it once")
    base = str(check_adapter(adapter).get("base_model_name_or_path") or "")
    trained_on = (listing(adapter).get("identity") or {}).get("model_sha256")
    same = trained_on == session.digest() if trained_on else not base or Path(base).resolve() == directory.resolve()
    if not same:
        others = ", whose files were others" if trained_on else ""
        rule = f"--adapter {adapter} does not fit {directory}: it was trained on {base or 'another model'}{others}"
        raise UserError(f"{rule}; merge it into the model that it was trained on")


def with_data(config: MergeConfig, adapter: Path) -> MergeConfig:
    """The configuration with the adapter's own text where none is named, and with its way to learn it where nothing else is
    asked for. Raises UserError where there is none."""
    trained_on = read_object(adapter / FINETUNED).get("config")
    trained_on = trained_on if isinstance(trained_on, dict) else {}
    usual: dict[str, Any] = {"train_on": "completions", "packing": False, "long_records": "split"}
    learnt = {name: trained_on.get(name, value) for name, value in usual.items() if getattr(config, name) is None}
    if config.data:
        return replace(config, **learnt)
    names = _names(trained_on.get("data"))
    require_data(names, f"since {adapter} does not say what it was trained on")
    learnt["eval_data"] = config.eval_data or _names(trained_on.get("eval_data"))
    learnt["streaming"] = trained_on.get("streaming") if config.streaming is None else config.streaming
    return replace(config, data=names, data_column=config.data_column or trained_on.get("data_column"), **learnt)


def _names(found: Any) -> tuple[str, ...]:
    return tuple(name for name in found if isinstance(name, str)) if isinstance(found, list) else ()


class _Run(PackedSession):
    """One run: its steps in order, each a method."""

    def __init__(self, directory: Path, adapter: Path, config: MergeConfig, watch: Observer):
        super().__init__(directory, config, World(device=choose_device(config.device)), watch, dtype="float32")
        self.adapter = adapter
        settings = part_of(TrainingSettings, config, save_every=0, keep=0)
        self.settings = replace(settings, label_weight=choose_label_weight(settings, self.sources))
        trained_tokens = settings.trained_tokens()
        self.start_tokens = config.start_tokens or choose_start_tokens(trained_tokens)
        self.needed_tokens = max(self.start_tokens, int(1.1 * trained_tokens)) + config.sequence_length

    def steps(self) -> dict[str, Any]:
        self.output.rehearse(int(1.5 * model_files.weight_files_bytes(self.directory)))
        torch.manual_seed(self.config.seed)
        with self.clock.phase("load"):
            model = self.load_model(self.directory)
            dense, generation = self.dense_format(model), copy.deepcopy(model.generation_config)
            model = load_adapter(model, self.adapter)
            require_mergeable(model)
            layers, trust = len(adapted_layers(model)), self.config.trust_remote_code
            chain = layers_form_a_chain(stored_skeleton(self.directory, trust_remote_code=trust))
            if self.config.start_passes and not chain:
                raise UserError("--start-passes does nothing for this model's layers (docs/models.md); leave it out")
            self.open_texts(model.config, token_limit=self.needed_tokens, stages=("compressed", "adapted", "merged"))
            if self.config.packing and self.config.steps:
                require_attention_within_documents(model)
            if self.writes_text:
                self.write_text(Layers(model))
            elif self.config.steps:
                self.lay_out()
        self.measure("compressed", self.load_model(self.directory))  # of some adapters the base has biases, too
        self.measure("adapted", model)
        with self.clock.phase("merge"):
            merged = cluster_again(model, self.clustering)
            del model
            merged.generation_config = generation
            teacher = decoded_copy(merged) if self.config.steps else None
            # Each decoder layer by itself, to give what the adapted one gives.
            how: dict[str, Any] = {"track": self.watch.track, "world": self.world}
            text = self.data.calibration_batches(_FIT_TOKENS, limit=self.start_tokens, seed=self.config.seed)
            if chain:
                reconstruct(merged, text, passes=self.config.start_passes, seed=self.config.seed, **how)
            else:  # as edkm compress starts such a model
                compensate(merged, text, **how)
        staging = self.output.begin()
        self.output.mark({"merge": str(self.adapter)})
        if teacher is not None:
            self._train(merged, teacher, staging)
            del teacher
        with self.clock.phase("export"):
            write_checkpoint(merged, self.tokenizer, staging, self.spec, dense=dense, track=self.watch.track)
            self.copy_processor(self.source, staging)
            del merged
            exported = self.load_model(staging)
        self.measure("merged", exported)
        report = self._report(staging, layers, footprint(exported))
        write_json(staging / REPORT, report)
        limit = self.config.max_perplexity_ratio, staging, "give more --steps, keep the adapter, or allow more"
        for row in self.measured.rows():
            require_ratio(row, ("adapted", "merged"), *limit)
        title = f"{report['model']} with {report['adapter']} merged"
        made = "the adapter is part of the lookup tables and indices"
        page = card("checkpoint", report, title=title, made=made, file=REPORT)
        (staging / "README.md").write_text(page, encoding="utf-8")
        self.output.commit()
        return report

    def weights_sha256(self, layers: Layers) -> str:
        return self.digest(self.adapter / WEIGHTS)

    def _train(self, merged: Any, teacher: Any, staging: Path) -> None:
        """All decoder layers together, to predict what the adapted model predicts."""
        merged.requires_grad_(True)
        with self.clock.phase("train"):
            objective = Objective(Beside(teacher), label_weight=self.settings.label_weight or 0.0)
            try:
                train(merged, objective, self.blocks, self.settings, **self.training(staging))
            except Preempted as stop:  # what training began from is nowhere
                remove(self.output.partial)
                raise Preempted("SIGTERM: stopped, nothing was saved; give the command again") from stop
        merged.requires_grad_(False)

    def _report(self, staging: Path, layers: int, size: Any) -> dict[str, Any]:
        earlier = read_object(self.directory / REPORT).get("merged_adapters", [])
        sha256 = sha256_of(self.adapter / WEIGHTS)
        return {
            "model": str(self.directory),
            "adapter": str(self.adapter),
            "adapter_sha256": sha256,
            "merged_adapters": [*earlier, sha256],
            "output": str(self.output.path),
            "adapted_layers": layers,
            "steps": self.config.steps,
            "weights_bytes": model_files.weight_files_bytes(staging),
            "original_weights_bytes": model_files.weight_files_bytes(self.directory),
            "model_bits_per_weight": size.model_bits_per_weight,
            **self.facts(self.config),
        }


def require_mergeable(model: PeftModel) -> None:
    """Raises UserError for an adapter of packed embeddings, or with a copy of a packed matrix."""
    base: Any = model.base_model.model
    is_tied = getattr(base.config, "tie_word_embeddings", False)
    tied = getattr(base.get_input_embeddings(), "weight", None) if is_tied else base
    for name, module in base.named_modules():
        packed, linear = isinstance(module, PackedModule), isinstance(module, PalettizedLinear)
        if packed and (".original_module" in name or ".modules_to_save" in name):
            raise UserError(f"an adapter that has a copy of a packed matrix cannot be merged, but this one has {name}")
        if name.endswith(".base_layer") and not linear and (packed or getattr(module, "weight", None) is tied):
            path = name.removesuffix(".base_layer")
            rule = f"the adapter changes {path}, whose weight has a palette of its own, or is the other embedding, too"
            raise UserError(f"{rule}, and cannot be merged into; train an adapter with --target-modules all-linear")


def cluster_again(model: PeftModel, clustering: Clustering) -> Any:
    """The model without peft, its adapter added to the weights (float32), each layer with the tables it had, in place.

    Embeddings and layers that are not packed keep what they hold. Raises UserError for an adapter that is not finite.
    """
    base: Any = model.base_model.model
    tables: dict[str, tuple[torch.Tensor, Clustering]] = {}
    modules = dict(base.named_modules())
    clustering = with_scale_of([m for m in modules.values() if isinstance(m, PalettizedLinear)], clustering)
    for name, module in modules.items():
        if isinstance(module, PalettizedLinear):
            path = name.removesuffix(".base_layer")
            tables[path] = parameters_of(module), replace(clustering, bits=module.bits, granularity=module.granularity)
            base.set_submodule(name, module.to_dense(torch.float32))
    with explained("peft cannot merge the adapter"):
        merged = model.merge_and_unload()
    for path, (table, own) in tables.items():
        linear = merged.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        if not bool(linear.weight.isfinite().all()):
            raise UserError(f"the adapter must be finite, but its update of {path} is not")
        merged.set_submodule(path, ClusteredLinear(linear.weight, linear.bias, table, own, name=path))
    return merged.requires_grad_(False).eval()


def decoded_copy(model: Any) -> Any:
    """A frozen copy of a clustered model that computes with its weights as they are: the adapted model, for a teacher."""
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    for layer in clustered_layers(teacher).values():
        layer.dense = True
    return teacher
