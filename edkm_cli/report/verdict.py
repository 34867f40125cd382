"""The page of `edkm eval --reference --page`: pass or fail against each limit, and plots. verdict.jinja lays it out."""

from typing import Any

from edkm_cli.report.charts import Series, line_colour, lines
from edkm_cli.report.document import error_map
from edkm_cli.report.markup import render
from edkm_cli.summaries import limit_rows, task_header, task_rows, text_names

_MATRICES = (
    "Relative error of each matrix's outputs on the reference's own inputs: what this matrix alone does wrong. Above 100% "
    "it does more harm than good."
)


def verdict_page(result: dict[str, Any]) -> str:
    """The page about a result of `edkm eval --reference`, whose JSON is documented in docs/results.md."""
    names = text_names([text["data"] for text in result["texts"]])
    known = [[row for row in text["by_confidence"] if row["kl"] is not None] for text in result["texts"]]
    pairs = enumerate(zip(names, known, strict=True))
    sure = [Series(name, _middles(rows, "kl"), line_colour(index)) for index, (name, rows) in pairs]
    ours, theirs = (_middles(result["positions"]["rows"], key) for key in ("perplexity", "reference_perplexity"))
    positions = [Series("this model", ours), Series("reference", theirs, "muted")]
    depths = [(float(index), row["error"]) for index, row in enumerate(result["layers"])]
    of_layers: dict[str, Any] = {"title": "By layer: relative error", "x_label": "layer", "y_label": "relative error"}
    errors = {row["name"]: row["error"] for row in result["matrices"]}
    recovery = result.get("recovery")
    return render(
        "verdict",
        name=result["model"],
        command="edkm eval",
        state="pass" if result["verdict"]["passed"] else "FAIL",
        kind=f"compared with {result['reference']}, {result['dtype']}",
        made="Made by edkm eval",
        result=result,
        texts=list(zip(names, result["texts"], known, strict=True)),
        limits=limit_rows(result["verdict"]),
        confidence=lines(sure, title="By confidence: KL per token", x_label="confidence", y_label="KL per token"),
        layers=lines([Series("error of outputs", depths)], **of_layers) if depths else None,
        matrices=error_map(errors, "By matrix", _MATRICES, "Relative error of outputs"),
        positions=lines(positions, title="By position: perplexity", x_label="tokens before", y_label="perplexity"),
        tasks=task_rows(result["tasks"], recovery) if "tasks" in result else None,
        task_header=task_header(recovery),
    )


def _middles(rows: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """Points of a line: a figure at the middle of each stretch `from`, `to`."""
    return [((row["from"] + row["to"]) / 2, row[key]) for row in rows]
