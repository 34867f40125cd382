"""The configurations of `edkm finetune` and `edkm merge`: what they share with `edkm compress` is declared there.

Nothing here imports torch, so `--help` and the checks of a configuration are instant.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edkm_cli.config import TextSettings, TrainingSettings, as_in_compress, unmeasured_best
from edkm_cli.errors import UserError
from edkm_cli.settings import DTYPES, MODEL, OUTPUT, TRAINING, faults, from_mapping, given_values, refuse, setting

TABLES = "tables"
DISTILL = {"train": TABLES, "data": ("self",), "output": "distilled"}  # what `edkm distill` has where nothing is given
_MEASURED = "Text on which perplexity is measured; default: a part held out of the first --data, or builtin."


@dataclass(frozen=True)
class FinetuneConfig(TrainingSettings, TextSettings):
    """Everything that decides how a compressed model goes on training: flags of `edkm finetune` and keys of its YAML."""

    # fmt: off
    output: str = as_in_compress("output", "finetuned", help="Directory for the adapter, or for the trained model.")
    train: str = setting("adapter", "What trains.", TRAINING,
        choices={
            "adapter": "low-rank updates (LoRA) beside the model, which stays as it is",
            TABLES: "lookup tables, norms and biases; the result is a compressed model of the same size",
        })
    reference: str = setting("",
        "With --train tables, the uncompressed model to learn from: an alias, a hub id, a directory or a GGUF file.",
        MODEL)
    lora_rank: int | None = setting(None, "Rank of the low-rank updates (LoRA) that train; default: 16.", TRAINING,
        minimum=1)
    lora_alpha: float | None = setting(None,
        "LoRA updates are scaled by alpha / rank; default: alpha is twice the rank.", TRAINING, positive=True)
    target_modules: tuple[str, ...] = setting(("all-linear",),
        "Linears that get an update, by the end of their path, such as q_proj; all-linear: all but head and experts.",
        TRAINING)
    data: tuple[str, ...] = as_in_compress("data", (),
        help="Text to learn: builtin, wikitext2, alpaca, c4, fineweb-edu, a data set of the hub as "
        "owner/name[:config][@split], or a file, glob or directory; NAME=WEIGHT gives it a share of the sequences; "
        "self: text that the --reference writes.")
    eval_data: tuple[str, ...] = as_in_compress("eval_data", help=_MEASURED)
    label_weight: float | None = as_in_compress("label_weight",
        help="Weight of the next-token loss beside the --reference's predictions; default: 1, or 0 (these only) with "
        "--data self.")
    gradient_checkpointing: bool | None = as_in_compress("gradient_checkpointing",
        help="Save memory: compute activations again in the backward pass; default: with --train tables.")
    steps: int = as_in_compress("steps", help="Optimizer steps.", minimum=1)
    learning_rate: float = as_in_compress("learning_rate", 2e-4, help="Highest learning rate of LoRA matrices or norms.")
    lut_learning_rate: float | None = as_in_compress("lut_learning_rate")
    weight_decay: float = as_in_compress("weight_decay", help="Weight decay of an adapter's updates.")
    dtype: str = as_in_compress("dtype", help="Number format of activations; updates and tables keep theirs.",
        choices={"auto": "bfloat16 on a GPU, else float32", **dict.fromkeys(DTYPES, "")})
    trust_remote_code: bool = as_in_compress("trust_remote_code", help="Run code that comes with the model.")
    # fmt: on

    def __post_init__(self) -> None:
        refuse([*faults(self), *unmeasured_best(self), *self._contradictions()])

    def _contradictions(self) -> list[str]:
        """What no single value shows."""
        found = []
        if self.train == TABLES:
            lora = {"lora_rank": None, "lora_alpha": None, "target_modules": ("all-linear",), "weight_decay": 0.0}
            given = [name for name, default in lora.items() if getattr(self, name) != default]
            found += [f"{name} is of an adapter, but train is {TABLES}; leave one out" for name in given]
        elif self.reference:
            found.append(f"reference teaches tables, but train is {self.train}; use train {TABLES}")
        if self.train != TABLES and self.lut_learning_rate != FinetuneConfig.lut_learning_rate:
            found.append(f"lut_learning_rate is of tables, but train is {self.train}; leave one out")
        if "all-linear" in self.target_modules and len(self.target_modules) > 1:
            found.append("target_modules all-linear stands alone; leave it or the others out")
        if self.label_weight is not None and not self.reference:
            found.append("label_weight stands beside a reference's predictions, but there is none; leave it out")
        return found


@dataclass(frozen=True)
class MergeConfig:
    """Everything that decides what an adapter is merged to. Each field is a flag of `edkm merge` and a key of its YAML."""

    # fmt: off
    adapter: str = setting("", "Directory of the adapter: what edkm finetune or peft wrote.", OUTPUT)
    output: str = as_in_compress("output", "merged", help="Directory for the merged model.")
    data: tuple[str, ...] = as_in_compress("data", (),
        help="Text that the merged model is fitted on, named as for edkm compress, or self (text that the adapted "
        "model writes); default: what the adapter was trained on, where edkm finetune did it.")
    data_column: str | None = as_in_compress("data_column")
    streaming: bool | None = as_in_compress("streaming")
    train_on: str | None = as_in_compress("train_on", None)
    packing: bool | None = as_in_compress("packing", None)
    long_records: str | None = as_in_compress("long_records", None)
    start_tokens: int | None = as_in_compress("start_tokens",
        help="Tokens that the merged model is fitted on; default: as many as train, 20480 to 61440.")
    start_passes: int = as_in_compress("start_passes",
        help="How often the fit of each decoder layer goes over these tokens; 0: closed form only.")
    steps: int = as_in_compress("steps", 20,
        help="Optimizer steps in which the fitted model learns from the adapted one; 0 needs less memory.")
    learning_rate: float | None = as_in_compress("learning_rate")
    lut_learning_rate: float | None = as_in_compress("lut_learning_rate")
    batch_size: int = as_in_compress("batch_size")
    sequence_length: int = as_in_compress("sequence_length", 512)
    label_weight: float | None = as_in_compress("label_weight",
        help="Weight of the next-token loss beside the adapted model's predictions; default: 1, or 0 (these only) "
        "with --data self.")
    gradient_checkpointing: bool = as_in_compress("gradient_checkpointing",
        help="Save memory: compute activations again in the backward pass.")
    eval_data: tuple[str, ...] = as_in_compress("eval_data", help=_MEASURED)
    eval_windows: int = as_in_compress("eval_windows")
    context: int = as_in_compress("context")
    max_perplexity_ratio: float = setting(1.03,
        "Fail, with the result left in DIR.partial, where the merged perplexity is more than this many times the "
        "adapter's; 0 allows any.", OUTPUT, minimum=0)
    device: str = as_in_compress("device")
    seed: int = as_in_compress("seed")
    trust_remote_code: bool = as_in_compress("trust_remote_code", help="Run code that comes with the model.")
    # fmt: on

    def __post_init__(self) -> None:
        refuse(faults(self))


def build_distill_config(file: str | Path | None, flags: Mapping[str, Any]) -> FinetuneConfig:
    """`edkm distill`: `edkm finetune --train tables` on text that the reference writes. Raises UserError with all faults."""
    values = {**DISTILL, **given_values(file, flags)}
    if not values.get("reference"):
        raise UserError("--reference is required: the uncompressed model that DIR was made of")
    return from_mapping(FinetuneConfig, values)


def require_data(data: tuple[str, ...], told: str) -> None:
    """Raises UserError where no text is named."""
    if not data:
        raise UserError(f"--data is required, {told}; for example a file, or builtin (Python's documentation)")
