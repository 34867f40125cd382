"""Reads what a run wrote into its directory: `report.json` when it is finished, before that `metrics.jsonl` and the mark.

The files may come from anywhere. Every value is checked here once, so that the rest of the page can rely on it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.export.directory import MARKER
from edkm_cli.settings import shown

STAGES = ("original", "dense", "start", "trained", "exported")
_NUMBERS = (
    "weights_bytes", "original_weights_bytes", "decoder_bits_per_weight", "model_bits_per_weight", "steps",
    "training_tokens",
)  # fmt: skip
_CONTAINERS = {
    "model": str, "perplexity": dict, "evaluation": dict, "seconds": dict, "config": dict, "versions": dict,
    "swapped": list, "skipped": list,
}  # fmt: skip


@dataclass(frozen=True)
class Text:
    """A text that was measured: `perplexity` by stage, without those not measured (yet), the mean KL per token from the
    original and how often both have the same likeliest token, and on how much of the text (`about`)."""

    name: str
    perplexity: dict[str, float]
    kl: float | None = None
    agreement: float | None = None
    about: str = ""


@dataclass(frozen=True)
class RunFiles:
    """A run's files. `report` is empty until it is finished; `metrics` is empty for `--steps 0`.

    `texts` are what was measured, and `perplexity` that of the first by stage; `settings` is the configuration.
    """

    directory: Path
    name: str
    report: dict[str, Any]
    settings: dict[str, Any]
    texts: list[Text]
    metrics: list[dict[str, float]] = field(default_factory=list)

    @property
    def perplexity(self) -> dict[str, float]:
        return self.texts[0].perplexity

    def by_step(self, text: str) -> list[tuple[float, float]]:
        """(step, perplexity) wherever a text was measured in training."""
        key = _key("perplexity", text)
        return [(record["step"], record[key]) for record in self.metrics if key in record]

    @property
    def finished(self) -> bool:
        return bool(self.report)

    @property
    def steps(self) -> int:
        """Steps of the whole run; of an unfinished run that does not say, those done."""
        planned = self.settings.get("steps")
        return planned if isinstance(planned, int) else len(self.metrics)


def read_run(directory: str | Path) -> RunFiles:
    """Read `DIR`, or `DIR.partial` while the run is going on. Raises UserError for anything else, or broken files."""
    wanted = Path(directory).expanduser().absolute()
    partial = wanted.with_name(wanted.name + ".partial")
    found = next((path for path in (wanted, partial) if _is_run(path)), None)
    if found is None:
        raise UserError(
            f"edkm report needs a directory that edkm compress wrote, with report.json (or metrics.jsonl while it runs), "
            f"but {wanted} {'holds neither' if wanted.is_dir() else 'is not a directory'}; give the run's --output"
        )
    metrics = _read_metrics(found / "metrics.jsonl")
    if (found / "report.json").is_file():
        report = _checked_report(found / "report.json")
        resolved = report.get("resolved")
        settings = report["config"] | (resolved if isinstance(resolved, dict) else {})
        return RunFiles(found, report["model"], report, settings, _texts(report), metrics)
    mark = _read_json(found / MARKER) if (found / MARKER).is_file() else {}
    settings = mark.get("fingerprint")
    return RunFiles(
        found,
        found.name.removesuffix(".partial"),
        {},
        settings if isinstance(settings, dict) else {},
        _texts_so_far(mark),
        metrics,
    )


def _texts(report: dict[str, Any]) -> list[Text]:
    """The measured texts of a report; of one without a list of them, the one that it has."""
    rows = report.get("texts")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not rows:
        rows = [{**report["evaluation"], **report["perplexity"]}]
    return [
        Text(
            str(row.get("data")),
            _figures(row),
            number(row.get("kl_per_token")),
            number(row.get("top1_agreement")),
            f"{row.get('data')}: {row.get('windows')} windows of {row.get('context')} tokens",
        )
        for row in rows
    ]


def _texts_so_far(mark: dict[str, Any]) -> list[Text]:
    """The measured texts of a run that is not finished, from its mark: stage -> text -> figures."""
    stages = mark.get("measured")
    found: dict[str, dict[str, Any]] = {}
    for stage, texts in stages.items() if isinstance(stages, dict) else ():
        for name, figures in texts.items() if isinstance(texts, dict) else ():
            if isinstance(figures, dict):
                found.setdefault(name, {})[stage] = figures.get("perplexity")
                for key in ("kl_per_token", "top1_agreement"):
                    found[name][key] = figures.get(key)
    if not found:
        measured = mark.get("perplexity")
        return [Text("", _figures(measured if isinstance(measured, dict) else {}))]
    return [
        Text(name, _figures(values), number(values["kl_per_token"]), number(values["top1_agreement"]))
        for name, values in found.items()
    ]


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # JSON's integers have no end
        return None


def _is_run(path: Path) -> bool:
    return any((path / name).is_file() for name in ("report.json", MARKER, "metrics.jsonl"))


def _figures(values: dict[str, Any]) -> dict[str, float]:
    """The perplexities that were measured, in the order of the stages."""
    figures = {stage: number(values.get(stage)) for stage in STAGES}
    return {stage: value for stage, value in figures.items() if value is not None and value > 0}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} must be JSON that edkm compress wrote, but cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, got a {type(value).__name__}; run edkm compress again")
    return value


def _checked_report(path: Path) -> dict[str, Any]:
    report = _read_json(path)
    faults = []
    for key in _NUMBERS:
        if (number(report.get(key)) or 0.0) < 0 or number(report.get(key)) is None:
            faults.append(f"{key} must be a number from 0, got {shown(report.get(key))[:40]}")
    for key, kind in _CONTAINERS.items():
        if not isinstance(report.get(key), kind):
            faults.append(f"{key} must be a {kind.__name__}, got {shown(report.get(key))[:40]}")
    for key in ("swapped", "skipped"):
        if isinstance(report.get(key), list) and not all(isinstance(entry, dict) for entry in report[key]):
            faults.append(f"{key} must list objects")
    if report.get("weights_bytes") == 0:
        faults.append("weights_bytes must be positive, got 0")
    if faults:
        raise UserError(f"{path} must be a report of edkm compress: {'; '.join(faults)}; run edkm compress again")
    return report


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics with its maps by text taken apart."""
    plain = {key: value for key, value in values.items() if not isinstance(value, dict)}
    parts = [(key, value) for key, value in values.items() if isinstance(value, dict)]
    return plain | {_key(key, name): one for key, texts in parts for name, one in texts.items()}


def _key(figure: str, text: str) -> str:
    return f"{figure}: {text}"


def _read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl in the order of their steps, numbers only. A last line that is being written is left."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    records: dict[int, dict[str, float]] = {}
    for index, line in enumerate(lines):
        try:
            values = json.loads(line)
            step = int(values["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if index == len(lines) - 1:
                break
            raise UserError(
                f"{path} must hold a JSON object with 'step' in each line, but line {index + 1} does not ({error}); "
                "remove the line"
            ) from error
        numbers = {key: number(value) for key, value in _flat(values).items()}
        records[step] = {key: value for key, value in numbers.items() if value is not None}
    return [records[step] for step in sorted(records)]
