"""How a configuration is declared, checked and read. Standard library and yaml only: nothing here imports torch.

A configuration is a frozen dataclass. Each field states its default, help text, panel of `--help`, choices and range
(`setting`). Everything else follows from that one place: the checks (`faults`), reading YAML and flags (`from_mapping`),
and the options of the command (`edkm_cli.cli.options`). To add an option, add a field (CONTRIBUTING.md).
"""

import math
import os
import re
import reprlib
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from itertools import accumulate
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from edkm_cli.errors import UserError

PANELS = MODEL, COMPRESSION, TRAINING, DATA, VERDICT, TASKS, SCALE, OUTPUT = (
    "Model", "Compression", "Training", "Data", "Verdict", "Tasks", "Scale", "Output",
)  # fmt: skip

# Help texts of what several commands take.
DEVICE = "Where to compute: auto, cpu, cuda or cuda:N."
DTYPES = ("float32", "bfloat16", "float16")  # of weights that are loaded
REMOTE_CODE = "Run the Python files that come with a model."

_PREFIX = "configuration: "
_MAX_YAML_BYTES, _MAX_KEYS, _MAX_DEPTH = 2**18, 10_000, 100
MAX_WHOLE = 2**40  # of any setting: seeds are multiplied, and tensors take 64 bits
_Config = TypeVar("_Config", bound=Any)
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 200, 200, 60


def configs_directory() -> Path:
    """Where models.yaml and the ready configurations are: beside the package in a checkout, inside it when installed."""
    package = Path(__file__).parent
    beside = package.parent / "configs"
    return beside if (beside / "models.yaml").is_file() else package / "configs"


def cache_directory() -> Path:
    """Everything that is kept between runs: $EDKM_CACHE, or edkm/ in the user's cache directory."""
    if os.environ.get("EDKM_CACHE"):
        return Path(os.environ["EDKM_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edkm"


def token_cache_directory() -> Path:
    """$EDKM_TOKEN_CACHE; else `tokens/` in the cache directory."""
    return Path(os.environ.get("EDKM_TOKEN_CACHE") or cache_directory() / "tokens").expanduser()


def ready_file(path: str | Path) -> Path:
    """A file as it was named; where there is none, the one of edkm's own that `configs/FILE` or FILE names."""
    named = Path(path).expanduser()
    shipped = configs_directory() / named.name
    own = not named.exists() and named.parts in (("configs", named.name), (named.name,)) and shipped.is_file()
    return shipped if own else named


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(text: str) -> int:
    """`24GiB`, `80 GB`, `25769803776`. Raises UserError."""
    found = re.fullmatch(r"\s*(\d{1,20}(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", text.upper())
    if found is None or (found[2] or "B") not in _UNITS:
        raise UserError(f"a size must be like 24GiB or 80GB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2] or "B"])


@dataclass(frozen=True)
class Setting:
    """What a field says about itself.

    Attributes:
        help: one or two sentences that make sense alone; choices, repetition and default are added to it.
        panel: heading under which `--help` shows the option, one of `PANELS`.
        flags: all spellings, where `--field-name` (of a bool, `--no-field-name` too) is not enough.
        choices: the allowed values (of each item, for a tuple), each with its explanation, which may be empty.
        finite: False allows infinity. NaN never is.
        check: called with a value (each item, for a tuple) that is otherwise right; raises UserError to refuse it.
    """

    help: str
    panel: str
    flags: tuple[str, ...] = ()
    choices: Mapping[Any, str] | None = None
    minimum: float | None = None
    positive: bool = False
    maximum: float | None = None
    finite: bool = True
    check: Callable[[Any], object] | None = None


def setting(
    default: Any, help: str, panel: str, *flags: str, choices: Mapping[Any, str] | Iterable[Any] = (), **rules: Any
) -> Any:
    """A dataclass field with this default that declares an option; `rules` are the other attributes of `Setting`."""
    explained = choices if isinstance(choices, Mapping) else dict.fromkeys(choices, "")
    return field(default=default, metadata={"setting": Setting(help, panel, flags, explained or None, **rules)})


def setting_of(of: Field[Any]) -> Setting:
    """The declaration of a dataclass field."""
    return of.metadata["setting"]


def faults(config: Any, missing: Mapping[str, str] = {}) -> list[str]:
    """One sentence for each value of a configuration that its declaration forbids, or that says nothing: of each panel in
    `missing` the option is named without which its others do nothing."""
    named = [(of, getattr(config, of.name), setting_of(of).panel) for of in fields(config)]
    return [fault for of, value, _ in named for fault in _value_faults(of, value)] + [
        f"{of.name} says nothing without {missing[panel]}; give that, too, or leave {of.name} out"
        for of, value, panel in named
        if panel in missing and value != of.default
    ]


def command_line(command: str, config: Any, *always: str) -> str:
    """The command that asks for these settings: those that differ from their defaults, and those of the names `always`."""
    parts = [command]
    for of in fields(config):
        value, flag = getattr(config, of.name), "--" + of.name.replace("_", "-")
        if value == of.default and of.name not in always:
            continue
        if isinstance(value, bool):
            parts.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            parts += [f"{flag} {shlex.quote(str(item))}" for item in (value if isinstance(value, tuple) else (value,))]
    return " ".join(parts)


def part_of(kind: type[_Config], config: Any, **changes: Any) -> _Config:
    """The settings of `kind` that a configuration has, with `changes`; those that it lacks have their defaults."""
    shared = {of.name: getattr(config, of.name) for of in fields(kind) if hasattr(config, of.name)}
    return kind(**{**shared, **changes})


def refuse(all_faults: list[str]) -> None:
    """Raise UserError with all faults in one line, if there is one."""
    if all_faults:
        raise UserError(_PREFIX + "; ".join(all_faults))


def _value_faults(of: Field[Any], value: Any) -> list[str]:
    if value is None:
        return []
    items = value if isinstance(value, tuple) else (value,)
    return [fault for item in items if (fault := _fault(of.name, setting_of(of), item))]


def _fault(name: str, rule: Setting, value: Any) -> str:
    """What is wrong with one value; empty where nothing is."""
    if rule.choices and value not in rule.choices:
        return f"{name} must be one of {', '.join(map(str, rule.choices))}, got {shown(value)}"
    if isinstance(value, float) and (math.isnan(value) or (rule.finite and math.isinf(value))):
        return f"{name} must be a {'finite ' * rule.finite}number, got {value}"
    if rule.minimum is not None and value < rule.minimum:
        return f"{name} must be at least {rule.minimum}, got {shown(value)}"
    if rule.positive and not value > 0:
        return f"{name} must be positive, got {value}"
    if rule.maximum is not None and value > rule.maximum:
        return f"{name} must be at most {rule.maximum}, got {value}"
    try:
        if rule.check is not None:
            rule.check(value)
    except UserError as error:
        return str(error)
    return ""


def from_mapping(kind: type[_Config], values: Mapping[str, Any]) -> _Config:
    """A configuration dataclass from its defaults and these values.

    Raises UserError that lists all faults at once: unknown keys with what they may have meant, wrong types, bad values,
    and what contradicts one another among the values that are right by themselves.
    """
    hints, known = get_type_hints(kind), {of.name: of for of in fields(kind)}
    all_faults: list[str] = []
    good = {}
    for name, value in values.items():
        if name not in known:
            close = get_close_matches(shown(name).strip("'\"").replace("-", "_"), list(known), n=1)
            all_faults.append(f"unknown key {shown(name)}" + (f" (did you mean {close[0]!r}?)" if close else ""))
            continue
        if value is False and "no" in (setting_of(known[name]).choices or ()):  # what YAML makes of the word
            value = "no"
        try:
            clean = coerce(name, value, hints[name])
        except ValueError as error:
            all_faults.append(str(error))
            continue
        wrong = _value_faults(known[name], clean)
        all_faults += wrong
        if not wrong:
            good[name] = clean
    try:
        config = kind(**good)
    except UserError as error:
        all_faults.append(str(error).removeprefix(_PREFIX))
    refuse(all_faults)
    return config


def given_values(file: str | Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """What the file says, overridden by the flags that are not None."""
    values = read_yaml(ready_file(file)) if file is not None else {}
    return {**values, **{name: value for name, value in flags.items() if value is not None}}


def from_file(kind: type[_Config], file: str | Path | None, flags: Mapping[str, Any]) -> _Config:
    """A configuration dataclass from its defaults, the file and the flags. Raises UserError as `from_mapping` does."""
    return from_mapping(kind, given_values(file, flags))


def coerce(name: str, value: Any, hint: Any) -> Any:
    """`value` as the field's type. Raises ValueError saying what was expected. Accepts 2e-4, which YAML reads as text."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    wanted = [kind for kind in kinds if kind is not type(None)]
    if value is None and type(None) in kinds:
        return None
    kind = wanted[0]
    if wanted == [int, str]:  # a number or a word
        kind = str if isinstance(value, str) and not value.isdigit() else int
        value = int(value) if kind is int and isinstance(value, str) else value
    if get_origin(kind) is tuple:
        of = get_args(kind)[0]
        items = [value] if isinstance(value, of) else value
        if isinstance(items, (list, tuple)) and all(isinstance(item, of) for item in items):
            return tuple(items)
        raise ValueError(f"{name} must be a list of {'texts' if of is str else 'whole numbers'}, got {shown(value)}")
    if kind is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{name} must be a number, got {shown(value)}") from None
    if (kind is int and isinstance(value, bool)) or not isinstance(value, kind):
        names = {int: "a whole number", str: "a text", bool: "true or false", float: "a number"}
        raise ValueError(f"{name} must be {names[kind]}, got {shown(value)}")
    if kind is str and "\0" in value:
        raise ValueError(f"{name} must be without NUL, got {shown(value)}")
    if kind is int and abs(value) > MAX_WHOLE:
        raise ValueError(f"{name} must be at most {MAX_WHOLE}, got {shown(value)}")
    return value


def read_yaml(path: str | Path) -> dict[str, Any]:
    """A YAML file with a mapping. Raises UserError where it is none."""
    if not (path := Path(path)).is_file():
        raise UserError(f"--config names a file that does not exist: {path}; see configs/ for ready ones")
    try:
        if (size := path.stat().st_size) > _MAX_YAML_BYTES:
            raise ValueError(f"{size} bytes are more than the {_MAX_YAML_BYTES} that are read")
        text = path.read_text(encoding="utf-8")
        brackets = (1 if sign in "[{" else -1 for sign in text if sign in "[]{}")  # those in texts count, too
        if max(accumulate(brackets), default=0) > _MAX_DEPTH:  # for these the parser's time is quadratic
            raise RecursionError
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, OSError, RecursionError) as error:  # ValueError: a date or number that is none
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:300]
        raise UserError(f"--config must be YAML, but {path} cannot be read ({reason})") from error
    if not isinstance(values, Mapping):
        raise UserError(f"--config must hold a mapping of settings, but {path} holds a {type(values).__name__}")
    return dict(values)


class _Loader(yaml.SafeLoader):
    """Plain data only, each key once. Merged keys (`<<`) can double with each line, so they have a limit."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        if twice := [key for key, count in counts.items() if count > 1]:
            raise yaml.YAMLError(f"{twice[0][:100]} is given twice")
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > _MAX_KEYS:
            raise yaml.YAMLError(f"a mapping has more than {_MAX_KEYS} keys")


def shown(value: Any) -> str:
    """A value of any kind in an error message: short, however large or deep it is."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
