"""The figure of a comparison: perplexity against bits per weight, each method a labelled point.

A perplexity far above the rest would press the others together on any axis. So a perplexity above `_HIGHEST` times the
lowest is drawn at the upper edge, as an arrow with its value.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.research.compare.config import OURS, UNCOMPRESSED

_STYLES = {
    "ours": {"color": "#c8372d", "marker": "D", "label": "edkm"},
    "trained": {"color": "#2b6cb0", "marker": "o", "label": "other methods that train"},
    "post-training": {"color": "#718096", "marker": "o", "label": "methods that do not train"},
}
_LINE_COLOR = "#2d3748"
_HIGHEST = 16
_BESIDE = 14  # typographic points from a point to a label that needs no line to it
_Box = tuple[float, float, float, float]  # pixels: left, bottom, right, top


def plot(result: dict[str, Any], path: str | Path) -> list[_Box]:
    """Draw the rows that have a perplexity into `path` (.png, .svg); returns where the labels are, in pixels.

    Raises UserError where matplotlib is absent.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
    except ImportError as error:
        raise UserError("a plot needs matplotlib, which is not installed; pip install 'edkm-cli[plot]'") from error
    rows = [row for row in result["rows"] if row["perplexity"] is not None]
    figure = Figure(figsize=(9, 5.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_yscale("log")
    ceiling = _limits(axes, rows)
    kinds = []
    for row in rows:
        if row["method"] == UNCOMPRESSED:
            axes.axhline(row["perplexity"], color=_LINE_COLOR, linestyle="--", linewidth=1, zorder=1)
            continue
        style: dict[str, Any] = dict(_STYLES[_kind(row)])
        if row["perplexity"] > ceiling:
            style["marker"] = "^"
        if _kind(row) in kinds:
            style.pop("label")
        kinds.append(_kind(row))
        height = min(row["perplexity"], ceiling)
        axes.scatter([row["decoder_bits_per_weight"]], [height], s=55, zorder=3, clip_on=False, **style)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    low, high = axes.get_ylim()
    decimals = 0 if high > 2 * low else 1
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.{decimals}f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#e2e8f0", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bits per weight of the decoder, all side information counted")
    axes.set_ylabel("perplexity (lower is better)")
    setting = result["setting"]
    measured = setting["eval_data"] or f"the held-out tenth of {setting['data'][0]}"
    text = Path(measured if isinstance(measured, str) else measured[0]).name
    axes.set_title(f"{setting['model']}, {text}, context {setting['context']}", loc="left")
    if len(set(kinds)) > 1:
        axes.legend(loc="upper right", frameon=False)
    figure.canvas.draw()
    figure.set_layout_engine("none")  # the layout stays, so that positions are known
    boxes = _Labels(axes, rows, ceiling).place()
    figure.savefig(path)
    return boxes


def _kind(row: dict[str, Any]) -> str:
    return "ours" if row["method"] == OURS else "trained" if row["training_tokens"] else "post-training"


def label_of(row: dict[str, Any]) -> str:
    """A point's label: method, geometry, the options that set it apart, perplexity."""
    figure = f"{row['perplexity']:,.1f}" if row["perplexity"] < 1000 else f"{row['perplexity']:,.0f}"
    if row["method"] == UNCOMPRESSED:
        return f"uncompressed  {figure}"
    known = ("bits", "group_size", "granularity", "steps", "calibration_samples", "sequence_length", "learning_rate")
    options = [f"{name.replace('_', ' ')} {value}" for name, value in row["options"].items() if name not in known]
    geometry = {"row:1": "per row", "tensor": "per tensor"}.get(row["granularity"], row["granularity"])
    if row["method"] == OURS and not row["training_tokens"]:
        options.append("untrained")
    bits = f"{row['bits']}-bit " if "bits" in row["options"] else ""
    name = f"{row['method']} {bits}{geometry.replace(':', ' ')}"
    return f"{', '.join([name, *options])}  {figure}"


def _limits(axes: Any, rows: list[dict[str, Any]]) -> float:
    """Set the axes' ranges, with room for labels; returns the highest perplexity that is drawn in its place."""
    widths = [row["decoder_bits_per_weight"] for row in rows if row["method"] != UNCOMPRESSED] or [16.0]
    heights = [row["perplexity"] for row in rows]
    margin = max(0.3 * (max(widths) - min(widths)), 0.15)
    axes.set_xlim(min(widths) - 0.6 * margin, max(widths) + margin)
    ceiling = min(max(heights), _HIGHEST * min(heights))
    ratio = max(ceiling / min(heights), 1.5)
    axes.set_ylim(min(heights) / ratio**0.1, ceiling * ratio**0.1)
    return ceiling


class _Labels:
    """Writes each label at the nearest free place around its point, with a line to it where that is not beside it."""

    def __init__(self, axes: Any, rows: list[dict[str, Any]], ceiling: float):
        self._axes, self._rows = axes, rows
        self._frame = axes.get_window_extent().extents
        self._point = axes.figure.dpi / 72  # a typographic point in pixels
        legend = axes.get_legend()
        self._taken: list[_Box] = [] if legend is None else [tuple(legend.get_window_extent().extents)]
        self._centers = {}
        for index, row in enumerate(rows):
            width = axes.get_xlim()[1] if row["method"] == UNCOMPRESSED else row["decoder_bits_per_weight"]
            x, y = axes.transData.transform((width, min(row["perplexity"], ceiling)))
            self._centers[index] = (float(x), float(y))
            reach = 5 * self._point
            left = self._frame[0] if row["method"] == UNCOMPRESSED else x - reach
            height = self._point if row["method"] == UNCOMPRESSED else reach
            self._taken.append((left, y - height, x + reach, y + height))

    def place(self) -> list[_Box]:
        """Ours first, beside their points; then from the lowest perplexity up; the line's label where room is left."""
        order = {OURS: 0, UNCOMPRESSED: 2}
        return [
            self._write(index)
            for index in sorted(
                self._centers, key=lambda i: (order.get(self._rows[i]["method"], 1), self._centers[i][1])
            )
        ]

    def _write(self, index: int) -> _Box:
        row, (x, y) = self._rows[index], self._centers[index]
        line = row["method"] == UNCOMPRESSED
        color = _LINE_COLOR if line else _STYLES[_kind(row)]["color"]
        weight = "bold" if row["method"] == OURS else "normal"
        style = {"color": color, "fontsize": 9, "fontweight": weight, "va": "center", "zorder": 4}
        text = self._axes.text(0, 0, label_of(row), transform=self._axes.transAxes, **style)
        size = text.get_window_extent()
        offsets = self._along(size.width, size.height) if line else self._around(size.width, size.height)
        boxes = [
            (x + dx, y + dy - size.height / 2, x + dx + size.width, y + dy + size.height / 2) for dx, dy in offsets
        ]
        costs = [
            self._cost(box, (x, y), line) + number for number, box in enumerate(boxes)
        ]  # the first, if all is free
        box = boxes[costs.index(min(costs))]
        self._taken.append(box)
        text.set_position(self._fraction(box[0], (box[1] + box[3]) / 2))
        nearest = _nearest(box, (x, y))
        if not line and _distance(nearest, (x, y)) > _BESIDE * self._point:
            ends = zip(self._fraction(*nearest), self._fraction(x, y), strict=True)
            self._axes.plot(*ends, color=color, linewidth=0.7, zorder=2, transform=self._axes.transAxes)
            self._taken += self._leader(nearest, (x, y))
        return box

    def _fraction(self, x: float, y: float) -> tuple[float, float]:
        """Pixels as parts of the axes, which mean the same at any resolution."""
        left, bottom, right, top = self._frame
        return (x - left) / (right - left), (y - bottom) / (top - bottom)

    def _around(self, width: float, height: float) -> list[tuple[float, float]]:
        """Offsets of a label's left middle from its point, in pixels: to all sides, farther and farther away."""
        offsets = []
        for distance in (8, 12, 18, 26, 36, 48, 62, 78):
            reach = distance * self._point
            rise = reach + height / 2
            for right in (reach, -reach - width):
                offsets += [(right, up) for up in (0.0, rise / 2, -rise / 2, rise, -rise)]
            offsets += [(-width / 2, up) for up in (rise, -rise)]
        return offsets

    def _along(self, width: float, height: float) -> list[tuple[float, float]]:
        """Offsets for the label of the horizontal line: below or above it, from its right end to the left."""
        lift = height / 2 + 3 * self._point
        return [(-width * (1 + step / 2), up) for step in range(20) for up in (-lift, lift)]

    def _leader(self, start: tuple[float, float], end: tuple[float, float]) -> list[_Box]:
        """Small boxes along a line, without its end at the point."""
        boxes = []
        for step in range(8):
            x, y = (a + (b - a) * step / 10 for a, b in zip(start, end, strict=True))
            boxes.append((x - 2, y - 2, x + 2, y + 2))
        return boxes

    def _cost(self, box: _Box, center: tuple[float, float], line: bool) -> float:
        """Pixels that the label would cover or lose outside the frame, above all; then how far it is from its point."""
        nearest = _nearest(box, center)
        covered = sum(_overlap(box, other) for other in self._taken)
        covered += (box[2] - box[0]) * (box[3] - box[1]) - _overlap(box, self._frame)
        if line:
            return 10 * covered + center[0] - box[2]
        distance = _distance(nearest, center)
        leader = self._leader(nearest, center) if distance > _BESIDE * self._point else []
        crossed = sum(_overlap(part, other) for part in leader for other in self._taken)
        return 10 * covered + 10 * crossed + distance


def _nearest(box: _Box, point: tuple[float, float]) -> tuple[float, float]:
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def _distance(a: tuple[float, float], b: tuple[float, float]) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _overlap(a: _Box, b: _Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
