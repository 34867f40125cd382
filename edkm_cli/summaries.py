"""Results -> text for a terminal. Reads JSON, never imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any


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
    "trained": "compressed and trained",
    "exported": "read back from disk",
    "compressed": "compressed",  # of a fine-tuning: before it
    "adapted": "with the adapter",
    "merged": "merged",
}


def text_names(names: list[str]) -> list[str]:
    """Short names of measured texts: of files the last part of the path, where that tells them apart.

    >>> text_names(["/data/wiki.raw", "held-out part of my/text.txt", "c4"])
    ['wiki.raw', 'held-out part of text.txt', 'c4']
    """
    before = "held-out part of "
    short = [before * name.startswith(before) + name.removeprefix(before).rstrip("/").rsplit("/")[-1] for name in names]
    return short if len(set(short)) == len(names) else list(names)


def texts_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the measured texts; of a report without them, what it has of its one text."""
    return report.get("texts") or [{**report["evaluation"], **report["perplexity"]}]


def perplexity_rows(report: dict[str, Any]) -> list[list[str]]:
    """A row for each stage that was measured: its name, and for each text the perplexity and its ratio to the original's;
    then the distance of the last stage from the uncompressed model, where it was measured."""
    texts = texts_of(report)

    def row(label: str, shown: Callable[[dict[str, Any]], tuple[str, str]]) -> list[str]:
        return [label, *(cell for text in texts for cell in shown(text))]

    def staged(text: dict[str, Any], stage: str) -> tuple[str, str]:
        return f"{text[stage]:,.3f}", f"{text[stage] / text['original']:.2f}x" if "original" in text else ""

    measured = [stage for stage in STAGES if all(text.get(stage) is not None for text in texts)]
    rows = [row(STAGES[stage], partial(staged, stage=stage)) for stage in measured]
    if all("exported_over_dense" in text for text in texts):
        ratio = row(
            "compressed by uncompressed, both trained", lambda text: ("", f"{text['exported_over_dense']:.2f}x")
        )
        rows.append(ratio)
    if all(text.get("kl_per_token") is not None for text in texts):
        rows.append(row("KL per token", lambda text: (f"{text['kl_per_token']:.4f}", "")))
        rows.append(row("the same likeliest token", lambda text: (f"{100 * text['top1_agreement']:.1f}%", "")))
    return rows


def windows_of(report: dict[str, Any]) -> str:
    """What the figures are of: windows and texts."""
    texts = texts_of(report)
    names = text_names([text["data"] for text in texts])
    counts = [f"{text['windows']} windows of {text['context']} tokens" for text in texts]
    if len(set(counts)) == 1:
        return f"{counts[0]}, {' | '.join(names)}"
    return " | ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))


def summary(report: dict[str, Any]) -> str:
    """What `edkm compress` prints at its end."""
    ratio = report["original_weights_bytes"] / report["weights_bytes"]
    reasons = Counter(entry["reason"] for entry in report["skipped"])
    counts = f"{len(report['swapped'])} compressed, {len(report['skipped'])} left uncompressed"
    counts += f" ({'; '.join(f'{count}: {reason}' for reason, count in reasons.items())})" * bool(reasons)
    return _ended(
        f"{report['model']} -> {report['output']}",
        report,
        {
            "weights": f"{megabytes(report['weights_bytes'])} (16-bit: {megabytes(report['original_weights_bytes'])})",
            "ratio": f"{ratio:.2f}x smaller",
            "decoder": f"{report['decoder_bits_per_weight']:.3f} bits per weight, lookup tables included",
            "whole model": f"{report['model_bits_per_weight']:.3f} bits per weight",
            "modules": counts,
            "training": f"{report['steps']} steps, {report['training_tokens']:,} tokens",
            **({"data": _data(report["data"])} if "data" in report else {}),
        },
    )


def _ended(title: str, report: dict[str, Any], facts: dict[str, str]) -> str:
    """What a run prints at its end: perplexities, facts, and what it took."""
    seconds = report["seconds"]
    phases = ", ".join(f"{name} {duration(value)}" for name, value in seconds.items())
    costs = {
        "time": f"{duration(sum(seconds.values()))} ({phases})",
        "peak memory": megabytes(report["peak_memory_bytes"]),
    }
    reasons = [f"  KL not measured: {row['not_compared']}" for row in texts_of(report)[:1] if "not_compared" in row]
    measured = [f"perplexity ({windows_of(report)})", *_indented(table(perplexity_rows(report))), *reasons]
    return "\n".join(["", title, "", *measured, "", *_facts((facts | costs).items())])


def _facts(facts: Iterable[tuple[str, str]]) -> list[str]:
    facts = list(facts)
    width = max(len(name) for name, _ in facts)
    return [f"{name.ljust(width)}  {value}" for name, value in facts]


def _indented(text: str) -> list[str]:
    return ["  " + line for line in text.splitlines()]


def _data(facts: dict[str, Any]) -> str:
    """What became of the training data, token by token, and what is wrong with the text that was measured."""
    sources, keys = facts["sources"], ("documents", "tokens", "trained", "masked", "empty")
    total = {key: sum(row[key] for row in sources) for key in keys}
    parts = [
        f"{total['tokens']:,} tokens in {total['documents']:,} documents: {total['trained']:,} learnt, "
        f"{total['masked']:,} masked, {facts['dropped']:,} dropped"
    ]
    if total["empty"]:
        parts.append(f"{total['empty']:,} records without text or answer left out")
    if held_out := sum(row.get("held_out", 0) for row in sources):
        parts.append(f"{held_out:,} characters held out")
    if facts["split"]:
        parts.append(f"{facts['split']:,} documents longer than a sequence split")
    overlap = facts["measured_and_trained_on"]
    if overlap["found"]:
        parts.append(f"WARNING: {overlap['found']:,} of {overlap['of']:,} documents and lines measured were trained on")
    return "; ".join(parts)


def plan_summary(plan: dict[str, Any]) -> str:
    """What `--dry-run` prints."""
    shapes = [
        [kind["role"], f"{kind['count']} x", str(tuple(kind["shape"])), kind["becomes"]] for kind in plan["modules"]
    ]
    skipped = [f"  {entry['name']}: {entry['reason']}" for entry in plan["skipped"]] or ["  none"]
    many = plan["processes"] > 1
    where = f"each of {plan['processes']} processes on {plan['device']}" if many else plan["device"]
    room = megabytes(plan["available_bytes"]) + (" each" if many and plan["device"] != "cpu" else "")
    return "\n".join(
        [
            f"{plan['model']}: what a run would do (reads the configuration only, writes nothing)",
            "",
            "modules",
            *_indented(table(shapes)),
            "left uncompressed",
            *skipped,
            "",
            f"peak memory of {where}",
            *_indented(_need_table(plan)),
            *([f"  not counted: {plan['not_counted']}"] if "not_counted" in plan else []),
            *(f"WARNING: {warning}" for warning in plan.get("warnings", ())),
            "",
            f"training  {plan['steps']} steps of {plan['sequences_per_step']} sequences, "
            f"{plan['training_tokens']:,} tokens",
            f"weights   {megabytes(plan['weights_bytes'])} (16-bit: {megabytes(plan['original_weights_bytes'])}), "
            f"decoder {plan['decoder_bits_per_weight']:.3f} bits per weight",
            f"fits      {'yes' if plan['fits'] else 'no'}, {plan['device']} has {room}",
            *_proposals(plan),
        ]
    )


def _need_table(plan: dict[str, Any]) -> str:
    """Bytes by part, on the device and, beside a GPU, in host memory; parts that need nothing are left out."""
    columns = [("device", plan["peak_memory_bytes"], plan["phases"])]
    if "host_memory_bytes" in plan:
        columns.append(("host", plan["host_memory_bytes"], plan["host_phases"]))
    rows = [
        [part, *(megabytes(column[part]) for _, column, _ in columns)]
        for part in plan["peak_memory_bytes"]
        if any(column[part] >= 50_000 for _, column, _ in columns)
    ]
    rows.append(["during", *(max(phases, key=phases.__getitem__) for _, _, phases in columns)])
    return table(rows, header=["", *(name for name, _, _ in columns)] if len(columns) > 1 else None)


def _proposals(plan: dict[str, Any]) -> list[str]:
    """The settings that would fit, one in each line."""
    if plan["fits"]:
        return []
    rows = []
    for entry in plan["proposals"]:
        gpus = f" on {entry['processes']} GPUs" if entry["processes"] != plan["processes"] else ""
        rows.append([entry["flags"] + gpus, megabytes(entry["total_bytes"])])
    if not rows:
        return ["          none of the other settings tried fits either"]
    return ["would fit", *_indented(table(rows))]


def evaluation_summary(result: dict[str, Any]) -> str:
    """What `edkm eval` prints."""
    facts: list[tuple[str, str]] = []
    texts = result.get("texts", [])
    for text, name in zip(texts, text_names([text["data"] for text in texts]), strict=True):
        windows = f"{text['windows']} windows of {text['context']} tokens"
        facts.append(("perplexity", f"{text['perplexity']:.3f}  ({windows})"))
        facts.append(("text", f"{name if len(texts) > 1 else text['data']}, {text['tokens']:,} tokens"))
        if "kl_per_token" in text:
            agreement = f"{100 * text['top1_agreement']:.1f}% the same likeliest token"
            facts.append((f"from {result['reference']}", f"KL {text['kl_per_token']:.4f} per token, {agreement}"))
            tail = f"median {text['kl']['median']:.4f}, 90% below {text['kl']['p90']:.4f}, 99% below {text['kl']['p99']:.4f}"
            facts.append(("KL of a token", tail))
    facts += [
        ("weights", megabytes(result["weights_bytes"])),
        ("decoder", f"{result['decoder_bits_per_weight']:.3f} bits per weight"),
        ("whole model", f"{result['model_bits_per_weight']:.3f} bits per weight"),
        ("time", duration(result["seconds"])),
        ("peak memory", megabytes(result["peak_memory_bytes"])),
    ]
    if "prefill_tokens_per_second" in result:
        speed = f"{result['prefill_tokens_per_second']:.1f} prefill, {result['decode_tokens_per_second']:.1f} decode"
        for name, kind in (("dense", "dense weights"), ("dense_fp32", "dense float32")):
            if name in result:
                dense = result[name]
                speed += f"; as {kind} {dense['prefill_tokens_per_second']:.1f} prefill, "
                speed += f"{dense['decode_tokens_per_second']:.1f} decode"
        facts.append(("tokens per s", speed))
    text = "\n".join([result["model"], *_facts(facts)])
    if "tasks" in result:
        recovery = result.get("recovery")
        text += "\n\n" + table(task_rows(result["tasks"], recovery), header=task_header(recovery))
    if "verdict" in result:
        text += "\n\n" + verdict_text(result)
    return text


def task_header(recovery: dict[str, Any] | None) -> list[str]:
    """The columns of `task_rows`."""
    beside = [] if recovery is None else ["uncompressed", "recovery", "lost", "won"]
    return ["task", "metric", "value", *beside, "samples", "examples"]


def verdict_text(result: dict[str, Any]) -> str:
    """Pass or fail against each limit, and what else was compared with the reference, in lines."""
    floor, writing, verdict = result["noise_floor"], result["writing"], result["verdict"]
    lines = [f"verdict: {'pass' if verdict['passed'] else 'FAIL'}"]
    lines += _indented(table(limit_rows(verdict))) if verdict["limits"] else []
    if verdict["worst"]:
        worst = ", ".join(f"{row['name']} {row['error']:.3f}" for row in verdict["worst"])
        lines.append(f"  largest errors of single matrices: {worst}")
    if floor is not None:
        lines.append(f"  noise floor: KL {floor['kl_per_token']:.6f}, the reference in {floor['dtype']} against itself")
    if writing is not None:
        lines.append(
            f"  writing: {writing['prompts']} texts, {100 * writing['identical']:.0f}% identical; they part at token "
            f"{writing['parts_at']:g}; repeated {100 * writing['model']['repetition']:.0f}% (reference "
            f"{100 * writing['reference']['repetition']:.0f}%)"
        )
    return "\n".join(lines)


def limit_rows(verdict: dict[str, Any]) -> list[list[str]]:
    """A row for each limit: what it is of, the value, the bound, and whether it passed."""
    return [
        [
            f"{row['limit']}, {row['of']}",
            f"{row['value']:.4g}",
            f"{row['bound']:g}",
            "pass" if row["passed"] else "FAIL",
        ]
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


def export_summary(result: dict[str, Any]) -> str:
    """What `edkm export` prints."""
    same = "equal to the source"
    if result["rounded"]:
        same += f", but {result['rounded']} rounded; largest difference {result['largest_difference']:.3g}"
    facts = {
        "format": result["format"],
        "written": f"{result['output']}, {megabytes(result['weights_bytes'])}",
        "read back": f"{result['tensors']} tensors, {same}",
    }
    if measured := result.get("perplexity"):
        facts["perplexity"] = f"{measured['export']:.4f}, of the source {measured['source']:.4f}"
    facts["time"] = duration(result["seconds"])
    return "\n".join([*_facts(facts.items()), *(f"note: {note}" for note in result.get("notes", ()))])


def _adapter_facts(plan: dict[str, Any]) -> dict[str, str]:
    what = "adapter" if "adapted_layers" in plan else "tables"
    layers = plan.get("adapted_layers") or plan["trained_layers"]
    size = plan.get("adapter_bytes") or plan["trained_bytes"]
    return {
        what: f"{plan['trained_parameters']:,} parameters in {layers} layers, {megabytes(size)}",
        "training": f"{plan['steps']} steps, {plan['training_tokens']:,} tokens",
    }


def finetune_plan_summary(plan: dict[str, Any]) -> str:
    """What `edkm finetune --dry-run` prints."""
    return "\n".join([f"{plan['model']} -> {plan['output']}", "", *_facts(_adapter_facts(plan).items())])


def finetune_summary(report: dict[str, Any]) -> str:
    """What `edkm finetune` prints at its end."""
    title = f"{report['model']} -> {report['output']}"
    return _ended(title, report, _adapter_facts(report) | {"data": _data(report["data"])})


def merge_summary(report: dict[str, Any]) -> str:
    """What `edkm merge` prints at its end."""
    facts = {
        "weights": f"{megabytes(report['weights_bytes'])} (before: {megabytes(report['original_weights_bytes'])})",
        "merged": f"{report['adapted_layers']} layers with updates",
    }
    return _ended(f"{report['model']} + {report['adapter']} -> {report['output']}", report, facts)
