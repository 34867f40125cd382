"""Adapters on a packed model, by peft: added, saved, loaded."""

from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn

from edkm_cli.errors import UserError, brief
from edkm_cli.format import read_json
from edkm_cli.runtime.experts import is_expert

ALL_LINEAR = "all-linear"
_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_adapter(model: Any, *, rank: int, alpha: float, targets: tuple[str, ...]) -> PeftModel:
    """A peft model that trains low-rank updates of linears of `model`, which it changes in place. A fresh one changes no
    output. Updates are float32, A is drawn from PyTorch's generator.

    `targets` are ends of module paths (`q_proj`, `layers.0.mlp.up_proj`), or `all-linear`: all but the output embedding
    and packed experts, each of which sees few tokens.

    Raises UserError for a target that is none.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for end in targets:
        if end != ALL_LINEAR and not any(name == end or name.endswith(f".{end}") for name in names):
            there = ", ".join(sorted({name.rpartition(".")[2] for name in names}))
            raise UserError(f"--target-modules must name linears of the model ({there}) or {ALL_LINEAR}, got {end!r}")
    named: Any = ALL_LINEAR if ALL_LINEAR in targets else list(targets)
    if named == ALL_LINEAR and any(is_expert(name) for name in names):
        head = model.get_output_embeddings()
        named = [name for name in names if not is_expert(name) and model.get_submodule(name) is not head]
    scaled: Any = alpha  # peft says int
    config = LoraConfig(r=rank, lora_alpha=scaled, target_modules=named, bias="none", task_type="CAUSAL_LM")
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        raise UserError(f"--target-modules cannot be adapted: {brief(error, 300)}") from error


def adapted_layers(model: nn.Module) -> dict[str, LoraLayer]:
    """Module path -> peft's layer."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def save_adapter(model: PeftModel, directory: Path, *, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors into an existing directory, for the model at `base`."""
    model.peft_config["default"].base_model_name_or_path = base
    model.save_pretrained(str(directory), save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)  # peft's has nothing but headings


def check_adapter(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a LoRA adapter. Raises UserError where there is none."""
    if not (directory / _CONFIG).is_file() or not (directory / WEIGHTS).is_file():
        raise UserError(f"--adapter must be a directory with {_CONFIG} and {WEIGHTS} of edkm finetune, not {directory}")
    config = read_json(directory / _CONFIG, remedy="save the adapter again")
    if (kind := str(config.get("peft_type"))[:40]) != "LORA":
        raise UserError(f"--adapter must hold a LoRA adapter, but {directory} holds {kind!r}")
    return config


def load_adapter(model: Any, directory: Path) -> PeftModel:
    """A peft model of a packed model and a saved adapter, which does not train.

    Raises UserError for files that are none, or that belong to another model.
    """
    check_adapter(directory)
    try:
        return PeftModel.from_pretrained(model, str(directory), is_trainable=False).eval()
    except UserError:
        raise
    except Exception as error:  # peft, safetensors and json each have their own
        raise UserError(f"--adapter {directory} does not fit ({type(error).__name__}: {brief(error, 300)})") from error
