"""Schedules of a training: temperatures, from soft to hard attention, so that little is lost when weights snap at export,
and learning rates."""

import math

from edkm_cli.errors import UserError

SCHEDULES = ("constant", "linear", "cosine", "exponential")


def temperature_at(step: int, steps: int, *, schedule: str, start: float, end: float) -> float:
    """The relative temperature of optimizer step `step` (0 to steps - 1).

    All schedules but `constant` run from `start` at the first step to `end` at the last one. Raises UserError for an
    unknown schedule or a temperature that is not positive.

    >>> [round(temperature_at(step, 3, schedule="exponential", start=0.02, end=0.0002), 6) for step in range(3)]
    [0.02, 0.002, 0.0002]
    """
    if schedule not in SCHEDULES:
        raise UserError(f"temperature schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if not (start > 0 and end > 0):
        raise UserError(f"temperatures must be positive, got start {start} and end {end}")
    progress = min(max(step / (steps - 1), 0.0), 1.0) if steps > 1 else 0.0
    if schedule == "linear":
        return start + (end - start) * progress
    if schedule == "cosine":
        return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return start * (end / start) ** progress if schedule == "exponential" else start


def learning_rate_factor(step: int, steps: int, warmup: float, *, last: float = 0.001) -> float:
    """Linear warm-up over the first `warmup` of the steps, then a cosine to the share `last` of the peak.

    >>> [round(learning_rate_factor(step, 100, warmup=0.1), 3) for step in (0, 9, 55, 99)]
    [0.1, 1.0, 0.5, 0.001]
    """
    warm = max(1, round(warmup * steps))
    if step < warm:
        return (step + 1) / warm
    progress = (step - warm) / max(1, steps - warm)
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * progress))
