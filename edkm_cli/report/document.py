"""What the page about a run shows, section by section: each is a function from the files of a run to what run.jinja lays
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from edkm_cli.report.charts import MOST_LINES, Series, bars, heat_map, histogram, line_chart, lines, scale_of
from edkm_cli.report.layers import Histogram, Weights, place
from edkm_cli.report.markup import figure, render
from edkm_cli.report.read import RunFiles, number
from edkm_cli.report.texts import fixed, perplexity_section
from edkm_cli.summaries import STAGES, duration, megabytes, text_names

_MODES = {
    "straight-through": "the loss is that of the weights as they will be exported",
    "hard": "the loss is that of the weights as they will be exported",
    "soft": "the loss is that of soft weights; the hard loss is that of the weights as they would be exported",
}
_ERRORS = (
    "Relative squared error of each linear against the original weights, ||w - w'||² / ||w||². Training also moves "
    "weights, so this includes both what rounding lost and what training changed."
)
_COLUMNS = ("loss", "hard_loss", "gradient_norm", "learning_rate", "temperature", "tokens", "seconds")


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
        shown=tiles(run),
        perplexity=perplexity_section(run),
        training=training_section(run),
        size=size_section(weights) if weights else None,
        missing=weights.missing if weights else None,
        errors=error_map(weights.errors, "Error by layer", _ERRORS, "Relative squared error") if weights else None,
        tables=histogram_section(weights.histograms) if weights and not weights.missing else None,
        settings=settings_section(run),
    )


def _sentence(run: RunFiles) -> str:
    report = run.report
    if not report:
        done = f"{len(run.metrics):,} of {run.steps:,} steps are done"
        return f"{done}, the loss is {figure(run.metrics[-1].get('loss', 0.0))}." if run.metrics else f"{done}."
    smaller = f"{report['original_weights_bytes'] / report['weights_bytes']:.2f} times smaller than in 16 bits"
    trained = f"after {report['steps']:,} training steps" if report["steps"] else "without training"
    texts = [text for text in run.texts if {"exported", "original"} <= text.keys()]
    factors = [f"{text['exported'] / text['original']:.2f} times" for text in texts]
    if not factors:
        return f"{smaller.capitalize()}, {trained}."
    if len(factors) < 2:
        return f"{smaller.capitalize()} at {factors[0]} the perplexity, {trained}."
    names = text_names([text["data"] for text in texts])
    parts = [f"{factor} on {name}" for factor, name in zip(factors, names, strict=True)]
    return f"{smaller.capitalize()}, {trained}; the perplexity is {', '.join(parts)}."


def tiles(run: RunFiles) -> list[tuple[str, str, str]]:
    """The headline figures: name, value, and what more is to say."""
    report, measured = run.report, run.perplexity
    shown: list[tuple[str, str, str]] = []
    last = next((stage for stage in ("exported", "trained", "start", "original") if stage in measured), None)
    if last is not None:
        more = f"{STAGES[last]}; original {fixed(measured['original'])}" if "original" in measured else ""
        shown.append(("perplexity", fixed(measured[last]), more))
    if report:
        ratio = report["original_weights_bytes"] / report["weights_bytes"]
        shown += [
            ("weights", megabytes(report["weights_bytes"]), f"{megabytes(report['original_weights_bytes'])} in 16 bits"),
            ("smaller by", f"{ratio:.2f}x", "over the whole model, embeddings included"),
            ("bits per weight", f"{report['decoder_bits_per_weight']:.3f}",
             f"decoder, tables included; whole model {report['model_bits_per_weight']:.3f}"),
            ("time", duration(sum(number(value) or 0.0 for value in report["seconds"].values())),
             f"{report['steps']:,} steps, {report['training_tokens']:,} tokens"),
        ]  # fmt: skip
    elif run.metrics:
        seconds = [record["seconds"] for record in run.metrics if "seconds" in record]
        left = max(run.steps - len(run.metrics), 0) * sum(seconds) / max(len(seconds), 1)
        last_loss = run.metrics[-1].get("loss", 0.0)
        shown += [
            ("steps", f"{len(run.metrics):,}", f"of {run.steps:,}"),
            ("loss", figure(last_loss), f"at the first step {figure(run.metrics[0].get('loss', 0.0))}"),
            ("tokens", f"{int(run.metrics[-1].get('tokens', 0)):,}", "trained on so far"),
            ("time left", duration(left), f"{sum(seconds) / max(len(seconds), 1):.2f} s a step"),
        ]  # fmt: skip
    return shown


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
    series = [Series(name, _points(metrics, key), colour)]
    return line_chart(series, title=f"{name} by step", x_label="step", y_label=name, log=log, width=490, height=180)


def size_section(weights: Weights) -> dict[str, Any]:
    """Two bars on one scale: bytes by part, in 16 bits and compressed."""
    colours = {"indices": "c1", "decoder linears": "c1", "LUTs": "c2", "embeddings": "c3", "dense rest": "muted"}
    both = [("16 bits", weights.original_bytes), ("compressed", weights.stored_bytes)]
    stacks = [
        (label, [(part, float(size), colours[part]) for part, size in parts.items()], "") for label, parts in both
    ]
    rows = [
        (f"{label}: {part}", f"{size:,}", f"{size / max(sum(parts.values()), 1):.1%}")
        for label, parts in both
        for part, size in parts.items()
    ]
    return {"chart": bars(stacks, title="Bytes by part, 16 bits and compressed", show=megabytes), "rows": rows}


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


def settings_section(run: RunFiles) -> dict[str, Any] | None:
    """Everything that is needed to repeat the run: captions and rows of tables."""
    report = run.report
    settings = list(run.settings.items())
    half = -(-len(settings) // 2)
    facts = [("Settings", _facts(dict(settings[:half]))), ("", _facts(dict(settings[half:])))]
    if report:
        shown = {"Versions": "versions", "Hardware": "hardware", "Seconds by phase": "seconds"}
        facts += [(caption, _facts(report.get(key))) for caption, key in shown.items()]
        dense = [(str(entry.get("name")), str(entry.get("reason"))) for entry in report["skipped"]]
        facts.append(("Left uncompressed, and why", dense))
    note = f"{len(report['swapped'])} modules compressed, {len(report['skipped'])} left uncompressed." if report else ""
    return {"note": note, "facts": facts} if any(rows for _, rows in facts) else None


def _facts(values: Any) -> list[tuple[str, str]]:
    return [(key, _setting(value)) for key, value in values.items()] if isinstance(values, dict) else []


def _setting(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else figure(value) if isinstance(value, float) else str(value)


def _points(metrics: list[dict[str, float]], key: str) -> list[tuple[float, float]]:
    return [(record["step"], record[key]) for record in metrics if key in record and "step" in record]


def _window(points: Sequence[tuple[float, float]]) -> int:
    return max(5, len(points) // 20)


def _running_mean(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean over a window around each point, empty where there are too few for one."""
    if len(points) < 30:
        return []
    half = _window(points) // 2
    means = []
    for index, (x, _) in enumerate(points):
        near = points[max(0, index - half) : index + half + 1]
        means.append((x, sum(y for _, y in near) / len(near)))
    return means


def _percent(value: float) -> str:
    return f"{100 * value:.3g}%" if value < 0.01 else f"{100 * value:.2f}%" if value < 0.1 else f"{100 * value:.1f}%"


def _cell(value: float | None) -> str:
    return "" if value is None else f"{int(value):,}" if value == int(value) else figure(value)
