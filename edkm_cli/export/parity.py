"""The gate that every export must pass: read back by its own rules, it is the source, tensor by tensor.

An export that loads and is silently wrong is worse than none. A format's `read` knows nothing of its `write`, so a wrong
order of rows, tiles or bits, a lost bias or a damaged table shows as a tensor that differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from edkm_cli.errors import UserError
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed
from edkm_cli.progress import Track, no_progress


@dataclass(frozen=True)
class Parity:
    """What the comparison saw: `tensors` compared, those of them `rounded` as the format states, and the
    `largest_difference` of any number from the source's."""

    tensors: int
    rounded: int
    largest_difference: float


def require_parity(
    source: Compressed, folder: Path, form: Any, options: Options, *, track: Track = no_progress
) -> Parity:
    """Compare an export with its source. Raises UserError naming the first tensor that differs, lacks or is too many."""
    missing = dict(source.tensors)
    changed, largest = 0, 0.0
    for name, read_back in track(form.read(folder, options), "comparing with the source", len(missing)):
        if name not in missing:
            raise _drift(name, "is in the export and not in the source, or twice")
        del missing[name]
        wanted, exact = form.stated(source, name, options)
        if read_back.shape != wanted.shape:
            raise _drift(name, f"is {tuple(read_back.shape)} in the export, and {tuple(wanted.shape)} in the source")
        if not torch.equal(read_back, wanted):
            wrong = read_back != wanted
            place = tuple(int(index) for index in wrong.nonzero()[0])
            numbers = f"{float(read_back[place]):g} instead of {float(wanted[place]):g}"
            raise _drift(
                name,
                f"differs from the source in {int(wrong.sum())} of {wrong.numel()} numbers, first at {place}: {numbers}",
            )
        difference = float((read_back - exact).abs().max()) if read_back.numel() else 0.0
        changed, largest = changed + (difference > 0), max(largest, difference)
    if missing:
        raise _drift(next(iter(missing)), "is in the source, but not in the export")
    return Parity(len(source.tensors), changed, largest)


def _drift(name: str, what: str) -> UserError:
    return UserError(
        f"the export must read back as its source, but {name} {what}; nothing was put in place, please report it"
    )


# Both models multiply the same numbers; where the format rounds some, the perplexity may move in its third digit.
_EXACT, _ROUNDED = 1e-4, 1e-2


def require_same_perplexity(source: float, export: float, *, exact: bool) -> None:
    """Raises UserError where an export's perplexity is not its source's, to four digits if nothing was rounded."""
    limit = _EXACT if exact else _ROUNDED
    if not abs(export - source) <= limit * source:
        raise UserError(
            f"the export must have its source's perplexity within {limit:.2%}, but has {export:.5f} and the source "
            f"{source:.5f}; nothing was put in place, please report it"
        )
