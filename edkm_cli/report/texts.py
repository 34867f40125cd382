"""What the page shows of the texts that were measured: perplexity by stage of each, and the distance from the original."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from edkm_cli.report.charts import Series, bars, line_colour, lines
from edkm_cli.report.read import RunFiles, stages_of
from edkm_cli.summaries import STAGES, perplexity_rows, text_names, windows_of


def perplexity_section(run: RunFiles) -> dict[str, Any] | None:
    """Bars before and after for each text, a table of all, and perplexities by step where they were measured."""
    texts = [text for text in run.texts if stages_of(text)]
    if not texts:
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
        points = [(step, value / text["original"]) for step, value in run.by_step(text["data"]) if "original" in text]
        if points:
            series.append(Series(name, points, line_colour(index)))
    label = "times the uncompressed model's"
    if not series:
        return None
    return lines(series, title=f"Perplexity by step, in {label}", x_label="step", y_label=label, height=240, named=True)


def fixed(value: float) -> str:
    """A perplexity as text."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.3g}"
