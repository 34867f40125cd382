"""The sections of the page, in order. Each is a function from the files of a run to markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edkm_cli.export.ownership import GENERATOR
from edkm_cli.report.charts import MOST_LINES, Series, bars, figure, heat_map, histogram, legend, line_chart, scale_of
from edkm_cli.report.layers import Histogram, Weights, place
from edkm_cli.report.markup import Markup, section, style, table, tag, unfold
from edkm_cli.report.read import RunFiles, number
from edkm_cli.report.texts import fixed, perplexity_section
from edkm_cli.summaries import STAGES, duration, megabytes, text_names

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # the page can load nothing, whatever a file put into it
_MODES = {
    "straight-through": "the loss is that of the weights as they will be exported",
    "hard": "the loss is that of the weights as they will be exported",
    "soft": "the loss is that of soft weights; the hard loss is that of the weights as they would be exported",
}


def page(run: RunFiles, weights: Weights | None) -> str:
    """The whole page about a run. `weights` is None for a run that is not finished, or where they were not asked for."""
    sections = [perplexity_section(run), training_section(run), *weights_sections(weights), settings_section(run)]
    return document(
        run.name, header(run), tag("main", tiles(run), *sections), footer(f"{run.directory}. Made by edkm report")
    )


def document(name: str, *content: object) -> str:
    """A page, which loads nothing."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="generator", content=GENERATOR),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", f"{name}: edkm report"),
        style(),
    )
    return "<!DOCTYPE html>\n" + tag("html", head, tag("body", *content), lang="en") + "\n"


def header(run: RunFiles) -> Markup:
    """Name, kind and the result in a sentence."""
    settings = run.settings
    kind = " · ".join(
        f"{settings[key]}{unit}"
        for key, unit in (("bits", " bits"), ("granularity", ""), ("lut_dtype", " tables"), ("mode", ""))
        if settings.get(key) is not None
    )
    state = None if run.finished else tag("span", "not finished", class_="state")
    return tag(
        "header", tag("p", "edkm report", state, class_="over"), tag("h1", run.name), tag("p", kind, class_="over"),
        tag("p", _sentence(run), class_="lead"),
    )  # fmt: skip


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


def tiles(run: RunFiles) -> Markup:
    """The headline figures."""
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
    return tiles_of(shown)


def tiles_of(shown: Sequence[tuple[str, str, str]]) -> Markup:
    """Headline figures: name, value, and what more is to say."""
    drawn = (
        tag("div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", more, class_="more"), class_="tile")
        for name, value, more in shown
    )
    return tag("dl", *drawn, class_="tiles")


def training_section(run: RunFiles) -> Markup | None:
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
    side = [
        _small_chart(metrics, "learning_rate", "learning rate", "c3", log=False),
        _small_chart(metrics, "gradient_norm", "gradient norm", "muted"),
    ]
    soft = settings.get("mode") != "straight-through"  # which knows no temperature
    if soft and len({record.get("temperature") for record in metrics}) > 1:
        side.append(_small_chart(metrics, "temperature", "temperature", "c2"))
    columns = ["step", *(key for key in _COLUMNS if any(key in record for record in metrics))]
    every = max(1, len(metrics) // 50)
    rows = [[_cell(record.get(key)) for key in columns] for record in [*metrics[:-1:every], metrics[-1]]]
    return section(
        "Training",
        f"Trained on {target}; {_MODES.get(str(settings.get('mode')), 'one point for each step')}.",
        legend([(one.label, one.colour) for one in series if one.shape != "faint"]),
        tag("figure", line_chart(series, title=f"Training loss by step: {target}", x_label="step", y_label="loss",
                                 width=1000, height=300)),
        tag("div", *side, class_="pair"),
        unfold("as a table", table(rows, header=columns, caption=f"Every {every} steps" if every > 1 else "Each step")),
    )  # fmt: skip


def _objective(settings: Mapping[str, Any]) -> str:
    """What a run was trained on, in words."""
    labels = settings.get("label_weight")
    if not settings.get("distill", True):
        return "the next-token loss"
    learnt = "the KL divergence from the original's predictions"
    if not isinstance(labels, (int, float)) or not labels:
        return learnt
    return f"{learnt} plus {'' if labels == 1 else f'{labels:g} times '}the next-token loss"


_COLUMNS = ("loss", "hard_loss", "gradient_norm", "learning_rate", "temperature", "tokens", "seconds")


def _small_chart(
    metrics: list[dict[str, float]], key: str, name: str, colour: str, *, log: bool | None = None
) -> Markup | None:
    points = _points(metrics, key)
    if not points:
        return None
    chart = line_chart([Series(name, points, colour)], title=f"{name} by step", x_label="step", y_label=name,
                       log=log, width=490, height=180)  # fmt: skip
    return tag("figure", chart)


def weights_sections(weights: Weights | None) -> list[Markup | None]:
    """Size, errors and histograms of the weights."""
    if weights is None:
        return []
    if weights.missing:
        missing = section("Weights", f"Errors and histograms need the original weights: {weights.missing}.")
        return [size_section(weights), missing]
    return [size_section(weights), error_section(weights.errors), histogram_section(weights.histograms)]


def size_section(weights: Weights) -> Markup:
    """Two bars on one scale: bytes by part, in 16 bits and compressed."""
    colours = {"indices": "c1", "decoder linears": "c1", "LUTs": "c2", "embeddings": "c3", "dense rest": "muted"}
    both = [("16 bits", weights.original_bytes), ("compressed", weights.stored_bytes)]
    stacks = [
        (label, [(part, float(size), colours[part]) for part, size in parts.items()], "") for label, parts in both
    ]
    rows: list[list[object]] = [
        [f"{label}: {part}", f"{size:,}", f"{size / max(sum(parts.values()), 1):.1%}"]
        for label, parts in both
        for part, size in parts.items()
    ]
    return section(
        "Size",
        "Bytes of the weights by part, on one scale.",
        legend([("decoder linears, indices", "c1"), ("lookup tables", "c2"), ("embeddings", "c3"), ("dense rest", "muted")]),
        tag("figure", bars(stacks, title="Bytes by part, 16 bits and compressed", show=megabytes)),
        unfold("as a table", table(rows, header=["part", "bytes", "share"], caption="Bytes by part")),
    )  # fmt: skip


def error_section(errors: Mapping[str, float]) -> Markup:
    """The error of each linear's weights."""
    return error_map(
        errors,
        "Error by layer",
        "Relative squared error of each linear against the original weights, ||w - w'||² / ||w||². Training also moves "
        "weights, so this includes both what rounding lost and what training changed.",
        "Relative squared error",
    )


def error_map(errors: Mapping[str, float], title: str, note: str, caption: str) -> Markup:
    """A heat map of layers by kinds of projection, from module paths and errors."""
    cells: dict[tuple[str, str], list[str]] = {}
    for name in errors:
        cells.setdefault(place(name), []).append(name)
    values = {}
    for where, names in cells.items():
        mean = sum(errors[name] for name in names) / len(names)
        values[where] = (mean, f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {_percent(mean)}")
    kinds, columns = (list(dict.fromkeys(axis)) for axis in zip(*cells, strict=True))
    worst = sorted(errors, key=lambda name: -errors[name])[:3]
    return section(
        title,
        f"{note} Largest: " + ", ".join(f"{name} {_percent(errors[name])}" for name in worst) + ".",
        scale_of([value for value, _ in values.values()], show=_percent),
        tag("figure", heat_map(kinds, columns, values, title=f"{caption} by projection and layer", show=_percent)),
        unfold("as a table", table([[name, _percent(error)] for name, error in errors.items()],
                                   header=["linear", caption.lower()], caption=caption)),
    )  # fmt: skip


def histogram_section(histograms: Sequence[Histogram]) -> Markup:
    """Small multiples: kinds of projection down, first, middle and last layer across."""
    rows = []
    many = any(entry.luts > 1 for entry in histograms)
    panels: dict[str, list[Markup]] = {}
    for entry in histograms:
        kind, layer = place(entry.name)
        chart = histogram(entry.counts, entry.low, entry.high, entry.entries, title=f"Weights of {entry.name}")
        panels.setdefault(kind, []).append(tag("div", tag("h3", tag("b", kind), f" layer {layer}"), chart))
        middles = [figure(middle) for _, middle, _ in entry.entries]
        shown = ", ".join(middles) if len(middles) <= 16 else f"{len(middles)} from {middles[0]} to {middles[-1]}"
        rows.append([f"{kind}, layer {layer}", f"{entry.luts:,}", shown])
    bands = many and any(len(entry.entries) <= MOST_LINES for entry in histograms)
    tables = "the median of each entry over the layer's lookup tables" if many else "the entries of the lookup table."
    tables += "; the bars below them span the middle half of its values." if bands else "." if many else ""
    return section(
        "Weights and their lookup tables",
        f"Areas: the original weights, four standard deviations to either side. Lines: {tables}",
        legend(
            [("original weights", "hill"), ("table entries", "c2"), *([("their spread", "c2 pale")] if bands else [])]
        ),
        *(tag("div", *row, class_="triple") for row in panels.values()),
        unfold("as a table", table(rows, header=["linear", "tables", "entries (median)"], caption="Table entries")),
    )


def settings_section(run: RunFiles) -> Markup | None:
    """Everything that is needed to repeat the run."""
    report = run.report
    settings = list(run.settings.items())
    half = -(-len(settings) // 2)
    blocks = [_facts("Settings", dict(settings[:half])), _facts("", dict(settings[half:]))]
    if report:
        blocks += [_facts("Versions", report["versions"]), _facts("Hardware", report.get("hardware"))]
        blocks.append(_facts("Seconds by phase", report["seconds"]))
        dense = [[str(entry.get("name")), str(entry.get("reason"))] for entry in report["skipped"]]
        if dense:
            blocks.append(tag("div", table(dense, header=["", ""], caption="Left uncompressed, and why")))
    blocks = [block for block in blocks if block]
    said = f"{len(report['swapped'])} modules compressed, {len(report['skipped'])} left uncompressed." if report else ""
    return (
        section("Settings, versions and hardware", said, tag("div", *blocks, class_="pair facts")) if blocks else None
    )


def _facts(caption: str, values: Any) -> Markup | None:
    if not isinstance(values, dict) or not values:
        return None
    return tag(
        "div", table([[key, _setting(value)] for key, value in values.items()], header=["", ""], caption=caption)
    )


def _setting(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else figure(value) if isinstance(value, float) else str(value)


def footer(words: str) -> Markup:
    return tag("footer", f"{words}; this page loads nothing from anywhere else.")


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
