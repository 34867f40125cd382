"""What `edkm compare` is asked for: one model and text, and a list of methods that may each have options of their own.

A method is written `name` or `name:option=value:option=value`, in YAML also as a mapping:

    methods: [rtn, "rtn:bits=4", {method: edkm, steps: 100, granularity: "row:1"}]

Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from edkm_cli.baselines import METHODS as BASELINES
from edkm_cli.config import from_mapping, read_yaml
from edkm_cli.errors import UserError

UNCOMPRESSED, OURS, AUTOROUND = "fp16", "edkm", "autoround"
METHODS = (UNCOMPRESSED, *BASELINES, AUTOROUND, OURS)


@dataclass(frozen=True)
class CompareConfig:
    """Everything that a comparison's methods have in common; see `edkm compare --help`."""

    model: str = ""
    methods: tuple[str, ...] = (UNCOMPRESSED, "rtn", "gptq", "awq", "kmeans", OURS)
    output: str = "out/compare"
    bits: int = 3
    group_size: int = 64
    data: tuple[str, ...] = ("builtin",)
    eval_data: str | None = None
    context: int = 1024
    eval_windows: int = 8
    calibration_samples: int = 128
    sequence_length: int = 512
    steps: int = 100
    device: str = "auto"
    seed: int = 0
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        minima = {"bits": 1, "group_size": 0, "context": 2, "eval_windows": 1, "calibration_samples": 1}
        minima |= {"sequence_length": 2, "steps": 0, "seed": 0}
        faults = [
            f"{name} must be at least {low}, got {getattr(self, name)}"
            for name, low in minima.items()
            if getattr(self, name) < low
        ]
        if self.bits > 8:
            faults.append(f"bits must be at most 8, got {self.bits}")
        if not self.data:
            faults.append("data must name at least one data set or file")
        if not self.methods:
            faults.append(f"methods must name at least one of {', '.join(METHODS)}")
        entries = []
        for text in self.methods:
            try:
                entries.append(Entry.parse(text))
            except UserError as error:
                faults.append(str(error))
        for entry in entries:
            if entries.count(entry) > 1 and f"methods names {entry.label} twice" not in faults:
                faults.append(f"methods names {entry.label} twice")
        if faults:
            raise UserError("configuration: " + "; ".join(faults))

    def entries(self) -> list[Entry]:
        return [Entry.parse(text) for text in self.methods]


@dataclass(frozen=True)
class Entry:
    """One row to measure: a method and the options it has of its own, as (name, value) in the order of their names."""

    method: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Entry:
        """`name:option=value:...`; a colon begins an option where a name and `=` follow, so that `row:1` is a value.

        Raises UserError for an unknown method, or an option that is none or comes twice.
        """
        method, *parts = re.split(r":(?=[a-zA-Z_-]+=)", text.strip())
        if method not in METHODS:
            raise UserError(f"methods must be of {', '.join(METHODS)} (options: name:option=value), got {text!r}")
        options = {}
        for part in parts:
            name, _, value = part.partition("=")
            name = name.replace("-", "_")
            if name in options:
                raise UserError(f"methods must give an option once, got {name} twice in {text!r}")
            try:
                options[name] = yaml.safe_load(value)
            except yaml.YAMLError:
                options[name] = value
        return cls(method, tuple(sorted(options.items())))

    @property
    def label(self) -> str:
        """The canonical text, that `parse` reads."""
        return ":".join([self.method, *(f"{name}={_text(value)}" for name, value in self.options)])

    @property
    def slug(self) -> str:
        """The label as the name of a file."""
        return re.sub(r"[^A-Za-z0-9.=_]+", "-", self.label.replace(":", "_"))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def build_compare_config(file: str | Path | None, flags: Mapping[str, Any]) -> CompareConfig:
    """Defaults, overridden by the file, overridden by the flags that are not None. Raises UserError with all faults."""
    values = read_yaml(file) if file is not None else {}
    if isinstance(values.get("methods"), list):
        values["methods"] = [_from_yaml(item) for item in values["methods"]]
    values.update({name: value for name, value in flags.items() if value is not None})
    if isinstance(values.get("methods"), str):
        values["methods"] = [part.strip() for part in values["methods"].split(",") if part.strip()]
    return from_mapping(CompareConfig, values)


def _from_yaml(item: Any) -> Any:
    """A method's mapping as its text; everything else as it is, for the checks to judge."""
    if not isinstance(item, Mapping):
        return item
    options = {name: value for name, value in item.items() if name != "method"}
    if not isinstance(item.get("method"), str):
        raise UserError(f"configuration: a mapping in methods must have the key 'method', got {dict(item)}")
    for name, value in options.items():
        if not isinstance(value, (str, int, float, bool)):
            raise UserError(f"configuration: an option of {item['method']} must be one value, got {name}: {value!r}")
    return ":".join([item["method"], *(f"{name}={_text(value)}" for name, value in options.items())])
