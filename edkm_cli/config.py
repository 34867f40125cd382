"""The configuration of a run: a frozen dataclass read from YAML and flags.

Standard library and yaml only: nothing here imports torch, so `--help` and the checks of a configuration are instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from edkm_cli.errors import UserError as UserError
from edkm_cli.granularity import Granularity


def configs_directory() -> Path:
    """Where models.yaml and the ready configurations are: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).parent
    beside = package.parent / "configs"
    return beside if (beside / "models.yaml").is_file() else package / "configs"


@dataclass(frozen=True)
class CompressConfig:
    """Everything that decides a compression run. Field names are those of the flags; see `edkm compress --help`."""

    model: str = ""
    output: str = "out"
    bits: int = 3
    granularity: str = "row:1"
    lut_dtype: str = "float16"
    embedding_bits: int = 8
    skip: tuple[str, ...] = ()
    # clustering
    method: str = "edkm"
    mode: str = "straight-through"
    iterations: int = 1
    temperature: float = 0.02
    temperature_end: float = 0.002
    temperature_schedule: str = "constant"
    importance: str = "gradient"
    calibration_tokens: int = 4096
    start: str = "auto"
    start_tokens: int = 8192
    # data
    data: tuple[str, ...] = ("builtin",)
    eval_data: str | None = None
    eval_windows: int = 4
    context: int = 1024
    # training
    steps: int = 100
    learning_rate: float = 2e-4
    lut_learning_rate: float = 2e-4
    warmup: float = 0.1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    optimizer: str = "adamw"
    lora_rank: int = 0
    lora_alpha: float | None = None
    batch_size: int = 1
    sequence_length: int = 1024
    gradient_accumulation: int = 1
    distill: bool = True
    label_weight: float = 1.0
    hidden_weight: float = 0.0
    gradient_checkpointing: bool = False
    offload: str = "none"
    memory: str = "auto"
    dtype: str = "auto"
    mixed_precision: str = "auto"
    device: str = "auto"
    sharding: str = "auto"
    timeout_minutes: int = 30
    seed: int = 0
    save_every: int = 50
    keep: int = 2
    log_with: tuple[str, ...] = ()
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        faults = [*self._faults()]
        if faults:
            raise UserError("configuration: " + "; ".join(faults))

    def _faults(self) -> list[str]:
        """Every value out of its range, so that all are reported at once."""
        faults = [f"{name} must be at least {low}, got {value}" for name, low, value in self._minima() if value < low]
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                faults.append(f"{name} must be one of {', '.join(map(str, choices))}, got {getattr(self, name)!r}")
        for name in ("learning_rate", "lut_learning_rate", "temperature", "temperature_end", "max_grad_norm"):
            if not getattr(self, name) > 0:
                faults.append(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.warmup <= 1:
            faults.append(f"warmup must be a fraction of the steps, 0 to 1, got {self.warmup}")
        if self.lora_alpha is not None and not self.lora_alpha > 0:
            faults.append(f"lora_alpha must be positive, got {self.lora_alpha}")
        if self.start == "compensated" and self.lora_rank:
            faults.append("start compensated moves the weights, which LoRA keeps; leave start out, or lora_rank")
        for tracker in self.log_with:
            if tracker not in TRACKERS:
                faults.append(f"log_with must be of {', '.join(TRACKERS)}, got {tracker!r}")
        if not self.data:
            faults.append("data must name at least one data set or file")
        try:
            Granularity.parse(self.granularity)
        except UserError as error:
            faults.append(str(error))
        return faults

    def _minima(self) -> list[tuple[str, int, int | float]]:
        zeros = ("steps", "calibration_tokens", "seed", "weight_decay", "save_every", "lora_rank", "iterations")
        ones = (
            "batch_size",
            "gradient_accumulation",
            "eval_windows",
            "keep",
            "timeout_minutes",
            "start_tokens",
        )
        return [
            *((name, 1, getattr(self, name)) for name in ones),
            *((name, 0, getattr(self, name)) for name in zeros),
            *((name, 2, getattr(self, name)) for name in ("sequence_length", "context")),
        ]


TRACKERS = ("tensorboard", "wandb")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "bits": tuple(range(1, 9)),
    "embedding_bits": (*range(2, 9), 16),
    "lut_dtype": ("float16", "bfloat16", "float32", "float8_e4m3fn"),
    "method": ("edkm", "dkm"),
    "mode": ("straight-through", "hard", "soft"),
    "temperature_schedule": ("constant", "linear", "cosine", "exponential"),
    "start": ("auto", "kmeans", "compensated"),
    "importance": ("gradient", "activation", "none"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "mixed_precision": ("auto", "no", "bf16"),
    "optimizer": ("adamw", "adamw-8bit", "sgd"),
    "sharding": ("auto", "none", "full"),
    "offload": ("none", "cpu"),
    "memory": ("auto", "speed", "small"),
}

_Config = TypeVar("_Config", bound=Any)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file with a mapping. Raises UserError where it is none."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"--config names a file that does not exist: {path}; see configs/ for ready ones")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config must be YAML, but {path} is not ({' '.join(str(error).split())})") from error
    if not isinstance(values, Mapping):
        raise UserError(f"--config must hold a mapping of settings, but {path} holds a {type(values).__name__}")
    return dict(values)


def build_config(file: str | Path | None, flags: Mapping[str, Any]) -> CompressConfig:
    """Defaults, overridden by the file, overridden by the flags that are not None.

    Raises UserError that lists all faults at once: unknown keys with what they may have meant, wrong types, bad values.
    """
    values = read_yaml(file) if file is not None else {}
    values.update({name: value for name, value in flags.items() if value is not None})
    return from_mapping(CompressConfig, values)


def from_mapping(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """A configuration dataclass from its defaults and these values. Raises UserError that lists all faults at once."""
    hints = get_type_hints(kind)
    faults, clean = [], {}
    for name, value in values.items():
        if name not in hints:
            faults.append(f"unknown key {name!r}{_suggestion(str(name), list(hints))}")
            continue
        try:
            clean[name] = coerce(name, value, hints[name])
        except ValueError as error:
            faults.append(str(error))
    known = {field.name: field.default for field in fields(kind)}
    probe = kind()
    for name, value in clean.items():  # one at a time, to collect every fault
        try:
            probe = replace(probe, **{name: value})
        except UserError as error:
            faults.append(str(error).removeprefix("configuration: "))
    if faults:
        raise UserError("configuration: " + "; ".join(faults))
    return kind(**{**known, **clean})


def _suggestion(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    close = get_close_matches(name.replace("-", "_"), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def coerce(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type. Raises ValueError saying what was expected. Accepts 2e-4, which YAML reads as text."""
    wanted = [kind for kind in get_args(hint) if kind is not type(None)] if type(None) in get_args(hint) else [hint]
    if value is None and type(None) in get_args(hint):
        return None
    kind = wanted[0]
    if kind == tuple[str, ...]:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
            return tuple(items)
        raise ValueError(f"{name} must be a list of texts, got {value!r}")
    if kind is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be a number, got {value!r}") from None
    if (kind is int and isinstance(value, bool)) or not isinstance(value, kind):
        names = {int: "a whole number", str: "a text", bool: "true or false", float: "a number"}
        raise ValueError(f"{name} must be {names[kind]}, got {value!r}")
    return value
