"""The configuration of `edkm compare`: one model, one text, and a list of methods, each with options of its own.

A method is written `name` or `name:option=value:option=value`, in YAML also as a mapping:

    methods: [rtn, "rtn:bits=4", {method: edkm, steps: 100, granularity: "row:1"}, "gguf:model-Q3_K_S.gguf"]

`gguf:FILE` is a file of llama.cpp of the same model, `mlx:DIR` a directory of mlx-lm, both measured as they are.

Nothing here imports torch.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from edkm_cli import settings
from edkm_cli.config import as_in_compress
from edkm_cli.errors import UserError
from edkm_cli.research.baselines import METHODS as BASELINES
from edkm_cli.settings import COMPRESSION, DATA, MAX_WHOLE, OUTPUT, TRAINING, faults, refuse, setting, shown

UNCOMPRESSED, OURS, GGUF, MLX = "fp16", "edkm", "gguf", "mlx"
FILES = (GGUF, MLX)  # other engines' models
METHODS = (UNCOMPRESSED, *BASELINES, *FILES, OURS)
TOKENS, PREDICTIONS = "tokens.safetensors", "predictions"  # in the folder that all workers read


@dataclass(frozen=True)
class CompareConfig:
    """Everything that a comparison's methods have in common; see `edkm compare --help`."""

    model: str = as_in_compress("model")
    methods: tuple[str, ...] = setting(
        (UNCOMPRESSED, "rtn", "gptq", "awq", "kmeans", OURS),
        f"Methods to compare, with commas: {', '.join(METHODS)}; with options as name:option=value. gguf:FILE is a file of "
        "llama.cpp of the same model, mlx:DIR a directory of mlx-lm.",
        COMPRESSION,
        check=lambda text: Entry.parse(text),
    )
    output: str = setting("out/compare", "Directory for results; finished ones are reused.", OUTPUT, "--output", "-o")
    bits: int = setting(3, "Bits per weight.", COMPRESSION, minimum=1, maximum=8)
    group_size: int = setting(64, "Weights of a row that share a scale; 0: the whole row.", COMPRESSION, minimum=0)
    data: tuple[str, ...] = setting(("builtin",), "Text to calibrate and train on: wikitext2, builtin or a file.", DATA)
    eval_data: tuple[str, ...] = as_in_compress("eval_data", help="Text that is measured; default: a part of --data.")
    context: int = as_in_compress("context")
    eval_windows: int = as_in_compress("eval_windows", 8)
    calibration_samples: int = setting(128, "Sequences that the baselines calibrate on.", DATA, minimum=1)
    sequence_length: int = setting(512, "Tokens in a sequence for calibration and training.", TRAINING, minimum=2)
    steps: int = setting(100, "Optimizer steps of the methods that train.", TRAINING, minimum=0)
    device: str = as_in_compress("device")
    seed: int = setting(0, "Seed of calibration samples and training.", TRAINING, minimum=0)
    seeds: int = setting(1, "How often each row of edkm is measured, with other seeds.", TRAINING, minimum=1)
    trust_remote_code: bool = as_in_compress("trust_remote_code")

    def __post_init__(self) -> None:
        found = faults(self)
        labels = [] if found else [entry.label for entry in self.entries()]
        # What no single value shows.
        if not self.data:
            found.append("data must name at least one data set or file")
        if len(set(self.eval_data)) < len(self.eval_data):
            found.append(f"eval_data must name each text once, got {', '.join(self.eval_data)}")
        if not self.methods:
            found.append(f"methods must name at least one of {', '.join(METHODS)}")
        twice = [label for label in dict.fromkeys(labels) if labels.count(label) > 1]
        refuse(found + [f"methods names {label} twice" for label in twice])

    def entries(self) -> "list[Entry]":
        """The rows: one of each method, and of ours one for each seed, the first without the option."""
        rows = []
        for entry in map(Entry.parse, self.methods):
            rows.append(entry)
            if entry.method == OURS and "seed" not in dict(entry.options):
                seeded = [{**dict(entry.options), "seed": self.seed + more} for more in range(1, self.seeds)]
                rows += [Entry(OURS, tuple(sorted(options.items()))) for options in seeded]
        return rows


@dataclass(frozen=True)
class Entry:
    """One row to measure: a method and the options it has of its own, as (name, value) in the order of their names."""

    method: str
    options: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Entry":
        """`name:option=value:...`; a colon begins an option where a name and `=` follow, so that `row:1` is a value.

        >>> Entry.parse("kmeans:bits=4:granularity=row:1")
        Entry(method='kmeans', options=(('bits', 4), ('granularity', 'row:1')))

        Raises UserError for an unknown method, or an option without a value or given twice.
        """
        method, *parts = re.split(r":(?=[a-zA-Z_-]+=)", text.strip())
        kind, _, file = method.partition(":")
        if kind in FILES and file:
            method, parts = kind, [f"file={file}", *parts]
        if method not in METHODS:
            raise UserError(f"a method must be one of {', '.join(METHODS)} (options: name:option=value), got {text!r}")
        options = {}
        for part in parts:
            name, _, value = part.partition("=")
            if (name := name.replace("-", "_")) in options:
                raise UserError(f"each option of a method must be given once, got {name} twice in {text!r}")
            try:
                options[name] = value if method in FILES else yaml.safe_load(value)
            except (yaml.YAMLError, ValueError, RecursionError):
                options[name] = value
        return cls(method, tuple(sorted(options.items())))

    @property
    def label(self) -> str:
        """The canonical text, that `parse` reads."""
        if self.method in FILES and [name for name, _ in self.options] == ["file"]:
            return f"{self.method}:{self.options[0][1]}"
        return ":".join([self.method, *(f"{name}={_text(value)}" for name, value in self.options)])

    @property
    def slug(self) -> str:
        """The label as the name of a file; where that loses something, with a digest."""
        label = self.label.replace(":", "_")
        name = re.sub(r"[^A-Za-z0-9.=_]+", "-", label)
        return name if name == label else f"{name}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def build_compare_config(file: str | Path | None, flags: Mapping[str, Any]) -> CompareConfig:
    """Defaults, overridden by the file, overridden by the flags that are not None. Raises UserError with all faults."""
    values = settings.given_values(file, flags)
    methods: Any = values.get("methods")
    if isinstance(methods, str) or flags.get("methods") is not None:
        texts = [methods] if isinstance(methods, str) else methods  # each with commas
        values["methods"] = [part.strip() for text in texts for part in text.split(",") if part.strip()]
    elif isinstance(methods, list):
        values["methods"] = [_from_yaml(item) for item in methods]
    return settings.from_mapping(CompareConfig, values)


def _from_yaml(item: Any) -> Any:
    """A method's mapping as its text; everything else as it is, for the checks to judge."""
    if not isinstance(item, Mapping):
        return item
    options = {name: value for name, value in item.items() if name != "method"}
    if not isinstance(item.get("method"), str):
        raise UserError(f"configuration: a mapping in methods must have the key 'method', got {shown(dict(item))}")
    for name, value in options.items():
        short = not isinstance(value, int) or abs(value) <= MAX_WHOLE  # Python writes no number of thousands of digits
        if not isinstance(name, str) or not isinstance(value, (str, int, float, bool)) or not short:
            rule = f"configuration: an option of {shown(item['method'])} must be one value of usual size"
            raise UserError(f"{rule}, got {shown(name)}: {shown(value)}")
    return ":".join([item["method"], *(f"{name}={_text(value)}" for name, value in options.items())])
