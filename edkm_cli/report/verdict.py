"""The page of `edkm eval --reference --page`: pass or fail against each limit, and plots."""

from __future__ import annotations

from typing import Any

from edkm_cli.report.charts import Series, legend, line_chart
from edkm_cli.report.document import document, error_map, footer, tiles_of
from edkm_cli.report.markup import Markup, section, table, tag, unfold
from edkm_cli.report.texts import fixed
from edkm_cli.summaries import limit_rows, megabytes, task_header, task_rows, text_names

_COLOURS = ("c1", "c2", "c3")  # of the lines of texts; further texts are grey


def verdict_page(result: dict[str, Any]) -> str:
    """The page about a result of `edkm eval --reference`, whose JSON is documented in docs/results.md."""
    verdict, names = result["verdict"], text_names([text["data"] for text in result["texts"]])
    state = "pass" if verdict["passed"] else "FAIL"
    first = result["texts"][0]
    floor = result["noise_floor"]
    head = tag(
        "header", tag("p", "edkm eval", tag("span", state, class_="state"), class_="over"), tag("h1", result["model"]),
        tag("p", f"compared with {result['reference']}, {result['dtype']}", class_="over"),
        tag("p", _sentence(result), class_="lead"),
    )  # fmt: skip
    beneath = "not measured" if floor is None else f"{floor['kl_per_token']:.1e} is the reference in {floor['dtype']}"
    tiles = tiles_of(
        [
            ("KL per token", f"{first['kl_per_token']:.4f}", f"on {names[0]}; {beneath}"),
            ("99% of tokens below", f"{first['kl']['p99']:.3f}", f"median {first['kl']['median']:.4f}"),
            ("the same likeliest token", f"{100 * first['top1_agreement']:.1f}%", f"on {names[0]}"),
            ("perplexity", fixed(first["perplexity"]), f"reference {fixed(first['reference_perplexity'])}"),
            ("weights", megabytes(result["weights_bytes"]), f"decoder {result['decoder_bits_per_weight']:.3f} bits"),
        ]
    )  # fmt: skip
    sections = [
        _limits(verdict),
        _texts(result["texts"], names),
        _confidence(result["texts"], names),
        _layers(result["layers"]),
        _matrices(result["matrices"]),
        _positions(result["positions"]),
        _writing(result["writing"]),
        _tasks(result),
    ]
    return document(result["model"], head, tag("main", tiles, *sections), footer("Made by edkm eval"))


def _sentence(result: dict[str, Any]) -> str:
    failed = [row for row in result["verdict"]["limits"] if not row["passed"]]
    if not failed:
        return "Every limit is kept."
    parts = [f"{row['limit']} {row['bound']:g} is not kept: {row['value']:.4g}, {row['of']}" for row in failed]
    return f"{'; '.join(parts)}."


def _limits(verdict: dict[str, Any]) -> Markup:
    header = ["limit", "value", "bound", "verdict"]
    return section("Limits", "Any of them can be set on the command line.",
                   table(limit_rows(verdict), header=header, caption="Limits"))  # fmt: skip


def _texts(texts: list[dict[str, Any]], names: list[str]) -> Markup:
    rows = [
        [name, fixed(text["perplexity"]), fixed(text["reference_perplexity"]), f"{text['kl_per_token']:.4f}",
         *(f"{text['kl'][key]:.4f}" for key in ("median", "p90", "p99", "largest")), f"{100 * text['top1_agreement']:.1f}%"]
        for name, text in zip(names, texts, strict=True)
    ]  # fmt: skip
    header = ["text", "perplexity", "reference", "KL", "median", "90%", "99%", "largest", "same token"]
    return section(
        "Distance from the reference",
        "KL divergence of each prediction from the reference's, in nats: mean, median, and below which 90% and 99% of the "
        "tokens are.",
        tag("div", table(rows, header=header, caption="By text"), class_="scroll"),
    )


def _confidence(texts: list[dict[str, Any]], names: list[str]) -> Markup:
    def rows(text: dict[str, Any]) -> list[dict[str, Any]]:
        return [row for row in text["by_confidence"] if row["kl"] is not None]

    series = [
        Series(name, [((row["from"] + row["to"]) / 2, row["kl"]) for row in rows(text)], _colour(index))
        for index, (text, name) in enumerate(zip(texts, names, strict=True))
    ]
    cells = [
        [
            f"{name}, {row['from']:g} to {row['to']:g}",
            f"{row['share']:.1%}",
            f"{row['kl']:.4f}",
            f"{row['agreement']:.1%}",
        ]
        for text, name in zip(texts, names, strict=True)
        for row in rows(text)
    ]
    return _chart(
        "By confidence",
        "How sure the reference was: its highest probability. An error where it was sure changes what is written.",
        series,
        x_label="confidence",
        y_label="KL per token",
        more=unfold(
            "as a table", table(cells, header=["confidence", "share", "KL", "same token"], caption="By confidence")
        ),
    )


def _layers(layers: list[dict[str, Any]]) -> Markup | None:
    if not layers:
        return None
    points = [(float(index), row["error"]) for index, row in enumerate(layers)]
    return _chart(
        "By layer",
        "Relative error of each decoder layer's outputs, ||y - y'|| / ||y||, in the model: errors of the layers before "
        "add up in it.",
        [Series("error of outputs", points)],
        x_label="layer",
        y_label="relative error",
    )


def _matrices(matrices: list[dict[str, Any]]) -> Markup | None:
    if not matrices:
        return None
    note = "Relative error of each matrix's outputs on the reference's own inputs: what this matrix alone does wrong. Above "
    note += "100% it does more harm than good."
    return error_map({row["name"]: row["error"] for row in matrices}, "By matrix", note, "Relative error of outputs")


def _positions(positions: dict[str, Any]) -> Markup:
    rows = positions["rows"]
    series = [
        Series(label, [((row["from"] + row["to"]) / 2, row[key]) for row in rows], colour)
        for label, key, colour in (("this model", "perplexity", "c1"), ("reference", "reference_perplexity", "muted"))
    ]
    cells = [
        [
            f"{row['from']:,} to {row['to']:,}",
            fixed(row["perplexity"]),
            fixed(row["reference_perplexity"]),
            f"{row['kl']:.4f}",
        ]
        for row in rows
    ]
    return _chart(
        "By position",
        f"Perplexity along a window of {positions['context']:,} tokens.",
        series,
        x_label="tokens before",
        y_label="perplexity",
        more=unfold(
            "as a table", table(cells, header=["tokens before", "perplexity", "reference", "KL"], caption="By position")
        ),
    )


def _writing(writing: dict[str, Any] | None) -> Markup | None:
    if writing is None:
        return None
    kinds = [
        [row["kind"], str(row["prompts"]), f"{row['identical']:.0%}", f"{row['parts_at']:g}"]
        for row in [*writing["by_kind"], {"kind": "all", **writing}]
    ]
    style = [
        [label, f"{writing[key]['repetition']:.1%}", f"{writing[key]['stopped']:.0%}", f"{writing[key]['tokens']:.1f}"]
        for label, key in (("this model", "model"), ("reference", "reference"))
    ]
    examples = [
        tag("p", tag("b", f"{row['kind']}: "), row["prompt"], tag("br"), tag("b", "reference: "), row["reference"],
            tag("br"), tag("b", "this model: "), row["model"], class_="note")
        for row in writing["examples"]
    ]  # fmt: skip
    return section(
        "Writing",
        "The likeliest token each time, after prompts of mixed kinds. Texts part where the first token differs; "
        "repeated are four tokens in a row that stood in the text before.",
        tag(
            "div",
            tag(
                "div",
                table(kinds, header=["kind", "prompts", "identical", "part at token"], caption="Where texts part"),
            ),
            tag("div", table(style, header=["", "repeated", "ended", "tokens"], caption="How they read")),
            class_="pair",
        ),
        unfold("texts", *examples),
    )


def _tasks(result: dict[str, Any]) -> Markup | None:
    if "tasks" not in result:
        return None
    rows = task_rows(result["tasks"], result["recovery"])
    return section(
        "Tasks",
        "Recovery: this model's figure by the reference's. Lost and won: right answers that are wrong now, and the "
        "reverse.",
        tag("div", table(rows, header=task_header(result["recovery"]), caption="Tasks"), class_="scroll"),
    )


def _chart(
    title: str, note: str, series: list[Series], *, x_label: str, y_label: str, more: Markup | None = None
) -> Markup:
    return section(
        title,
        note,
        legend([(one.label, one.colour) for one in series]) if len(series) > 1 else None,
        tag(
            "figure",
            line_chart(series, title=f"{title}: {y_label}", x_label=x_label, y_label=y_label, width=1000, height=260),
        ),
        more,
    )


def _colour(index: int) -> str:
    return _COLOURS[index] if index < len(_COLOURS) else "muted"
