"""Charts as SVG text: lines, bars, stacked bars, a heat map, histograms: their geometry, which charts.jinja writes.

Every mark that stands for a number has it as a tooltip; the page gives each chart a table as well. Colours are classes of
the style sheet (`c1`, `c2` ... are its palette, `muted` its grey), so that light and dark need no second drawing.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from markupsafe import Markup

from edkm_cli.export.ownership import GENERATOR, replace_file
from edkm_cli.report.markup import chart, figure

Point = tuple[float, float]
Bar = tuple[str, Sequence[tuple[str, float, str]], str]  # label, parts, note
Cells = dict[tuple[str, str], tuple[float, str]]  # (row, column) -> (value, tooltip)
Show = Callable[[float], str]  # a value in words
_MOST_POINTS = 600
_WIDTH = 1000  # of the page
_PANEL = (320, 122)  # width and height of a histogram
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
    stretches = (points[start : start + size] for start in range(0, len(points), size))
    return [p for part in stretches for p in sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})]


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    log: bool | None = None,
    width: int = _WIDTH,
    height: int = 260,
) -> Markup:
    """Lines over a common x axis; y starts at zero, or is logarithmic (None: where the data asks for it)."""
    drawn = [Series(s.label, thin(s.points), s.colour, s.shape) for s in series if s.points]
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    log = wants_log(ys) if log is None else log
    low, high = (min(ys) / 1.1, max(ys) * 1.1) if log else (min(0.0, *ys), max(ys) * 1.04 or 1.0)
    x, y = Axis(min(xs), max(xs), 56, width - 14), Axis(low, high, height - 26, 26, log)
    beside = 4 + 7 * len(x_label) + 16  # a figure there would stand on the label
    return chart(
        "line_chart", title=title, width=width, height=height, x=x, y=y, x_label=x_label, y_label=y_label, series=drawn,
        rows=log_ticks(low, high) if log else ticks(low, high),
        columns=[value for value in ticks(x.low, x.high, wanted=8) if x(value) > beside],
    )  # fmt: skip


def lines(series: Sequence[Series], *, named: bool = False, **about: Any) -> dict[str, Any]:
    """A `line_chart`, `chart`, and its `legend`, where there are several lines or they must be `named`."""
    entries = [(one.label, one.colour) for one in series if one.shape != "faint"]
    return {"chart": line_chart(series, **about), "legend": entries if named or len(series) > 1 else []}


def line_colour(index: int) -> str:
    """Of the lines of several texts; further texts are grey."""
    return ("c1", "c2", "c3")[index] if index < 3 else "muted"


def bars(
    rows: Sequence[Bar], *, title: str, show: Show = figure, reference: float | None = None, caption: str = ""
) -> Markup:
    """Horizontal bars of (label, parts, note) on one scale, all positive, with a line at `reference`.

    A part is (name, value, colour); those that are wide enough carry their name. Of single parts that differ much the
    axis is logarithmic and starts at 1, where a perplexity's logarithm is zero: lengths are losses. `caption` is below.
    """
    totals = [sum(value for _, value, _ in parts) for _, parts, _ in rows]
    stacked = any(len(parts) > 1 for _, parts, _ in rows)
    log = not stacked and wants_log(totals, ratio=8.0) and min(totals) > 1
    after = max(_wide(show(total) + "  " + note) for total, (_, _, note) in zip(totals, rows, strict=True)) + 20
    names = [name if _wide(name) < _WIDTH / 2 else name[: int(_WIDTH / 2 / _wide("m"))] + "…" for name, _, _ in rows]
    x = Axis(1.0 if log else 0.0, max(totals), max(map(_wide, names)) + 16, _WIDTH - after, log)
    tall, thick = (56, 40) if stacked else (34, 23)
    line = None if reference is None else x(reference)
    drawn = []
    for index, ((label, parts, note), total) in enumerate(zip(rows, totals, strict=True)):
        place, boxes = x.start, []
        for name, value, colour in parts:
            length = x(value) - x.start
            tip = f"{label}{name and f', {name}'}: {show(value)} {note}".rstrip()
            named = bool(name) and length > max(_wide(name), _wide(show(value))) + 16
            boxes.append({"place": place, "width": max(length, 0.5), "colour": colour, "tip": tip, "named": named,
                          "name": name, "value": show(value)})  # fmt: skip
            place += length
        if line is not None and place - 4 < line < place + after:  # the figure stands behind the line, not under it
            place = line
        ends = {"place": place, "total": show(total), "note": note}
        drawn.append({"top": tall * index + 6, "label": names[index], "parts": boxes, **ends})
    below = ", ".join([caption] * bool(caption) + ["log scale from 1"] * log)
    bottom = tall * len(rows)
    return chart("bars", title=title, width=_WIDTH, height=bottom + (18 if below else 4), start=x.start, thick=thick,
                 rows=drawn, line=line, bottom=bottom, below=below)  # fmt: skip


def save(drawn: Markup, path: str | Path) -> None:
    """Write a chart as a file of its own."""
    start, end, rest = str(drawn).partition(">")
    start = start.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
    sheet = "<style>" + (Path(__file__).parent / "style.css").read_text(encoding="utf-8") + "</style>"
    replace_file(Path(path), f"{start}{end}<desc>{GENERATOR}</desc>{sheet}{rest}\n")


def _wide(words: str) -> float:
    """At most so many units are taken by words of the size of labels, in any of the page's fonts."""
    return 7.6 * len(words)


def heat_map(rows: Sequence[str], columns: Sequence[str], values: Cells, *, title: str, show: Show) -> Markup:
    """Cells coloured by their value between the smallest and the largest, with each row's mean at its end; on a logarithmic
    scale where one value would leave the others without colour.

    `values` maps (row, column) to (value, tooltip); cells that are not in it stay empty.
    """
    left, right = max(100.0, *map(_wide, rows)) + 10, 84
    wide = min((_WIDTH - left - right) / max(len(columns), 1), 72.0)
    every, numbered = max(1, math.ceil(len(columns) / 16)), list(enumerate(columns))
    cells = {row: [(place, *values[row, name]) for place, name in numbered if (row, name) in values] for row in rows}
    return chart(
        "heat_map", title=title, width=_WIDTH, height=22 + len(rows) * 26, left=left, wide=wide,
        end=left + wide * len(columns) + right, rows=rows, columns=numbered[::every], values=cells,
        means={row: sum(value for _, value, _ in known) / len(known) for row, known in cells.items()},
        scale=_strength([value for value, _ in values.values()]), show=show,
    )  # fmt: skip


def scale_of(values: Sequence[float], *, show: Show) -> Markup:
    """The key of a heat map."""
    return chart("scale_of", scale=_strength(values), show=show)


def _strength(values: Sequence[float]) -> Axis:
    """How strongly a heat map colours a value."""
    return Axis(min(values), max(values), 0.08, 1.0, wants_log(values))


def histogram(
    counts: Sequence[float], low: float, high: float, entries: Sequence[tuple[float, float, float]], *, title: str
) -> Markup:
    """A histogram over equal bins from `low` to `high`, and LUT entries (from, middle, to) drawn into it.

    An entry is a line at its middle; where many LUTs share the panel, a band below the axis spans from..to, those of
    neighbours in two lanes. More than `MOST_LINES` entries are ticks below the axis, without bands.
    """
    width, height = _PANEL
    x, base = Axis(low, high, 6, width - 6), height - 34
    y = Axis(0.0, max(*counts, 1.0), base, 4)
    edges = [x(low + (high - low) * index / len(counts)) for index in range(len(counts) + 1)]
    outline = f"M{edges[0]:.1f} {base}"
    for count, (start, end) in zip(counts, pairwise(edges), strict=True):
        outline += f" L{start:.1f} {y(count):.1f} L{end:.1f} {y(count):.1f}"
    few, drawn = len(entries) <= MOST_LINES, []
    for number, (start, middle, end) in enumerate(entries):
        spread = f" ({figure(start)} to {figure(end)})" if end > start else ""
        a, b = (min(max(x(value), x.start), x.end) for value in (start, end))
        band = max(b - a, 1.0) if b > a and few else 0
        at = x(middle) if low <= middle <= high else None
        drawn.append({"tip": f"entry {number}: {figure(middle)}{spread}", "start": a, "band": band, "middle": at})
    return chart(
        "histogram", title=title, width=width, height=height, x=x, base=base, few=few, entries=drawn,
        outline=f"{outline} L{edges[-1]:.1f} {base} Z", marks=ticks(low, high, wanted=4),
    )  # fmt: skip
