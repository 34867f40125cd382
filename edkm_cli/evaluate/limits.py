"""What a result must fulfil before it takes its place: to be the model that was trained, and as good as was asked for."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.evaluate.config import EvalConfig

# How far the exported model's perplexity may be from that of the model it was made of: both multiply the same weights,
# but kernels for packed weights may add in another order.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 1e-2}


def require_same_perplexity(text: Mapping[str, Any], dtype: str) -> None:
    """Raises UserError where the exported model is another than the one that was trained (or started from).

    `text` is a row of the report's `texts`."""
    before = "start" if text["trained"] is None else "trained"
    expected, exported = text[before], text["exported"]
    if expected is not None and exported is not None and abs(exported - expected) > _TOLERANCE[dtype] * expected:
        rule = f"the exported model must have the perplexity of the {before} one"
        found = f"{before} is {expected:.4f} and exported {exported:.4f}: the files do not hold the model"
        raise UserError(f"{rule}, but {found}; nothing was put in place, please report it with the model's name")


def require_ratio(text: Mapping[str, Any], stages: tuple[str, str], limit: float, staging: Path, remedy: str) -> None:
    """Raises UserError where the later of two `stages` has more than `limit` times the perplexity of the earlier one."""
    base, value = (text[stage] for stage in stages)
    if limit and base is not None and value is not None and value > limit * base:
        rule = f"{stages[1]} perplexity must be at most --max-perplexity-ratio {limit:g} times the {stages[0]} one's"
        found = f"is {value:.4f} to {base:.4f} on {text['data']}, {value / base:.3g} times; the result is in {staging}"
        raise UserError(f"{rule}, but {found}: {remedy}")


def judge(result: Mapping[str, Any], limits: EvalConfig) -> dict[str, Any]:
    """The verdict on a result of `edkm eval`: `passed`, `limits` (each with its `limit`, what it is `of`, `value`, `bound`
    and `passed`), and `worst`: the matrices with the largest errors, the first three."""
    worst = sorted(result["matrices"], key=lambda row: -row["error"])[:3]
    values: list[tuple[str, str, float]] = []
    for text in result["texts"]:
        limited = ("max_kl", "min_agreement", "max_perplexity_ratio")
        figures = (text["kl_per_token"], text["top1_agreement"], text["perplexity"] / text["reference_perplexity"])
        values += [(limit, text["data"], value) for limit, value in zip(limited, figures, strict=True)]
    none = {"name": "no matrix could be compared (0 leaves this limit out)", "error": math.nan}
    values += [("max_matrix_error", row["name"], row["error"]) for row in worst[:1] or [none]]
    judged = []
    for limit, of, value in values:
        if bound := getattr(limits, limit):
            passed = value >= bound if limit == "min_agreement" else value <= bound
            row = {"limit": "--" + limit.replace("_", "-"), "of": of, "value": value, "bound": bound, "passed": passed}
            judged.append(row)
    return {"passed": all(row["passed"] for row in judged), "limits": judged, "worst": worst}


def require_passed(verdict: Mapping[str, Any]) -> None:
    """Raises UserError, naming the limits that were not kept and the worst matrix."""
    if verdict["passed"]:
        return
    failed = [
        f"{row['limit']} is {row['bound']:g}, but {row['of']}"
        + f" has {row['value']:.4g}" * (not math.isnan(row["value"]))
        for row in verdict["limits"]
        if not row["passed"]
    ]
    failed += [f"the largest error of a matrix is {row['error']:.3g}, of {row['name']}" for row in verdict["worst"][:1]]
    raise UserError(f"the verdict is fail: {'; '.join(failed)}")
