"""Charts as SVG text: lines, bars, stacked bars, a heat map, histograms with ticks.

Sizes are in user units of the SVG, which scales to the width it is given. Colours come from the page's style sheet by
class (`c1`, `c2` ... are its palette, `muted` its grey), so that light and dark need no second drawing. Every mark that
stands for a number has it as a tooltip; the page gives each chart a table as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from edkm_cli.export.ownership import GENERATOR, replace_file
from edkm_cli.report.markup import Markup, join, style, tag

Point = tuple[float, float]
_MOST_POINTS = 600
MOST_LINES = 32  # LUT entries that a histogram has room to draw as lines


@dataclass(frozen=True)
class Series:
    """A line of a chart. `colour` is a class of the style sheet, `shape` one of line, faint, dots."""

    label: str
    points: Sequence[Point]
    colour: str = "c1"
    shape: str = "line"


@dataclass(frozen=True)
class Axis:
    """Data to position: `low` and `high` are the data at the positions `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)


def figure(value: float) -> str:
    """A number for people: four significant digits, thousands separated, powers of ten below 0.001.

    >>> [figure(value) for value in (1234567, 3.14159, 0.000217)]
    ['1,234,567', '3.142', '2.17e-4']
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    size = abs(value)
    if size < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(size)))}f}".rstrip("0").rstrip(".")


def ticks(low: float, high: float, *, wanted: int = 5) -> list[float]:
    """Round values (1, 2 or 5 times a power of ten apart) from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) + 0.0 for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between `low` and `high`, with their 2s and 5s where there are few."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1.0,), (1.0, 3.0), (1.0, 2.0, 5.0)):
        marks = [f * 10.0**e for e in exponents for f in factors if low * 0.999 <= f * 10.0**e <= high * 1.001]
        if len(marks) >= 3:
            return marks[:: math.ceil(len(marks) / 7)]
    return marks or [low, high]


def wants_log(values: Sequence[float], *, ratio: float = 12.0) -> bool:
    """Whether values span so much that a linear axis would hide most of them."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > ratio


def thin(points: Sequence[Point]) -> list[Point]:
    """At most some hundred points: of each stretch the lowest and the highest, so that spikes stay."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    size = math.ceil(2 * len(points) / _MOST_POINTS)
    kept = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        extremes = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool | None = None,
    width: int = 680,
    height: int = 280,
) -> Markup:
    """Lines over a common x axis; y starts at zero, or is logarithmic (None: where the data asks for it)."""
    drawn = [Series(s.label, thin(s.points), s.colour, s.shape) for s in series if s.points]
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    log = wants_log(ys) if log is None else log
    low, high = (min(ys), max(ys)) if log else (min(0.0, *ys), max(ys) * 1.04 or 1.0)
    if log:
        low, high = low / 1.1, high * 1.1
    x = Axis(min(xs), max(xs), 56, width - 14)
    y = Axis(low, high, height - 26, 26, log)
    marks = log_ticks(low, high) if log else ticks(low, high)
    parts = [tag("text", y_label + (" (log scale)" if log else ""), x=4, y=13, class_="axis-label")]
    for value in marks:
        parts.append(tag("line", x1=x.start, x2=x.end, y1=y(value), y2=y(value), class_="grid"))
        parts.append(tag("text", figure(value), x=x.start - 8, y=y(value) + 4, class_="tick end"))
    beside = 4 + 7 * len(x_label) + 16  # a figure there would stand on the label
    for value in ticks(x.low, x.high, wanted=8):
        if x(value) > beside:
            parts.append(tag("text", figure(value), x=x(value), y=height - 6, class_="tick middle"))
    parts.append(tag("text", x_label, x=4, y=height - 6, class_="axis-label"))
    for s in drawn:
        parts.append(_line(s, x, y, x_label))
    return _svg(title, width, height, *parts)


def _line(series: Series, x: Axis, y: Axis, x_label: str) -> Markup:
    places = [(x(a), y(b)) for a, b in series.points]
    path = "M" + " L".join(f"{a:.1f} {b:.1f}" for a, b in places)
    parts = [tag("path", d=path, class_=f"line {series.shape} stroke-{series.colour}")]
    if series.shape != "faint":
        radius = 3.2 if series.shape == "dots" else 2.2
        lone = series.shape == "dots" or len(places) == 1
        for (a, b), (px, py) in zip(series.points, places, strict=True):
            tip = tag("title", f"{series.label}, {x_label} {figure(a)}: {figure(b)}")
            look = f"fill-{series.colour}" if lone else "hit"
            parts.append(tag("circle", tip, cx=px, cy=py, r=radius if lone else 5.0, class_=look))
    return join(*parts)


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """(label, colour) pairs as a line of swatches above a chart."""
    return tag("p", *(join(tag("i", class_=f"swatch bg-{colour}"), label, " ") for label, colour in entries),
               class_="legend")  # fmt: skip


def bars(
    rows: Sequence[tuple[str, Sequence[tuple[str, float, str]], str]],
    *,
    title: str,
    show: Callable[[float], str] = figure,
    reference: float | None = None,
    caption: str = "",
    width: int = 1000,
) -> Markup:
    """Horizontal bars of (label, parts, note) on one scale, all positive, with a line at `reference`.

    A part is (name, value, colour); those that are wide enough carry their name. Of single parts that differ much the
    axis is logarithmic and starts at 1, where a perplexity's logarithm, the loss, is zero: lengths are losses. `caption`
    stands below.
    """
    totals = [sum(value for _, value, _ in parts) for _, parts, _ in rows]
    stacked = any(len(parts) > 1 for _, parts, _ in rows)
    log = not stacked and wants_log(totals, ratio=8.0) and min(totals) > 1
    after = max(_wide(show(total) + "  " + note) for total, (_, _, note) in zip(totals, rows, strict=True)) + 20
    x = Axis(1.0 if log else 0.0, max(totals), max(_wide(label) for label, _, _ in rows) + 16, width - after, log)
    tall, thick = (56, 40) if stacked else (34, 23)
    line = None if reference is None else x(reference)
    drawn = []
    for index, ((label, parts, note), total) in enumerate(zip(rows, totals, strict=True)):
        top, place = tall * index + 6, x.start
        middle = top + thick / 2 + 5
        drawn.append(tag("text", label, x=x.start - 12, y=middle, class_="bar-label end"))
        for name, value, colour in parts:
            length = x(value) - x.start
            tip = tag("title", f"{label}{name and f', {name}'}: {show(value)} {note}".rstrip())
            drawn.append(
                tag("rect", tip, x=place, y=top, width=max(length, 0.5), height=thick, class_=f"fill-{colour}")
            )
            if name and length > max(_wide(name), _wide(show(value))) + 16:
                drawn.append(tag("text", name, x=place + 8, y=top + 17, class_="on-bar"))
                drawn.append(tag("text", show(value), x=place + 8, y=top + 32, class_="on-bar quiet"))
            place += length
        if line is not None and place - 4 < line < place + after:  # the figure stands behind the line, not under it
            place = line
        words = join(
            tag("tspan", show(total), class_="strong"), tag("tspan", note, dx=8, class_="quiet") if note else None
        )
        drawn.append(tag("text", words, x=place + 8, y=middle, class_="bar-label"))
    if line is not None:
        drawn.append(tag("line", x1=line, x2=line, y1=0, y2=tall * len(rows), class_="reference"))
    below = ", ".join([caption] * bool(caption) + ["log scale from 1"] * log)
    height = tall * len(rows) + (18 if below else 4)
    if below:
        drawn.append(tag("text", below, x=x.start, y=height - 6, class_="axis-label"))
    return _svg(title, width, height, *drawn)


def save(chart: Markup, path: str | Path) -> None:
    """Write a chart as a file of its own."""
    start, end, rest = chart.partition(">")
    start = start.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    replace_file(Path(path), f"{start}{end}<desc>{GENERATOR}</desc>{style()}{rest}\n")


def _wide(words: str) -> float:
    """At most so many units are taken by words of the size of labels, in any of the page's fonts."""
    return 7.6 * len(words)


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: dict[tuple[str, str], tuple[float, str]],
    *,
    title: str,
    show: Callable[[float], str],
    width: int = 1000,
) -> Markup:
    """Cells coloured by their value between the smallest and the largest, with each row's mean at its end; on a logarithmic
    scale where one value would leave the others without colour.

    `values` maps (row, column) to (value, tooltip); cells that are not in it stay empty.
    """
    left, right, tall = 110, 84, 24
    wide = min((width - left - right) / max(len(columns), 1), 72.0)
    end = left + wide * len(columns) + right
    scale = _strength([value for value, _ in values.values()])
    parts = [tag("text", "mean", x=end - 4, y=12, class_="tick end")]
    every = max(1, math.ceil(len(columns) / 16))
    for number, column in enumerate(columns):
        if number % every == 0:
            parts.append(tag("text", column, x=left + (number + 0.5) * wide, y=12, class_="tick middle"))
    for line, row in enumerate(rows):
        top = 20 + line * (tall + 2)
        parts.append(tag("text", row, x=left - 10, y=top + 16, class_="bar-label end"))
        known = [values[row, column][0] for column in columns if (row, column) in values]
        for number, column in enumerate(columns):
            if (row, column) in values:
                value, tip = values[row, column]
                parts.append(tag("rect", tag("title", tip), x=left + number * wide, y=top, width=wide - 1.5, height=tall,
                                 rx=2, class_="fill-c1", fill_opacity=scale(value)))  # fmt: skip
        parts.append(tag("text", show(sum(known) / len(known)), x=end - 4, y=top + 16, class_="bar-label end strong"))
    return _svg(title, width, 22 + len(rows) * (tall + 2), *parts)


def _strength(values: Sequence[float]) -> Axis:
    """How strongly a heat map colours a value."""
    return Axis(min(values), max(values), 0.08, 1.0, wants_log(values))


def scale_of(values: Sequence[float], *, show: Callable[[float], str]) -> Markup:
    """The key of a heat map."""
    scale = _strength(values)
    steps = [tag("i", class_="swatch bg-c1", style=f"opacity:{0.08 + 0.92 * n / 5:.2f}") for n in range(6)]
    note = " (log scale)" if scale.log else ""
    return tag("p", show(scale.low), " ", *steps, " ", show(scale.high), note, class_="legend scale")


def histogram(
    counts: Sequence[float],
    low: float,
    high: float,
    entries: Sequence[tuple[float, float, float]],
    *,
    title: str,
    width: int = 320,
    height: int = 122,
) -> Markup:
    """A histogram over equal bins from `low` to `high`, and LUT entries (from, middle, to) drawn into it.

    An entry is a line at its middle; where many LUTs share the panel, a band below the axis spans from..to, those of
    neighbours in two lanes. More than `MOST_LINES` entries are ticks below the axis, without bands.
    """
    x, base = Axis(low, high, 6, width - 6), height - 34
    y = Axis(0.0, max(*counts, 1.0), base, 4)
    edges = [x(low + (high - low) * index / len(counts)) for index in range(len(counts) + 1)]
    outline = f"M{edges[0]:.1f} {base}"
    for count, (start, end) in zip(counts, pairwise(edges), strict=True):
        outline += f" L{start:.1f} {y(count):.1f} L{end:.1f} {y(count):.1f}"
    parts = [tag("path", d=f"{outline} L{edges[-1]:.1f} {base} Z", class_="hill")]
    few = len(entries) <= MOST_LINES
    for number, (start, middle, end) in enumerate(entries):
        tip = tag(
            "title",
            f"entry {number}: {figure(middle)}" + (f" ({figure(start)} to {figure(end)})" if end > start else ""),
        )
        a, b = (min(max(x(value), x.start), x.end) for value in (start, end))
        if b > a and few:
            parts.append(tag("rect", tip, x=a, y=base + 3 + 5 * (number % 2), width=max(b - a, 1.0),
                             height=4, rx=2, class_="band"))  # fmt: skip
        if low <= middle <= high:
            parts.append(tag("line", tip, x1=x(middle), x2=x(middle), y1=4 if few else base + 2,
                             y2=base + (3 if few else 12),
                             class_="entry" if few else "entry thin"))  # fmt: skip
    parts.append(tag("line", x1=x.start, x2=x.end, y1=base, y2=base, class_="base"))
    for value in ticks(low, high, wanted=4):
        parts.append(tag("text", figure(value), x=x(value), y=height - 6, class_="tick middle"))
    return _svg(title, width, height, *parts)


def _svg(title: str, width: int, height: int, *parts: object) -> Markup:
    return tag("svg", *parts, role="img", aria_label=title, viewBox=f"0 0 {width} {height}", class_="chart",
               style=f"--width:{width}px")  # fmt: skip
