"""Reads what a run wrote into its directory: `report.json` when it is finished, before that `metrics.jsonl` and the mark.

The files may come from anywhere. Every value is checked here once, so that the rest of the page can rely on it.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.export.directory import MARKER
from edkm_cli.files import read_json
from edkm_cli.settings import shown
from edkm_cli.summaries import STAGES, texts_of

_REMEDY = "run edkm compress again"
_OTHERS = ("finetune.json", "merge.json")
# What each of a report's keys must be.
_NUMBERS = (
    "weights_bytes", "original_weights_bytes", "decoder_bits_per_weight", "model_bits_per_weight", "steps",
    "training_tokens",
)  # fmt: skip
_CONTAINERS = {"model": str, "swapped": list, "skipped": list}
_CONTAINERS |= dict.fromkeys(("perplexity", "evaluation", "seconds", "config", "versions"), dict)


@dataclass(frozen=True)
class RunFiles:
    """A run's files. `report` is empty until it is finished; `metrics` is empty for `--steps 0`.

    `texts` are what was measured, as the rows of a report: `data`, the perplexity of each stage that was measured (so far),
    the distance from the original where it is known, `windows` and `context`. `settings` is the configuration.
    """

    directory: Path
    name: str
    report: dict[str, Any]
    settings: dict[str, Any]
    texts: list[dict[str, Any]]
    metrics: list[dict[str, float]] = field(default_factory=list)

    @property
    def perplexity(self) -> dict[str, float]:
        """Of the first text, by stage."""
        return stages_of(self.texts[0]) if self.texts else {}

    @property
    def seconds(self) -> float:
        """Of all phases, of a finished run."""
        return sum(number(value) or 0.0 for value in self.report["seconds"].values())

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
    if other := next((name for name in _OTHERS if (wanted / name).is_file()), None):
        rule = f"edkm report is about what edkm compress made, but {wanted} is what edkm {other.removesuffix('.json')} made"
        raise UserError(f"{rule}; read its README.md, or the figures in {other}")
    names = ("report.json", MARKER, "metrics.jsonl")
    places = (wanted, wanted.with_name(wanted.name + ".partial"))
    place = next((path for path in places if any((path / name).is_file() for name in names)), None)
    if place is None:
        raise UserError(
            f"edkm report needs a directory that edkm compress wrote, with report.json (or metrics.jsonl while it runs), "
            f"but {wanted} {'holds neither' if wanted.is_dir() else 'is not a directory'}; give the run's --output"
        )
    metrics = _read_metrics(place / "metrics.jsonl")
    if (place / "report.json").is_file():
        report = _checked_report(place / "report.json")
        resolved = report.get("resolved")
        settings = report["config"] | (resolved if isinstance(resolved, dict) else {})
        return RunFiles(place, report["model"], report, settings, _texts(report), metrics)
    mark = read_json(place / MARKER, remedy=_REMEDY) if (place / MARKER).is_file() else {}
    settings = mark.get("fingerprint")
    settings = settings if isinstance(settings, dict) else {}
    return RunFiles(place, place.name.removesuffix(".partial"), {}, settings, _texts_so_far(mark), metrics)


def stages_of(text: dict[str, Any]) -> dict[str, float]:
    """The perplexities of a text by stage, those that were measured, in their order."""
    return {stage: text[stage] for stage in STAGES if stage in text}


def number(value: object) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # JSON's integers have no end
        return None


def _texts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured texts of a report, with the figures that are numbers."""
    rows = report.get("texts")
    given = rows if isinstance(rows, list) and all(isinstance(row, dict) for row in rows) else []
    return [_checked_text(row) for row in texts_of({**report, "texts": given})]


def _checked_text(row: dict[str, Any]) -> dict[str, Any]:
    figures = {key: number(row.get(key)) for key in (*STAGES, "exported_over_dense", "kl_per_token", "top1_agreement")}
    checked = {key: value for key, value in figures.items() if value is not None and (value > 0 or key not in STAGES)}
    return {"data": str(row.get("data")), "windows": row.get("windows"), "context": row.get("context"), **checked}


def _texts_so_far(mark: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured texts of a run that is not finished, from its mark: stage -> text -> figures."""
    stages = mark.get("measured")
    rows: dict[str, dict[str, Any]] = {}
    for stage, texts in stages.items() if isinstance(stages, dict) else ():
        for name, figures in texts.items() if isinstance(texts, dict) else ():
            if isinstance(figures, dict):
                rows.setdefault(name, {"data": name}).update({**figures, stage: figures.get("perplexity")})
    return [_checked_text(row) for row in rows.values()]


def _checked_report(path: Path) -> dict[str, Any]:
    report = read_json(path, remedy=_REMEDY)
    faults = []
    for key in _NUMBERS:
        if (value := number(report.get(key))) is None or value < 0:
            faults.append(f"{key} must be a number from 0, got {shown(report.get(key))[:40]}")
    for key, kind in _CONTAINERS.items():
        value = report.get(key)
        if not isinstance(value, kind):
            faults.append(f"{key} must be a {kind.__name__}, got {shown(value)[:40]}")
        elif kind is list and not all(isinstance(entry, dict) for entry in value):
            faults.append(f"{key} must list objects")
    if report.get("weights_bytes") == 0:
        faults.append("weights_bytes must be positive, got 0")
    if faults:
        raise UserError(f"{path} must be a report of edkm compress: {'; '.join(faults)}; {_REMEDY}")
    return report


def _read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl in the order of their steps, numbers only; a map by text is taken apart into
    `perplexity: text`. A last line that is being written is left."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
    records: dict[int, dict[str, float]] = {}
    for index, line in enumerate(lines):
        try:
            values = json.loads(line)
            step = int(values["step"])
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            if index == len(lines) - 1:
                break
            raise UserError(f"{path} must hold objects with 'step', but line {index + 1} is none ({error})") from error
        flat: dict[str, Any] = {}
        for key, value in values.items():
            flat |= {f"{key}: {name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
        records[step] = {key: usable for key, value in flat.items() if (usable := number(value)) is not None}
    return [records[step] for step in sorted(records)]
