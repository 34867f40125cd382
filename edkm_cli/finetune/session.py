"""What finetune and merge do alike, beside what every run does: the packed model they begin with, its adapters (by peft:
added, saved, loaded), and the uncompressed model that it may learn from.
"""

from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from torch import nn

from edkm_cli import data, model_files, models
from edkm_cli.distributed import World
from edkm_cli.errors import UserError, explained
from edkm_cli.export.checkpoint import DenseFormat
from edkm_cli.export.run import Session, model_digest
from edkm_cli.files import read_json, sha256_of
from edkm_cli.format import TABLES_VERSION, QuantizationSpec, read_spec
from edkm_cli.granularity import E3M4
from edkm_cli.hf import load_source
from edkm_cli.initialize.layers import Layers
from edkm_cli.initialize.sharded import open_layers
from edkm_cli.integrity import stored_skeleton
from edkm_cli.model_files import files_digest, header, stored_dtypes
from edkm_cli.nn.clustered import Clustering
from edkm_cli.progress import Observer
from edkm_cli.runtime.experts import is_expert
from edkm_cli.runtime.palettized import is_plain_linear

ALL_LINEAR = "all-linear"
_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_adapter(model: Any, *, rank: int, alpha: float, targets: tuple[str, ...]) -> PeftModel:
    """A peft model that trains low-rank updates of linears of `model`, which it changes in place. A fresh one changes no
    output. Updates are float32, A is drawn from PyTorch's generator.

    `targets` are ends of module paths (`q_proj`, `layers.0.mlp.up_proj`), or `all-linear`: all but the output embedding,
    packed experts, each of which sees few tokens, and routers that give more than products.

    Raises UserError for a target that is none.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    names = [name for name, module in linears.items() if is_plain_linear(module)]
    for end in targets:
        if end != ALL_LINEAR and not any(name == end or name.endswith(f".{end}") for name in names):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise UserError(f"--target-modules must name linears of the model ({there}) or {ALL_LINEAR}, got {end!r}")
    named: Any = ALL_LINEAR if ALL_LINEAR in targets else list(targets)
    if named == ALL_LINEAR and (len(names) < len(linears) or any(is_expert(name) for name in names)):
        head = model.get_output_embeddings()
        named = [name for name in names if not is_expert(name) and model.get_submodule(name) is not head]
    options: dict[str, Any] = {"lora_alpha": alpha, "bias": "none", "task_type": "CAUSAL_LM"}  # alpha: peft says int
    with explained("--target-modules cannot be adapted", "; name other linears, such as q_proj"), _placed(model):
        return get_peft_model(model, LoraConfig(r=rank, target_modules=named, **options))


def _placed(model: Any) -> ExitStack:
    """As long as it is open, peft, which asks the first parameter, knows where a model is that has none."""
    after = ExitStack()
    if next(model.parameters(), None) is None:
        model.hf_device_map = {"": model.device}
        after.callback(delattr, model, "hf_device_map")
    return after


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Module path -> peft's layer."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def save_adapter(model: PeftModel, directory: Path, *, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors into an existing directory, for the model at `base`."""
    config, tensors = model.peft_config["default"], get_peft_model_state_dict(model, save_embedding_layers=False)
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(str(directory))  # not the model's, whose writer leaves a file of its own where it is killed
    (directory / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))


def check_adapter(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter. Raises UserError where there is none."""
    if not (directory / _CONFIG).is_file() or not (directory / WEIGHTS).is_file():
        raise UserError(f"--adapter must be a directory with {_CONFIG} and {WEIGHTS} of edkm finetune, not {directory}")
    config = read_json(directory / _CONFIG, remedy="save the adapter again")
    kind = "aLoRA" if config.get("alora_invocation_tokens") else str(config.get("peft_type"))[:40]
    if kind != "LORA":
        raise UserError(f"--adapter must hold a LoRA adapter, but {directory} holds {kind!r}")
    return config


def load_adapter(model: Any, directory: Path) -> PeftModel:
    """A peft model of a packed model and a saved adapter, which does not train.

    Raises UserError for files that are none, or that belong to another model.
    """
    check_adapter(directory)
    with explained(f"--adapter {directory} does not fit"), _placed(model):
        adapted = PeftModel.from_pretrained(model, str(directory), is_trainable=False).eval()
        stored = {name for name, *_ in header(directory / WEIGHTS)}
        needed, known = (get_peft_model_state_dict(adapted, save_embedding_layers=all).keys() for all in (False, True))
    if odd := (needed - stored) | (stored - known):  # peft would go on with random numbers
        rule = f"--adapter {directory} must hold the tensors of {_CONFIG}, but only one has {min(odd)}"
        raise UserError(f"{rule}; save it again")
    return adapted


def require_palettized(directory: Path) -> QuantizationSpec:
    """The format of a compressed model. Raises UserError for another directory."""
    if not directory.is_dir():
        raise UserError(f"DIR must be the directory of a compressed model, but there is no directory {directory}")
    if (spec := read_spec(directory)) is None:
        rule = f"DIR must be what edkm compress wrote, but {directory} is not; to compress a model while it learns a"
        raise UserError(f"{rule} text use edkm compress, to train it as it is use peft")
    return spec


def _described(model: Any) -> dict[str, Any]:
    """The shapes of a model's weights, packed or not, by the paths of their modules, and what these do not tell."""
    config = model.config.get_text_config(decoder=True)
    told = {name: getattr(config, name, None) for name in ("model_type", "num_hidden_layers", "num_attention_heads")}
    weights = ((name, getattr(module, "weight", None)) for name, module in model.named_modules())
    return told | {name: tuple(weight.shape) for name, weight in weights if isinstance(weight, torch.Tensor)}


class PackedSession(Session):
    """One run on the compressed model in `directory`."""

    def __init__(self, directory: Path, config: Any, world: World, watch: Observer, *, dtype: str):
        self.directory, self.spec = directory, require_palettized(directory)
        self.source = models.resolve(str(directory), trust_remote_code=config.trust_remote_code)
        super().__init__(config, data.parse_sources(config.data), world, watch, dtype=dtype)

    @property
    def clustering(self) -> Clustering:
        """Of the model's layers, where they train. Raises UserError where the file's format cannot hold what that gives."""
        if self.spec.lut_dtype == E3M4 and not self.spec.scales_tables:
            rule = f"{E3M4} tables that train need format version {TABLES_VERSION}, but {self.directory} has"
            raise UserError(f"{rule} {self.spec.format_version}, with one scale for a matrix; compress the model again")
        return Clustering(self.spec.bits, self.spec.granularity, self.spec.lut_dtype, palette=self.spec.palette)

    @cached_property
    def architecture(self) -> Any:
        return models.load_config(self.source, may_be_quantized=True)

    @cached_property
    def tokenizer(self) -> Any:
        return models.load_tokenizer(self.source)

    def dense_format(self, model: Any) -> DenseFormat:
        """How the files of a model as it was loaded hold what is not packed."""
        return DenseFormat.of(Layers(model), self.architecture.dtype or torch.float32, stored_dtypes(self.directory))

    def digest(self, *more: Path) -> str:
        """Of the compressed model's files, and of `more`."""
        return " ".join([files_digest(self.directory), *map(sha256_of, more)])


class Reference:
    """The model that `--reference` names, which is read when it is needed. Raises UserError where the session's model was
    not made of it: another architecture, other shapes, another tokenizer."""

    def __init__(self, session: PackedSession):
        self._session, self._name, trust = session, session.config.reference, session.config.trust_remote_code
        try:
            self._source = models.resolve(self._name, trust_remote_code=trust)
            architecture = models.load_config(self._source)
            theirs = _described(models.skeleton(self._source, architecture))
        except UserError as error:
            rule = str(error).replace("--model", "--reference").partition(", or --dequantize")[0]
            raise UserError(rule, everywhere=True) from error
        for name, here in _described(stored_skeleton(session.directory, trust_remote_code=trust)).items():
            if here != (there := theirs.get(name)):
                self._refuse(f"has {there or 'nothing'} at {name}, which is {here} in {session.directory}")
        if models.load_tokenizer(self._source).get_vocab() != session.tokenizer.get_vocab():
            self._refuse(f"has another tokenizer than {session.directory}")
        self.sha256 = model_digest(self._source, architecture)

    def _refuse(self, why: str) -> None:
        rule = f"--reference must be the uncompressed model that DIR was made of, but {self._name} {why}"
        raise UserError(f"{rule}; name that one", everywhere=True)

    def open(self) -> Layers:
        """The model, layer by layer where its files can be read so."""
        dtype, device = self._session.dtype, self._session.world.device
        layers = open_layers(self._source, dtype=getattr(torch, dtype), device=device)
        layers = layers or Layers(load_source(self._source, dequantize=False, dtype=dtype, device=device))
        model_files.require_finite(self._source.name, layers)
        return layers
