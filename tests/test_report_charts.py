"""Charts of the page: drawn to scale, and readable."""

import math
import re
from xml.etree import ElementTree

import pytest

from edkm_cli.report.charts import (
    Axis,
    Series,
    bars,
    heat_map,
    histogram,
    line_chart,
    log_ticks,
    scale_of,
    thin,
    ticks,
)
from edkm_cli.report.markup import figure


def test_lines_are_drawn_to_scale():
    chart = ElementTree.fromstring(
        line_chart([Series("loss", [(1, 4.0), (2, 2.0), (3, 1.0)])], title="t", x_label="step", y_label="loss")
    )
    path = next(chart.iter("path")).get("d")
    (x1, y1), (x2, y2), (x3, y3) = (tuple(map(float, pair.split())) for pair in re.split("[ML]", path)[1:])
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert (y2 - y1) / (y3 - y1) == pytest.approx(2 / 3, abs=0.01)  # linear: from 4, 2 is two thirds of the way to 1
    zero = next(float(line.get("y1")) for line in chart.iter("line"))
    assert (zero - y3) / (zero - y1) == pytest.approx(1 / 4, abs=0.01)  # heights from zero


def test_a_wide_range_is_logarithmic():
    chart = line_chart([Series("a", [(0, 1.0), (1, 10.0), (2, 100.0)])], title="t", x_label="x", y_label="y")
    assert "log scale" in chart
    path = next(ElementTree.fromstring(chart).iter("path")).get("d")
    heights = [float(pair.split()[1]) for pair in re.split("[ML]", path)[1:]]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)


@pytest.mark.parametrize("values", [(28.8, 51.7, 32.5), (28.8, 400_000.0, 55.0)])
def test_bars_have_their_values_lengths(values):
    chart = ElementTree.fromstring(bars([(str(v), [("", v, "c1")], "") for v in values], title="t"))
    lengths = [float(bar.get("width")) for bar in chart.iter("rect")]
    wide = max(values) / min(values) > 8
    sizes = [math.log(value) if wide else value for value in values]  # of a perplexity: the loss
    for length, size in zip(lengths, sizes, strict=True):
        assert length / max(lengths) == pytest.approx(size / max(sizes), abs=1e-3)


def test_labels_and_figures_of_bars_fit_into_the_drawing():
    rows = [
        ("compressed, not trained, on a text of a long name", [("", 9.0, "c1")], "1.15x"),
        ("a name " * 40, [("", 6.0, "c1")], ""),
        ("a", [("", 3.0, "c1")], ""),
    ]
    chart = ElementTree.fromstring(bars(rows, title="t", reference=8.9))
    assert all(float(bar.get("width")) > 1 for bar in chart.iter("rect"))
    cells = {("a_projection_of_a_long_name", "0"): (1.0, "")}
    errors = ElementTree.fromstring(heat_map(["a_projection_of_a_long_name"], ["0"], cells, title="t", show=str))
    width = float(chart.get("viewBox").split()[2])
    for words in (*chart.iter("text"), *errors.iter("text")):
        size = 7.0 * len("".join(words.itertext()))  # of letters at 13 units
        x = float(words.get("x"))
        assert (x >= size) if "end" in words.get("class") else (x + size <= width)


def test_a_figure_does_not_stand_under_the_line_of_reference():
    chart = ElementTree.fromstring(bars([("a", [("", 8.8, "c1")], "0.99x")], title="t", reference=9.0))
    line = next(line for line in chart.iter("line") if line.get("class") == "reference")
    figures = [words for words in chart.iter("text") if words.get("class") == "bar-label"]
    assert float(figures[0].get("x")) > float(line.get("x1"))


def test_one_outlier_leaves_the_other_cells_of_an_error_map_their_colours():
    values = {("a", str(n)): (value, "") for n, value in enumerate((0.01, 0.02, 0.04, 2.63))}
    chart = ElementTree.fromstring(heat_map(["a"], ["0", "1", "2", "3"], values, title="t", show=str))
    strengths = [float(cell.get("fill-opacity")) for cell in chart.iter("rect")]
    assert strengths[1] - strengths[0] == pytest.approx(strengths[2] - strengths[1], abs=0.011)
    assert strengths[2] > 0.25
    assert "log scale" in scale_of([value for value, _ in values.values()], show=str)
    assert "log scale" not in scale_of([0.01, 0.02], show=str)


def test_a_histogram_s_entries_stand_at_their_values():
    chart = ElementTree.fromstring(
        histogram([1, 2, 1], -1.0, 1.0, [(-0.5, -0.5, -0.5), (0.25, 0.5, 0.75), (2.0, 2.0, 2.0)], title="t")
    )
    places = [float(line.get("x1")) for line in chart.iter("line") if line.get("class") == "entry"]
    assert len(places) == 2  # the third is out of the panel
    x = Axis(-1.0, 1.0, 6, 314)
    assert places == pytest.approx([x(-0.5), x(0.5)], abs=0.01)
    band = next(chart.iter("rect"))
    assert float(band.get("width")) == pytest.approx(x(0.75) - x(0.25), abs=0.01)


@pytest.mark.parametrize("value", [0, 1, 100])
def test_one_point_or_equal_points_are_drawn(value):
    for points in ([(1, value)], [(1, value), (2, value)]):
        chart = line_chart([Series("a", points)], title="t", x_label="x", y_label="y")
        ElementTree.fromstring(chart)
        assert "nan" not in chart


def test_ticks_are_round_and_inside():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(-0.13, 0.11, wanted=4) == [-0.1, 0, 0.1]
    assert ticks(5, 5) == [5]
    assert log_ticks(0.9, 1200) == [1, 10, 100, 1000]
    assert all(28 <= tick <= 60 for tick in log_ticks(28, 60))


def test_figures_are_for_people():
    shown = [figure(v) for v in (0, 28.836402, 0.0003, 408_028.4, -0.1, 1.0, 12e-9, 0.00099999)]
    assert shown == ["0", "28.84", "3e-4", "408,028", "-0.1", "1", "1.2e-8", "1e-3"]


def test_thinning_keeps_spikes():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[4321] = (4321.0, 99.0)
    kept = thin(points)
    assert len(kept) <= 700
    assert (4321.0, 99.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_figures_of_the_lower_axis_do_not_stand_on_its_label():
    chart = line_chart(
        [Series("a", [(0.0, 1.0), (1.0, 2.0)])], title="t", x_label="a longer label", y_label="y", width=490, height=180
    )
    figures = [one for one in ElementTree.fromstring(chart).iter("text") if one.get("class") == "tick middle"]
    assert figures
    assert min(float(one.get("x")) for one in figures) > 4 + 7 * len("a longer label")
