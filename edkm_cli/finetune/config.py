"""The configurations of `edkm finetune` and `edkm merge`: what they share with `edkm compress` is declared there.

Nothing here imports torch, so `--help` and the checks of a configuration are instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.settings import OUTPUT, TRAINING, faults, from_mapping, read_yaml, refuse, setting, setting_of

_IN_COMPRESS = {of.name: of for of in fields(CompressConfig)}


def as_in_compress(name: str, default: Any = MISSING, **changes: Any) -> Any:
    """A dataclass field that declares the option `name` of `edkm compress`, with what is different here."""
    of = _IN_COMPRESS[name]
    about = replace(setting_of(of), **changes)
    return field(default=of.default if default is MISSING else default, metadata={"setting": about})


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything that decides the training of an adapter. Each field is a flag of `edkm finetune` and a key of its YAML."""

    output: str = as_in_compress("output", "adapter", help="Directory for the adapter.")
    lora_rank: int = setting(16, "Rank of the low-rank updates (LoRA) that train.", TRAINING, minimum=1)
    lora_alpha: float | None = setting(
        None, "LoRA updates are scaled by alpha / rank; default: alpha is twice the rank.", TRAINING, positive=True
    )
    target_modules: tuple[str, ...] = setting(
        ("all-linear",),
        "Linears that get an update, by the end of their path, such as q_proj; all-linear: all but the output head.",
        TRAINING,
    )
    data: tuple[str, ...] = as_in_compress(
        "data",
        (),
        help="Text to learn: builtin, wikitext2, alpaca, c4, fineweb-edu, a data set of the hub as "
        "owner/name[:config][@split], or a file, glob or directory; NAME=WEIGHT gives it a share of the sequences.",
    )
    data_column: str | None = as_in_compress("data_column")
    streaming: bool | None = as_in_compress("streaming")
    train_on: str = as_in_compress("train_on")
    packing: bool = as_in_compress("packing")
    long_records: str = as_in_compress("long_records")
    data_workers: int = as_in_compress("data_workers")
    rebuild_cache: bool = as_in_compress("rebuild_cache")
    eval_data: tuple[str, ...] = as_in_compress(
        "eval_data", help="Text on which perplexity is measured; default: a tenth held out of the first --data."
    )
    eval_windows: int = as_in_compress("eval_windows")
    context: int = as_in_compress("context")
    eval_every: int = as_in_compress("eval_every")
    keep_best: bool = as_in_compress("keep_best")
    steps: int = as_in_compress("steps", help="Optimizer steps.", minimum=1)
    learning_rate: float = as_in_compress("learning_rate", help="Highest learning rate of the updates.")
    warmup: float = as_in_compress("warmup")
    weight_decay: float = as_in_compress("weight_decay", help="Weight decay of the updates.")
    max_grad_norm: float = as_in_compress("max_grad_norm")
    optimizer: str = as_in_compress("optimizer")
    batch_size: int = as_in_compress("batch_size")
    sequence_length: int = as_in_compress("sequence_length")
    gradient_accumulation: int = as_in_compress("gradient_accumulation")
    gradient_checkpointing: bool = as_in_compress("gradient_checkpointing")
    offload: str = as_in_compress("offload")
    dtype: str = as_in_compress(
        "dtype",
        help="Number format of activations; updates and tables keep theirs.",
        choices={"auto": "bfloat16 on a GPU, else float32", **dict.fromkeys(("float32", "bfloat16", "float16"), "")},
    )
    device: str = as_in_compress("device")
    timeout_minutes: int = as_in_compress("timeout_minutes")
    seed: int = as_in_compress("seed")
    save_every: int = as_in_compress("save_every")
    keep: int = as_in_compress("keep")
    log_with: tuple[str, ...] = as_in_compress("log_with")
    trust_remote_code: bool = as_in_compress("trust_remote_code", help="Run code that comes with the model.")

    def __post_init__(self) -> None:
        contradictions = []
        if self.keep_best and not self.eval_every:
            contradictions.append("keep_best chooses among measured steps, but eval_every is 0; give eval_every")
        refuse([*faults(self), *contradictions])

    def training(self, directory: Path) -> CompressConfig:
        """What data, training loop and checkpoints are told of this."""
        return CompressConfig(**_shared(self), model=str(directory), mixed_precision="no")


@dataclass(frozen=True)
class MergeConfig:
    """Everything that decides what an adapter is merged to. Each field is a flag of `edkm merge` and a key of its YAML."""

    adapter: str = setting("", "Directory of the adapter: what edkm finetune or peft wrote.", OUTPUT)
    output: str = as_in_compress("output", "merged", help="Directory for the merged model.")
    data: tuple[str, ...] = as_in_compress(
        "data",
        (),
        help="Text that the merged model is fitted on, named as for edkm compress, or self (text that the adapted model "
        "writes); default: what the adapter was trained on, where edkm finetune did it.",
    )
    data_column: str | None = as_in_compress("data_column")
    streaming: bool | None = as_in_compress("streaming")
    train_on: str | None = as_in_compress("train_on", None)
    packing: bool | None = as_in_compress("packing", None)
    start_tokens: int | None = as_in_compress("start_tokens", help="Tokens that the merged model is fitted on.")
    start_passes: int = as_in_compress(
        "start_passes",
        help="How often the fit of each decoder layer goes over these tokens; 0 only compensates rounding errors.",
    )
    steps: int = as_in_compress(
        "steps", 20, help="Optimizer steps in which the fitted model learns from the adapted one; 0 needs less memory."
    )
    learning_rate: float = as_in_compress("learning_rate")
    lut_learning_rate: float = as_in_compress("lut_learning_rate")
    batch_size: int = as_in_compress("batch_size")
    sequence_length: int = as_in_compress("sequence_length", 512)
    label_weight: float | None = as_in_compress(
        "label_weight",
        help="Weight of the next-token loss beside the adapted model's predictions; default: 1, or 0 (these only) with "
        "--data self.",
    )
    gradient_checkpointing: bool = as_in_compress("gradient_checkpointing")
    eval_data: tuple[str, ...] = as_in_compress(
        "eval_data", help="Text on which perplexity is measured; default: a tenth held out of the first --data."
    )
    eval_windows: int = as_in_compress("eval_windows")
    context: int = as_in_compress("context")
    max_perplexity_ratio: float = setting(
        1.03,
        "Fail, with the result left in DIR.partial, where the merged perplexity is more than this many times the "
        "adapter's; 0 allows any.",
        OUTPUT,
        minimum=0,
    )
    device: str = as_in_compress("device")
    seed: int = as_in_compress("seed")
    trust_remote_code: bool = as_in_compress("trust_remote_code", help="Run code that comes with the model.")

    def __post_init__(self) -> None:
        refuse(faults(self))

    def training(self, directory: Path) -> CompressConfig:
        """What data, training loop and measurements are told of this."""
        shared = _shared(self) | {"max_perplexity_ratio": 0.0}
        return CompressConfig(**shared, model=str(directory), dtype="float32", mixed_precision="no", save_every=0)


def _shared(config: FinetuneConfig | MergeConfig) -> dict[str, Any]:
    return {of.name: getattr(config, of.name) for of in fields(config) if of.name in _IN_COMPRESS}


def build_finetune_config(file: str | Path | None, flags: Mapping[str, Any]) -> FinetuneConfig:
    """Defaults, overridden by the file, overridden by the flags that are not None. Raises UserError with all faults."""
    return _build(FinetuneConfig, file, flags)


def build_merge_config(file: str | Path | None, flags: Mapping[str, Any]) -> MergeConfig:
    """Defaults, overridden by the file, overridden by the flags that are not None. Raises UserError with all faults."""
    return _build(MergeConfig, file, flags)


def _build(kind: Any, file: str | Path | None, flags: Mapping[str, Any]) -> Any:
    values = read_yaml(file) if file is not None else {}
    values.update({name: value for name, value in flags.items() if value is not None})
    return from_mapping(kind, values)


def require_data(data: tuple[str, ...], told: str) -> None:
    """Raises UserError where no text is named."""
    if not data:
        raise UserError(f"--data is required, {told}; for example a file, or builtin (Python's documentation)")
