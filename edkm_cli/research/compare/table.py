"""A comparison as a table of text, and as a figure. Reads JSON, never imports torch."""

from typing import Any

from markupsafe import Markup

from edkm_cli.report.charts import bars
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
    rows: list[list[str]] = []
    notes, several = [], False
    for same in _by_seed(result["rows"]):
        name, measured = display_name(same[0]), [one for one in same if not one["error"]]
        notes += [f"{one['label']}: {one['error']}" for one in same if one["error"]]
        if not measured:
            rows.append([name, "failed", *[""] * (len(header) - 2)])
            continue
        row, several = measured[0], several or len(measured) > 1
        form = [row["training"], str(row["bits"]), row["granularity"], f"{row['decoder_bits_per_weight']:.3f}"]
        figures = [cell for place in range(len(texts)) for cell in _figures([one["texts"][place] for one in measured])]
        cost = [f"{row['calibration_tokens']:,}", f"{row['training_tokens']:,}", f"{row['seconds'] / 60:.1f}"]
        sizes = [megabytes(row[key]) for key in ("weights_bytes", "peak_memory_bytes")]
        rows.append([name, *form, sizes[0], *figures, *cost, sizes[1]])
        if row["note"]:
            notes.append(f"{row['label']}: {row['note']}")
    setting = result["setting"]
    every = [setting | text for row in result["rows"] for text in row["texts"] or ()]
    counts, contexts = (" or ".join(map(str, sorted({one[key] for one in every}))) for key in ("windows", "context"))
    head = f"{setting['model']}: perplexity of {counts} windows of {contexts} tokens, {' | '.join(names)}"
    legend = "KL: from the uncompressed model, per token; training: what was trained, if anything"
    legend += "; bits/weight: decoder linears, all side information counted; calibrated, trained: tokens"
    legend += "; +-: half of the range over seeds" * several
    seconds = sum((row[key] or 0.0) for row in result["rows"] for key in ("seconds", "evaluation_seconds"))
    total = f"all rows: {seconds / 3600:.1f} hours"  # of methods and their evaluations, loading left out
    return "\n".join([head, legend, "", table(rows, header=header), *[""] * bool(notes), *notes, "", total])


def draw(result: dict[str, Any]) -> Markup:
    """The perplexity on the first text of each method that has one, the lowest first, as a chart."""
    setting = result["setting"]
    rows = [same[0] for same in _by_seed([row for row in result["rows"] if row["perplexity"] is not None])]
    shown = []
    rows.sort(key=lambda row: row["perplexity"])
    for row, name in zip(rows, _short_names(rows), strict=True):
        colour = "c1" if row["method"] == OURS else "c3" if row["training_tokens"] else "muted"
        note = f"{row['decoder_bits_per_weight']:.2f} bits" + ", trained" * bool(row["training_tokens"])
        shown.append((name, [("", row["perplexity"], colour)], note))
    reference = next((row["perplexity"] for row in rows if row["method"] == UNCOMPRESSED), None)
    text = f"{setting['model']}, {text_names(_texts(result))[0]}, context {setting['context']}"
    caption = f"perplexity on {text}; bits per weight of the decoder"
    return bars(shown, title=f"Perplexity by method: {text}", reference=reference, caption=caption)


def _short_names(rows: list[dict[str, Any]]) -> list[str]:
    """A name for each row: of its options those without which two rows, trained or both not, would have the same."""

    def named(*hidden: str) -> list[tuple[str, bool]]:
        names = [f"{display_name(row, *hidden)} {row['granularity']}".rstrip() for row in rows]
        return [(name, bool(row["training_tokens"])) for name, row in zip(names, rows, strict=True)]

    hidden: list[str] = []
    different = len(set(named()))
    for option in dict.fromkeys(name for row in rows for name in row["options"]):
        if len(set(named(*hidden, option))) == different:
            hidden.append(option)
    return [name for name, _ in named(*hidden)]


def _by_seed(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows, those together that differ in their seed only."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        others = [option for option in row["options"].items() if option[0] != "seed"]
        groups.setdefault(f"{row['method']} {others}", []).append(row)
    return list(groups.values())


def _texts(result: dict[str, Any]) -> list[str]:
    """The names of the measured texts."""
    return next(([text["data"] for text in row["texts"]] for row in result["rows"] if row["texts"]), [])


def _figures(seeds: list[dict[str, Any]]) -> tuple[str, str]:
    """Perplexity and KL of a text: with several seeds their mean, and half of their range."""

    def shown(key: str) -> str:
        if not (values := [one[key] for one in seeds if one[key] is not None]):
            return ""
        spread = f" +-{(max(values) - min(values)) / 2:.3f}" if len(values) > 1 else ""
        return f"{sum(values) / len(values):,.3f}{spread}"

    return shown("perplexity"), shown("kl_per_token")


def display_name(row: dict[str, Any], *hidden: str) -> str:
    """The method with those options that are not hidden and have no column of their own."""
    hidden = (*hidden, *_IN_COLUMNS, "seed")
    options = [f"{name}={value}" for name, value in row["options"].items() if name not in hidden]
    return " ".join([row["method"], *options])
