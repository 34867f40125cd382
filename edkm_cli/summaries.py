"""Results -> text for a terminal: figures and rows are made here, summaries.jinja lays them out. Never imports torch."""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def megabytes(count: float) -> str:
    """A size as text: MB below 10 GB, GB above (powers of ten).

    >>> megabytes(71_001_184)
    '71.0 MB'
    """
    return f"{count / 1e6:,.1f} MB" if count < 1e10 else f"{count / 1e9:,.2f} GB"


def duration(seconds: float) -> str:
    """A duration as text.

    >>> [duration(seconds) for seconds in (42, 140, 3660)]
    ['42 s', '2 min 20 s', '1 h 1 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def fixed(value: float, digits: int = 2) -> str:
    """So many digits after the point; of a perplexity that has no meaning any more the power of ten."""
    return f"{value:,.{digits}f}" if value < 1e6 else f"{value:.3g}"


def table(rows: list[list[str]], *, header: list[str] | None = None) -> str:
    """Rows as aligned columns, the first to the left, the others to the right.

    >>> print(table([["row:1", "3.19"], ["tensor", "3"]]))
    row:1   3.19
    tensor     3
    """
    lines = [header, *rows] if header else rows
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    text = []
    for line in lines:
        others = (cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))
        text.append("  ".join([line[0].ljust(widths[0]), *others]).rstrip())
    if header:
        text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


# What is measured of a text, in the order of a run -> what it is called.
STAGES = {
    "original": "uncompressed",
    "dense": "uncompressed, trained equally",
    "start": "compressed, not trained",
    "compressed": "compressed",  # of a fine-tuning: before it
    "trained": "compressed and trained",
    "exported": "read back from disk",
    "adapted": "with the adapter",
    "merged": "merged",
}


def text_names(names: Iterable[str]) -> list[str]:
    """Short names of measured texts: of files the last part of the path, where that tells them apart.

    >>> text_names(["/data/wiki.raw", "held-out part of my/text.txt", "c4"])
    ['wiki.raw', 'held-out part of text.txt', 'c4']
    """
    names, before = list(names), "held-out part of "
    short = [before * name.startswith(before) + name.removeprefix(before).rstrip("/").rsplit("/")[-1] for name in names]
    return short if len(set(short)) == len(names) else names


def texts_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the measured texts; of a report without them, what it has of its one text."""
    return report.get("texts") or [{**report["evaluation"], **report["perplexity"]}]


def perplexity_rows(report: dict[str, Any]) -> list[list[str]]:
    """A row for each stage that was measured: its name, and for each text the perplexity and its ratio to the original's;
    then the distance of the last stage from the uncompressed model, where it was measured."""
    texts = texts_of(report)
    rows: list[list[str]] = []

    def add(label: str, cells: Iterable[tuple[str, str]]) -> None:
        rows.append([label, *chain.from_iterable(cells)])

    for stage, label in STAGES.items():
        if all(text.get(stage) is not None for text in texts):
            ratios = [f"{fixed(text[stage] / text['original'])}x" if "original" in text else "" for text in texts]
            add(label, zip((fixed(text[stage], 3) for text in texts), ratios, strict=True))
    if all("exported_over_dense" in text for text in texts):
        ratios = [f"{fixed(text['exported_over_dense'])}x" for text in texts]
        add("compressed by uncompressed, both trained", (("", ratio) for ratio in ratios))
    stages = [text.get("stages", {}) for text in texts]
    before = [next(iter(named.values()))["kl_per_token"] for named in stages if "trained" in named]
    if len(before) == len(texts) and None not in before:
        add("KL per token, not trained", ((f"{value:.4f}", "") for value in before))
    if all(text.get("kl_per_token") is not None for text in texts):
        add("KL per token", ((f"{text['kl_per_token']:.4f}", "") for text in texts))
        add("the same likeliest token", ((f"{100 * text['top1_agreement']:.1f}%", "") for text in texts))
    return rows


def windows_of(report: dict[str, Any]) -> str:
    """What the figures are of: windows and texts."""
    texts = texts_of(report)
    names = text_names([text["data"] for text in texts])
    counts = [f"{text['windows']} windows of {text['context']} tokens" for text in texts]
    if len(set(counts)) == 1:
        return f"{counts[0]}, {' | '.join(names)}"
    return " | ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))


def task_header(recovery: dict[str, Any] | None) -> list[str]:
    """The columns of `task_rows`."""
    beside = [] if recovery is None else ["uncompressed", "recovery", "lost", "won"]
    return ["task", "metric", "value", *beside, "samples", "examples"]


def limit_rows(verdict: dict[str, Any]) -> list[list[str]]:
    """A row for each limit: what it is of, the value, the bound, and whether it passed."""
    passed = {True: "pass", False: "FAIL"}
    return [
        [f"{row['limit']}, {row['of']}", f"{row['value']:.4g}", f"{row['bound']:g}", passed[row["passed"]]]
        for row in verdict["limits"]
    ]


def metrics_of(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, float, float | None]]:
    """Benchmark results as (task, metric, value, standard error), those that have a value."""
    for task, facts in results.items():
        for key, value in facts.items():
            metric, comma, filter_name = key.partition(",")
            error_key = f"{metric}_stderr{comma}{filter_name}"
            if value is not None and error_key in facts:
                yield task, key, value, facts[error_key]


def task_rows(results: dict[str, dict[str, Any]], recovery: dict[str, dict[str, Any]] | None = None) -> list[list[str]]:
    """Benchmark results as rows: task, metric, value with its standard error, documents, examples in the prompt; beside a
    reference also its value, the share of it that is kept, and the answers that were lost and won."""

    def shown(value: float, error: float | None) -> str:
        return f"{value:.4f}" + (f" +- {error:.4f}" if error is not None else "")

    rows = []
    for task, key, value, error in metrics_of(results):
        beside = []
        if recovery is not None and (row := recovery.get(task, {}).get(key)):
            shares = [row.get(name) for name in ("recovery", "lost", "won")]
            beside = [shown(row["reference"], row["reference_stderr"])]
            beside += ["" if share is None else f"{100 * share:.1f}%" for share in shares]
        elif recovery is not None:
            beside = [""] * 4
        facts = results[task]
        rows.append([task, key, shown(value, error), *beside, f"{facts['samples']:,}", str(facts["num_fewshot"])])
    return rows


def need_rows(plan: dict[str, Any]) -> list[list[str]]:
    """Bytes by part, on the device and, beside a GPU, in host memory; parts that need nothing are left out."""
    columns = [(plan["peak_memory_bytes"], plan["phases"])]
    if "host_memory_bytes" in plan:
        columns.append((plan["host_memory_bytes"], plan["host_phases"]))
    parts = [part for part in plan["peak_memory_bytes"] if any(sizes[part] >= 50_000 for sizes, _ in columns)]
    rows = [[part, *(megabytes(sizes[part]) for sizes, _ in columns)] for part in parts]
    return [*rows, ["during", *(max(phases, key=phases.__getitem__) for _, phases in columns)]]


def module_rows(plan: dict[str, Any]) -> list[list[str]]:
    """A row for each kind of module that is swapped."""
    return [[one["role"], f"{one['count']} x", str(tuple(one["shape"])), one["becomes"]] for one in plan["modules"]]


def proposal_rows(plan: dict[str, Any]) -> list[list[str]]:
    """A row for each of the settings that would fit."""
    rows = []
    for entry in plan["proposals"]:
        where = f" on {entry['processes']} GPUs" * (entry["processes"] != plan["processes"])
        rows.append([entry["flags"] + where, megabytes(entry["total_bytes"])])
    return rows


def layer_rows(inspected: dict[str, Any]) -> list[list[str]]:
    """A row for each packed module: its path, shape, bits, number of tables, bytes."""
    facts = ((layer, "x".join(map(str, layer["shape"])), sum(layer["bytes"].values())) for layer in inspected["layers"])
    return [[one["name"], shape, str(one["bits"]), str(one["luts"] or "-"), f"{size:,}"] for one, shape, size in facts]


def _aligned(text: str) -> str:
    """Lines of a name, two blanks and what is said of it, with all names as wide as the widest."""
    facts = [line.partition("  ") for line in text.splitlines() if line]
    width = max(len(name) for name, _, _ in facts)
    return "".join(f"{name.ljust(width)}  {value}\n" for name, _, value in facts)


@cache
def _environment() -> Environment:
    places = FileSystemLoader(Path(__file__).parent)
    made = Environment(loader=places, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    made.filters |= {"aligned": _aligned, "counted": Counter, "number": format}
    rows = (perplexity_rows, need_rows, module_rows, proposal_rows, limit_rows, layer_rows, task_rows, task_header)
    words = (megabytes, duration, fixed, table, text_names, texts_of, windows_of)
    made.filters |= {one.__name__: one for one in (*rows, *words)}
    return made


def summary(command: str, result: dict[str, Any]) -> str:
    """What a command prints of its result: the macro of its name in summaries.jinja."""
    return getattr(_environment().get_template("summaries.jinja").module, command)(result).removesuffix("\n")


def card(kind: str, report: dict[str, Any], **about: Any) -> str:
    """README.md of what a run wrote, with the metadata block that the hub reads: a macro of cards.jinja."""
    return getattr(_environment().get_template("cards.jinja").module, kind)(report, **about)
