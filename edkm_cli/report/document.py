"""`edkm report`: read a run, measure its weights, write the page. What it shows, section by section: each is a function from
the files of a run to what run.jinja lays out."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from markupsafe import Markup

from edkm_cli.errors import UserError, explained
from edkm_cli.export.ownership import is_stream, replace_file, require_replaceable
from edkm_cli.progress import Track, no_progress
from edkm_cli.report.charts import MOST_LINES, Series, bars, heat_map, histogram, line_colour, lines, scale_of
from edkm_cli.report.layers import Histogram, Weights, measure_weights, place
from edkm_cli.report.markup import figure, render
from edkm_cli.report.read import RunFiles, read_run, stages_of
from edkm_cli.summaries import STAGES, fixed, megabytes, perplexity_rows, text_names, windows_of

_MODES = {
    **dict.fromkeys(("straight-through", "hard"), "the loss is that of the weights as they will be exported"),
    "soft": "the loss is that of soft weights; the hard loss is that of the weights as they would be exported",
}
_ERRORS = (
    "Relative squared error of each linear against the original weights, ||w - w'||² / ||w||². Training also moves "
    "weights, so this includes both what rounding lost and what training changed."
)
_COLUMNS = ("loss", "hard_loss", "gradient_norm", "learning_rate", "temperature", "tokens", "seconds")


def build_report(
    directory: str | Path,
    *,
    output: str | Path | None = None,
    weights: bool = True,
    trust_remote_code: bool = False,
    track: Track = no_progress,
) -> dict[str, Any]:
    """Write the page about a run and return what it shows, for --json.

    Args:
        directory: what `edkm compress` wrote, or is writing: `DIR` stands for `DIR.partial` until the run is finished.
        output: the file; default `DIR/report.html`, or `DIR.partial.html` beside an unfinished run's directory.
        weights: read the checkpoint and, where it is on this machine, the original (a finished run only).

    Raises UserError for a directory that is none, broken files, or a place that cannot be written to.
    """
    run = read_run(directory)
    target = _target(run, output)
    measured = None
    if weights and run.finished:
        measured = measure_weights(run, trust_remote_code=trust_remote_code, track=track)
    with explained(f"{run.directory} holds a report that cannot be shown", "; run edkm compress again"):
        text = page(run, measured)
    replace_file(target, text)
    result = {"directory": str(run.directory), "page": str(target), "finished": run.finished}
    result |= {"steps_done": len(run.metrics), "perplexity": run.perplexity}
    if measured is not None:
        errors = [{"name": name, "relative_squared_error": error} for name, error in measured.errors.items()]
        result |= {"bytes": measured.stored_bytes, "original_bytes": measured.original_bytes, "layers": errors}
        result |= {"missing": measured.missing} if measured.missing else {}
    return result


def _target(run: RunFiles, output: str | Path | None) -> Path:
    """Where the page goes, checked before the work."""
    if output is None:
        inside, beside = run.directory / "report.html", run.directory.with_name(run.directory.name + ".html")
        target = inside if run.finished and run.directory.suffix != ".partial" else beside
    elif is_stream(target := Path(output).expanduser()):
        return target
    else:
        target = Path(os.path.realpath(target))
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise UserError(f"--output must name a file in a writable directory, got {target}; choose another")
    require_replaceable("--output", target)
    return target


def page(run: RunFiles, weights: Weights | None) -> str:
    """The whole page about a run. `weights` is None for a run that is not finished, or where they were not asked for."""
    units = (("bits", " bits"), ("granularity", ""), ("lut_dtype", " tables"), ("mode", ""))
    shown = [f"{run.settings[key]}{unit}" for key, unit in units if run.settings.get(key) is not None]
    return render(
        "run",
        name=run.name,
        command="edkm report",
        state=None if run.finished else "not finished",
        kind=" · ".join(shown),
        sentence=_sentence(run),
        made=f"{run.directory}. Made by edkm report",
        run=run,
        stages=STAGES,
        last=next((stage for stage in ("exported", "trained", "start", "original") if stage in run.perplexity), None),
        perplexity=perplexity_section(run),
        training=training_section(run),
        weights=weights,
        sizes=_sizes(weights) if weights else None,
        errors=error_map(weights.errors, "Error by layer", _ERRORS, "Relative squared error") if weights else None,
        tables=histogram_section(weights.histograms) if weights and not weights.missing else None,
    )


def _sentence(run: RunFiles) -> str:
    if not (report := run.report):
        done = f"{len(run.metrics):,} of {run.steps:,} steps are done"
        return f"{done}, the loss is {figure(run.metrics[-1].get('loss', 0.0))}." if run.metrics else f"{done}."
    smaller = f"{report['original_weights_bytes'] / report['weights_bytes']:.2f} times smaller than in 16 bits"
    trained = f"after {report['steps']:,} training steps" if report["steps"] else "without training"
    texts = [text for text in run.texts if {"exported", "original"} <= text.keys()]
    if not (factors := [f"{text['exported'] / text['original']:.2f} times" for text in texts]):
        return f"{smaller.capitalize()}, {trained}."
    if len(factors) < 2:
        return f"{smaller.capitalize()} at {factors[0]} the perplexity, {trained}."
    names = text_names([text["data"] for text in texts])
    parts = [f"{factor} on {name}" for factor, name in zip(factors, names, strict=True)]
    return f"{smaller.capitalize()}, {trained}; the perplexity is {', '.join(parts)}."


def perplexity_section(run: RunFiles) -> dict[str, Any] | None:
    """Bars before and after for each text, a table of all, and perplexities by step where they were measured."""
    if not (texts := [text for text in run.texts if stages_of(text)]):
        return None
    names = text_names([text["data"] for text in texts])
    where = f"Measured on {windows_of({'texts': texts})}. " if run.finished else ""
    titles = [f", {name}" if len(texts) > 1 else "" for name in names]
    return {
        "note": f"{where}Lower is better; the dashed line is the uncompressed model.",
        "charts": [(name, _bars(text, title)) for text, name, title in zip(texts, names, titles, strict=True)],
        "by_step": _over_steps(run, texts, names),
        "header": ["", *(cell for name in names for cell in (name, "ratio"))],
        "rows": perplexity_rows({"texts": texts}),
        "compared": all("kl_per_token" in text for text in texts),
    }


def _bars(text: dict[str, Any], name: str) -> Markup:
    measured, original = stages_of(text), text.get("original")
    rows = []
    for stage, value in measured.items():
        colour = "muted" if stage in ("original", "dense") else "c1" + " pale" * (stage != list(measured)[-1])
        note = f"{value / original:.2f}x" if original and stage != "original" else ""
        rows.append((STAGES[stage], [("", value, colour)], note))
    return bars(rows, title=f"Perplexity by stage{name}", reference=original, show=fixed)


def _over_steps(run: RunFiles, texts: list[dict[str, Any]], names: list[str]) -> dict[str, Any] | None:
    """How many times the original's perplexity each text has, step by step."""
    series = []
    for index, (text, name) in enumerate(zip(texts, names, strict=True)):
        measured = _points(run.metrics, f"perplexity: {text['data']}") if "original" in text else []
        if points := [(step, value / text["original"]) for step, value in measured]:
            series.append(Series(name, points, line_colour(index)))
    label = "times the uncompressed model's"
    if not series:
        return None
    return lines(series, title=f"Perplexity by step, in {label}", x_label="step", y_label=label, height=240, named=True)


def training_section(run: RunFiles) -> dict[str, Any] | None:
    """Loss (soft and hard, where there are both), learning rate, gradient norm."""
    metrics, settings = run.metrics, run.settings
    loss, hard = _points(metrics, "loss"), _points(metrics, "hard_loss")
    if not loss:
        return None
    name = "soft loss" if hard else "loss"
    series = [Series(name, loss)]
    if average := _running_mean(loss):
        mean = Series(f"{name}, mean over {_window(loss)} steps (each step faint)", average)
        series = [Series(f"{name}, each step", loss, "c1", "faint"), mean]
    if hard:
        series.append(Series("hard loss (weights as exported)", hard, "c2", "dots"))
    target = _objective(settings)
    side = [("learning_rate", "c3", False), ("gradient_norm", "muted", None)]
    soft = settings.get("mode") != "straight-through"  # which knows no temperature
    if soft and len({record.get("temperature") for record in metrics}) > 1:
        side.append(("temperature", "c2", None))
    columns = ["step", *(key for key in _COLUMNS if any(key in record for record in metrics))]
    every = max(1, len(metrics) // 50)
    title = f"Training loss by step: {target}"
    return {
        "note": f"Trained on {target}; {_MODES.get(str(settings.get('mode')), 'one point for each step')}.",
        "drawn": lines(series, title=title, x_label="step", y_label="loss", height=300, named=True),
        "side": [_small_chart(metrics, *one) for one in side if _points(metrics, one[0])],
        "header": columns,
        "rows": [[_cell(record.get(key)) for key in columns] for record in [*metrics[:-1:every], metrics[-1]]],
        "caption": f"Every {every} steps" if every > 1 else "Each step",
    }


def _objective(settings: Mapping[str, Any]) -> str:
    """What a run was trained on, in words."""
    labels = settings.get("label_weight")
    if not settings.get("distill", True):
        return "the next-token loss"
    learnt = "the KL divergence from the original's predictions"
    if not isinstance(labels, (int, float)) or not labels:
        return learnt
    return f"{learnt} plus {'' if labels == 1 else f'{labels:g} times '}the next-token loss"


def _small_chart(metrics: list[dict[str, float]], key: str, colour: str, log: bool | None) -> Markup:
    name = key.replace("_", " ")
    about: dict[str, Any] = {"title": f"{name} by step", "x_label": "step", "y_label": name, "log": log}
    return lines([Series(name, _points(metrics, key), colour)], width=490, height=180, **about)["chart"]


def _sizes(weights: Weights) -> Markup:
    """Two bars on one scale: bytes by part, in 16 bits and compressed."""
    colours = {"indices": "c1", "decoder linears": "c1", "LUTs": "c2", "embeddings": "c3", "dense rest": "muted"}
    both = (("16 bits", weights.original_bytes), ("compressed", weights.stored_bytes))
    rows = [(label, [(part, float(size), colours[part]) for part, size in parts.items()], "") for label, parts in both]
    return bars(rows, title="Bytes by part, 16 bits and compressed", show=megabytes)


def error_map(errors: Mapping[str, float], title: str, note: str, caption: str) -> dict[str, Any] | None:
    """A heat map of layers by kinds of projection, from module paths and errors; None where there are none."""
    if not errors:
        return None
    cells: dict[tuple[str, str], list[str]] = {}
    for name in errors:
        cells.setdefault(place(name), []).append(name)
    values = {}
    for where, names in cells.items():
        mean = sum(errors[name] for name in names) / len(names)
        values[where] = (mean, f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {_percent(mean)}")
    kinds, columns = (list(dict.fromkeys(axis)) for axis in zip(*cells, strict=True))
    worst = sorted(errors, key=lambda name: -errors[name])[:3]
    return {
        "title": title,
        "note": f"{note} Largest: " + ", ".join(f"{name} {_percent(errors[name])}" for name in worst) + ".",
        "scale": scale_of([value for value, _ in values.values()], show=_percent),
        "chart": heat_map(kinds, columns, values, title=f"{caption} by projection and layer", show=_percent),
        "caption": caption,
        "rows": [(name, _percent(error)) for name, error in errors.items()],
    }


def histogram_section(histograms: Sequence[Histogram]) -> dict[str, Any] | None:
    """Small multiples: kinds of projection down, first, middle and last layer across."""
    rows = []
    many = any(entry.luts > 1 for entry in histograms)
    panels: dict[str, list[tuple[str, str, Markup]]] = {}
    for entry in histograms:
        kind, layer = place(entry.name)
        chart = histogram(entry.counts, entry.low, entry.high, entry.entries, title=f"Weights of {entry.name}")
        panels.setdefault(kind, []).append((kind, layer, chart))
        middles = [figure(middle) for _, middle, _ in entry.entries]
        shown = ", ".join(middles) if len(middles) <= 16 else f"{len(middles)} from {middles[0]} to {middles[-1]}"
        rows.append((f"{kind}, layer {layer}", f"{entry.luts:,}", shown))
    bands = many and any(len(entry.entries) <= MOST_LINES for entry in histograms)
    tables = "the median of each entry over the layer's lookup tables" if many else "the entries of the lookup table."
    tables += "; the bars below them span the middle half of its values." if bands else "." if many else ""
    legend = [("original weights", "hill"), ("table entries", "c2"), ("their spread", "c2 pale")]
    return {
        "note": f"Areas: the original weights, four standard deviations to either side. Lines: {tables}",
        "legend": legend if bands else legend[:2],
        "panels": list(panels.values()),
        "rows": rows,
    }


def _points(metrics: list[dict[str, float]], key: str) -> list[tuple[float, float]]:
    return [(record["step"], record[key]) for record in metrics if key in record and "step" in record]


def _window(points: Sequence[tuple[float, float]]) -> int:
    return max(5, len(points) // 20) | 1


def _running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean over a window around each point, empty where there are too few for one."""
    if len(points) < 30:
        return []
    half = _window(points) // 2
    near = (points[max(0, index - half) : index + half + 1] for index in range(len(points)))
    return [(x, fmean(y for _, y in part)) for (x, _), part in zip(points, near, strict=True)]


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%" if value < 0.01 else f"{100 * value:.2f}%" if value < 0.1 else f"{100 * value:.1f}%"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{int(value):,}" if value == int(value) else figure(value)
