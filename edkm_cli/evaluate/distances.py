"""How far a model's predictions are from a reference's, beyond the mean: a mean hides that a few tokens went all wrong.

Perplexity and mean KL can stay while single answers fail (arXiv 2407.09141), so there are the upper percentiles, the KL by
how sure the reference was (an error where it was sure changes text, one where it was not hardly does), and figures along
the window, which show a model that fails far from its beginning.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

CONFIDENCE = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99, 1.0)
_POSITIONS = 16  # stretches of a window


def distribution(predictions: Tensor) -> dict[str, Any]:
    """What `edkm eval --reference` says of a text beside the means.

    Args:
        predictions: (windows, context - 1, 5), as `Perplexity.predictions`.

    Returns:
        `reference_perplexity`; `kl`: `median`, `p90`, `p99` and `largest`, in nats; `by_confidence`: for stretches (`from`,
        `to`] of the reference's highest probability the `share` of predictions, their mean `kl` and their `agreement`, None
        where there are none.
    """
    _, kl, same, theirs, confidence = predictions.flatten(0, 1).double().numpy().T
    median, p90, p99, largest = (float(value) for value in np.percentile(kl, (50, 90, 99, 100)))
    rows = []
    for low, high in pairwise(CONFIDENCE):
        inside = (confidence > low) & (confidence <= high if high < 1 else True)
        means = (float(kl[inside].mean()), float(same[inside].mean())) if inside.any() else (None, None)
        share = float(inside.mean())
        rows.append({"from": low, "to": high, "share": share, "kl": means[0], "agreement": means[1]})
    return {
        "reference_perplexity": _perplexity(theirs),
        "kl": {"median": median, "p90": p90, "p99": p99, "largest": largest},
        "by_confidence": rows,
    }


def by_position(predictions: Tensor) -> list[dict[str, Any]]:
    """Figures of stretches of equal length along the windows: `from`, `to` (tokens before the predicted one),
    `perplexity`, `reference_perplexity`, `kl`. `predictions` as in `distribution`."""
    rows, first = [], 1
    for part in predictions.double().tensor_split(min(_POSITIONS, predictions.shape[1]), dim=1):
        loss, kl, _, theirs, _ = part.flatten(0, 1).numpy().T
        rows.append(
            {
                "from": first,
                "to": first + part.shape[1] - 1,
                "perplexity": _perplexity(loss),
                "reference_perplexity": _perplexity(theirs),
                "kl": float(kl.mean()),
            }
        )
        first += part.shape[1]
    return rows


def _perplexity(losses: np.ndarray) -> float:
    return float(np.exp(min(losses.mean(), 700.0)))
