"""The page of `edkm eval --reference --page`: pass or fail against each limit, and plots. verdict.jinja lays it out."""

from __future__ import annotations

from typing import Any

from edkm_cli.report.charts import Series, line_colour, lines
from edkm_cli.report.document import error_map
from edkm_cli.report.markup import render
from edkm_cli.report.texts import fixed
from edkm_cli.summaries import limit_rows, megabytes, task_header, task_rows, text_names


def verdict_page(result: dict[str, Any]) -> str:
    """The page about a result of `edkm eval --reference`, whose JSON is documented in docs/results.md."""
    verdict, floor, first = result["verdict"], result["noise_floor"], result["texts"][0]
    names = text_names([text["data"] for text in result["texts"]])
    texts = list(zip(names, result["texts"], strict=True))
    failed = [
        f"{row['limit']} {row['bound']:g} is not kept: {row['value']:.4g}, {row['of']}"
        for row in verdict["limits"]
        if not row["passed"]
    ]
    beneath = "not measured" if floor is None else f"{floor['kl_per_token']:.1e} is the reference in {floor['dtype']}"
    shown = [
        ("KL per token", f"{first['kl_per_token']:.4f}", f"on {names[0]}; {beneath}"),
        ("99% of tokens below", f"{first['kl']['p99']:.3f}", f"median {first['kl']['median']:.4f}"),
        ("the same likeliest token", f"{100 * first['top1_agreement']:.1f}%", f"on {names[0]}"),
        ("perplexity", fixed(first["perplexity"]), f"reference {fixed(first['reference_perplexity'])}"),
        ("weights", megabytes(result["weights_bytes"]), f"decoder {result['decoder_bits_per_weight']:.3f} bits"),
    ]
    distances = [
        [name, fixed(text["perplexity"]), fixed(text["reference_perplexity"]), f"{text['kl_per_token']:.4f}",
         *(f"{text['kl'][key]:.4f}" for key in ("median", "p90", "p99", "largest")), f"{100 * text['top1_agreement']:.1f}%"]
        for name, text in texts
    ]  # fmt: skip
    recovery = result.get("recovery")
    return render(
        "verdict",
        name=result["model"],
        command="edkm eval",
        state="pass" if verdict["passed"] else "FAIL",
        kind=f"compared with {result['reference']}, {result['dtype']}",
        sentence=f"{'; '.join(failed) or 'Every limit is kept'}.",
        made="Made by edkm eval",
        shown=shown,
        limits=limit_rows(verdict),
        texts=distances,
        confidence=_confidence(texts),
        layers=_layers(result["layers"]),
        matrices=_matrices(result["matrices"]),
        positions=_positions(result["positions"]),
        writing=_writing(result["writing"]),
        tasks=task_rows(result["tasks"], recovery) if "tasks" in result else None,
        task_header=task_header(recovery),
    )


def _confidence(texts: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    known = [(name, [row for row in text["by_confidence"] if row["kl"] is not None]) for name, text in texts]
    series = [Series(name, _middles(rows, "kl"), line_colour(index)) for index, (name, rows) in enumerate(known)]
    drawn = lines(series, title="By confidence: KL per token", x_label="confidence", y_label="KL per token")
    cells = [
        (
            f"{name}, {row['from']:g} to {row['to']:g}",
            f"{row['share']:.1%}",
            f"{row['kl']:.4f}",
            f"{row['agreement']:.1%}",
        )
        for name, rows in known
        for row in rows
    ]
    return drawn | {"rows": cells}


def _layers(layers: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not layers:
        return None
    series = [Series("error of outputs", [(float(index), row["error"]) for index, row in enumerate(layers)])]
    return lines(series, title="By layer: relative error", x_label="layer", y_label="relative error")


def _matrices(matrices: list[dict[str, Any]]) -> dict[str, Any] | None:
    note = "Relative error of each matrix's outputs on the reference's own inputs: what this matrix alone does wrong. Above "
    note += "100% it does more harm than good."
    return error_map({row["name"]: row["error"] for row in matrices}, "By matrix", note, "Relative error of outputs")


def _positions(positions: dict[str, Any]) -> dict[str, Any]:
    rows = positions["rows"]
    series = [
        Series("this model", _middles(rows, "perplexity")),
        Series("reference", _middles(rows, "reference_perplexity"), "muted"),
    ]
    cells = [
        (f"{row['from']:,} to {row['to']:,}", *map(fixed, (row["perplexity"], row["reference_perplexity"])),
         f"{row['kl']:.4f}")
        for row in rows
    ]  # fmt: skip
    drawn = lines(series, title="By position: perplexity", x_label="tokens before", y_label="perplexity")
    return drawn | {"context": positions["context"], "rows": cells}


def _writing(writing: dict[str, Any] | None) -> dict[str, Any] | None:
    if writing is None:
        return None
    kinds = [
        (row["kind"], row["prompts"], f"{row['identical']:.0%}", f"{row['parts_at']:g}")
        for row in [*writing["by_kind"], {"kind": "all", **writing}]
    ]
    style = [
        (label, f"{writing[key]['repetition']:.1%}", f"{writing[key]['stopped']:.0%}", f"{writing[key]['tokens']:.1f}")
        for label, key in (("this model", "model"), ("reference", "reference"))
    ]
    return {"kinds": kinds, "style": style, "examples": writing["examples"]}


def _middles(rows: list[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """Points of a line: a figure at the middle of each stretch `from`, `to`."""
    return [((row["from"] + row["to"]) / 2, row[key]) for row in rows]
