"""What a result must fulfil before it takes its place: to be the model that was trained, and as good as was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError

# How far the exported model's perplexity may be from that of the model it was made of: both multiply the same weights,
# but kernels for packed weights may add in another order.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 2e-2, "float16": 1e-2}


def require_same_perplexity(text: Mapping[str, Any], dtype: str) -> None:
    """Raises UserError where the exported model is another than the one that was trained (or started from).

    `text` is a row of the report's `texts`."""
    before = "start" if text["trained"] is None else "trained"
    expected, found = text[before], text["exported"]
    if expected is None or found is None:
        return
    if abs(found - expected) > _TOLERANCE[dtype] * expected:
        raise UserError(
            f"the exported model must have the perplexity of the {before} one, but {before} is {expected:.4f} and exported "
            f"{found:.4f}: the files do not hold the model; nothing was put in place, please report it with the model's name"
        )


def require_ratio(text: Mapping[str, Any], limit: float, staging: Path) -> None:
    """Raises UserError where the exported perplexity on a text is more than `limit` times the original's."""
    original, exported = text["original"], text["exported"]
    if limit and original is not None and exported is not None and exported > limit * original:
        raise UserError(
            f"the exported perplexity must be at most --max-perplexity-ratio {limit:g} times the original's, but is "
            f"{exported:.4f} to {original:.4f} on {text['data']}, {exported / original:.2f} times; the result is in "
            f"{staging}: train longer, use more bits, or allow more"
        )
