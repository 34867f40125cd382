"""The section about the texts that were measured: perplexity by stage of each, and the distance from the original."""

from __future__ import annotations

from edkm_cli.report.charts import Series, bars, figure, legend, line_chart
from edkm_cli.report.markup import Markup, section, table, tag, unfold
from edkm_cli.report.read import STAGES, RunFiles, Text
from edkm_cli.summaries import text_names

STAGE_NAMES = {
    "original": "uncompressed",
    "dense": "uncompressed, trained equally",
    "start": "compressed, not trained",
    "trained": "compressed and trained",
    "exported": "read back from disk",
}
_COLOURS = ("c1", "c2", "c3")  # of the lines over steps; further texts are grey


def perplexity_section(run: RunFiles) -> Markup | None:
    """Bars before and after for each text, a table of all, and perplexities by step where they were measured."""
    texts = [text for text in run.texts if text.perplexity]
    if not texts:
        return None
    where = f"Measured on {' | '.join(text.about for text in texts)}. " if run.finished else ""
    names = text_names([text.name for text in texts])
    many = len(texts) > 1
    figures = [
        tag("div", tag("h3", name) if many else None, tag("figure", _bars(text, name if many else "")))
        for text, name in zip(texts, names, strict=True)
    ]
    return section(
        "Perplexity",
        f"{where}Lower is better; the dashed line is the uncompressed model.",
        *figures,
        _over_steps(run, texts, names),
        _all_figures(texts, names),
    )


def _bars(text: Text, name: str) -> Markup:
    measured, original = text.perplexity, text.perplexity.get("original")
    rows = [
        (
            STAGE_NAMES[stage],
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
    title = f"Perplexity by stage{name and f', {name}'}"
    return bars(rows, title=title, reference=original, show=fixed)


def _over_steps(run: RunFiles, texts: list[Text], names: list[str]) -> Markup | None:
    """How many times the original's perplexity each text has, step by step."""
    series = []
    for index, (text, name) in enumerate(zip(texts, names, strict=True)):
        original = text.perplexity.get("original")
        points = [(step, value / original) for step, value in run.by_step(text.name)] if original else []
        if points:
            series.append(Series(name, points, _COLOURS[index] if index < len(_COLOURS) else "muted"))
    if not series:
        return None
    title = "Perplexity by step, in times the uncompressed model's"
    chart = line_chart(
        series, title=title, x_label="step", y_label="times the uncompressed model's", width=1000, height=240
    )
    return tag("div", legend([(one.label, one.colour) for one in series]), tag("figure", chart))


def _all_figures(texts: list[Text], names: list[str]) -> Markup:
    """A table with a row for each text; open where the distance from the original was measured."""
    stages = [stage for stage in STAGES if any(stage in text.perplexity for text in texts)]
    compared = any(text.kl is not None for text in texts)
    header = ["text", *(STAGE_NAMES[stage] for stage in stages), "against the original"]
    header += ["against the equally trained"] if "dense" in stages else []
    header += ["KL per token", "same likeliest token"] if compared else []
    rows = []
    for text, name in zip(texts, names, strict=True):
        last, original = list(text.perplexity.values())[-1], text.perplexity.get("original")
        row = [name, *(fixed(text.perplexity[stage]) if stage in text.perplexity else "" for stage in stages)]
        row.append(f"{last / original:.2f}x" if original else "")
        if "dense" in stages:
            row.append(f"{last / text.perplexity['dense']:.2f}x" if "dense" in text.perplexity else "")
        if compared:
            row.append("" if text.kl is None else figure(text.kl))
            row.append("" if text.agreement is None else f"{100 * text.agreement:.1f}%")
        rows.append(row)
    content = table(rows, header=header, caption="Perplexity by stage")
    if not compared:
        return unfold("as a table", content)
    note = (
        "KL: how far each prediction is from the uncompressed model's, in nats; 0 is the same model. A text like the one "
        "that was trained on gets better by learning it, so only other text shows what was lost."
    )
    return tag("div", tag("div", content, class_="scroll"), tag("p", note, class_="note"))


def fixed(value: float) -> str:
    """A perplexity as text."""
    return f"{value:,.2f}" if value < 1e6 else f"{value:.3g}"
