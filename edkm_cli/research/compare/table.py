"""A comparison as a table of text, and as a figure. Reads JSON, never imports torch."""

from __future__ import annotations

from typing import Any

from edkm_cli.report.charts import bars
from edkm_cli.report.markup import Markup
from edkm_cli.research.compare.config import OURS, UNCOMPRESSED
from edkm_cli.summaries import megabytes, table, text_names

# Options that have a column of their own.
_IN_COLUMNS = {"bits", "group_size", "granularity", "steps", "calibration_samples", "sequence_length"}


def format_table(result: dict[str, Any]) -> str:
    """The table as text, with notes and the reasons of failures below it."""
    texts = _texts(result)
    names = text_names(texts)
    header = ["method", "training", "bits", "granularity", "bits/weight", "weights"]
    header += [cell for name in names for cell in (name, "KL")]
    header += ["calibrated", "trained", "minutes", "peak memory"]
    rows, notes = [], []
    for row in result["rows"]:
        name = display_name(row)
        if row["error"]:
            rows.append([name, "failed", *[""] * (len(header) - 2)])
            notes.append(f"{row['label']}: {row['error']}")
            continue
        rows.append(
            [
                name,
                row.get("training") or "",
                str(row["bits"]),
                row["granularity"],
                f"{row['decoder_bits_per_weight']:.3f}",
                megabytes(row["weights_bytes"]),
                *(cell for text in _measured(row) for cell in _figures(text)),
                f"{row['calibration_tokens']:,}",
                f"{row['training_tokens']:,}",
                f"{row['seconds'] / 60:.1f}",
                megabytes(row["peak_memory_bytes"]),
            ]
        )
        if row["note"]:
            notes.append(f"{row['label']}: {row['note']}")
    setting = result["setting"]
    windows = max(row["windows"] for row in result["rows"] if row["windows"])
    return "\n".join(
        [
            f"{setting['model']}: perplexity of {windows} windows of {setting['context']} tokens, {' | '.join(names)}",
            "KL: from the uncompressed model, per token; training: what was trained, if anything; bits/weight: decoder "
            "linears, all side information counted; calibrated, trained: tokens",
            "",
            table(rows, header=header),
            *([""] if notes else []),
            *notes,
        ]
    )


def draw(result: dict[str, Any]) -> Markup:
    """The perplexity on the first text of each method that has one, the lowest first, as a chart."""
    setting, rows = result["setting"], [row for row in result["rows"] if row["perplexity"] is not None]
    shown = []
    for row in sorted(rows, key=lambda row: row["perplexity"]):
        colour = "c1" if row["method"] == OURS else "c3" if row["training_tokens"] else "muted"
        note = f"{row['decoder_bits_per_weight']:.2f} bits" + ", trained" * bool(row["training_tokens"])
        shown.append((f"{display_name(row)} {row['granularity']}".rstrip(), [("", row["perplexity"], colour)], note))
    reference = next((row["perplexity"] for row in rows if row["method"] == UNCOMPRESSED), None)
    text = f"{setting['model']}, {text_names(_texts(result))[0]}, context {setting['context']}"
    caption = f"perplexity on {text}; bits per weight of the decoder"
    return bars(shown, title=f"Perplexity by method: {text}", reference=reference, caption=caption)


def _measured(row: dict[str, Any]) -> list[dict[str, Any]]:
    """A row's figures by text; one that is older has those of one text."""
    return row.get("texts") or [{"perplexity": row["perplexity"]}]


def _texts(result: dict[str, Any]) -> list[str]:
    """The names of the measured texts."""
    for row in result["rows"]:
        if row.get("texts"):
            return [text["data"] for text in row["texts"]]
    return [str(result["setting"]["eval_data"] or f"held-out part of {result['setting']['data'][0]}")]


def _figures(text: dict[str, Any]) -> tuple[str, str]:
    divergence = text.get("kl_per_token")
    return f"{text['perplexity']:,.3f}", "" if divergence is None else f"{divergence:.3f}"


def display_name(row: dict[str, Any]) -> str:
    """The method with those options that have no column of their own."""
    options = [f"{name}={value}" for name, value in row["options"].items() if name not in _IN_COLUMNS]
    return " ".join([row["method"], *options])
