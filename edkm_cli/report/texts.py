"""The section about the texts that were measured: perplexity by stage of each, and the distance from the original."""

from __future__ import annotations

from typing import Any

from edkm_cli.report.charts import Series, bars, legend, line_chart
from edkm_cli.report.markup import Markup, section, table, tag, unfold
from edkm_cli.report.read import RunFiles, stages_of
from edkm_cli.summaries import STAGES, perplexity_rows, text_names, windows_of

_COLOURS = ("c1", "c2", "c3")  # of the lines over steps; further texts are grey
_COMPARED = (
    "KL: how far each prediction is from the uncompressed model's, in nats; 0 is the same model. A text like the one "
    "that was trained on gets better by learning it, so only other text shows what was lost."
)


def perplexity_section(run: RunFiles) -> Markup | None:
    """Bars before and after for each text, a table of all, and perplexities by step where they were measured."""
    texts = [text for text in run.texts if stages_of(text)]
    if not texts:
        return None
    names = text_names([text["data"] for text in texts])
    where = f"Measured on {windows_of({'texts': texts})}. " if run.finished else ""
    many = len(texts) > 1
    figures = [
        tag("div", tag("h3", name) if many else None, tag("figure", _bars(text, f", {name}" if many else "")))
        for text, name in zip(texts, names, strict=True)
    ]
    header = ["", *(cell for name in names for cell in (name, "ratio"))]
    content = table(perplexity_rows({"texts": texts}), header=header, caption="Perplexity by stage")
    compared = all("kl_per_token" in text for text in texts)
    return section(
        "Perplexity",
        f"{where}Lower is better; the dashed line is the uncompressed model.",
        *figures,
        _over_steps(run, texts, names),
        tag("div", tag("div", content, class_="scroll"), tag("p", _COMPARED, class_="note"))
        if compared
        else unfold("as a table", content),
    )


def _bars(text: dict[str, Any], name: str) -> Markup:
    measured, original = stages_of(text), text.get("original")
    rows = [
        (
            STAGES[stage],
            [
                (
                    "",
                    value,
                    "muted" if stage in ("original", "dense") else "c1" + " pale" * (stage != list(measured)[-1]),
                )
            ],
            f"{value / original:.2f}x" if original and stage != "original" else "",
        )
        for stage, value in measured.items()
    ]
    return bars(rows, title=f"Perplexity by stage{name}", reference=original, show=fixed)


def _over_steps(run: RunFiles, texts: list[dict[str, Any]], names: list[str]) -> Markup | None:
    """How many times the original's perplexity each text has, step by step."""
    series = []
    for index, (text, name) in enumerate(zip(texts, names, strict=True)):
        points = [(step, value / text["original"]) for step, value in run.by_step(text["data"]) if "original" in text]
        if points:
            series.append(Series(name, points, _COLOURS[index] if index < len(_COLOURS) else "muted"))
    if not series:
        return None
    label = "times the uncompressed model's"
    title = f"Perplexity by step, in {label}"
    chart = line_chart(series, title=title, x_label="step", y_label=label, width=1000, height=240)
    return tag("div", legend([(one.label, one.colour) for one in series]), tag("figure", chart))


def fixed(value: float) -> str:
    """A perplexity as text."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.3g}"
