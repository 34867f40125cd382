"""The texts that a run measures at each of its stages: perplexities, and the distance from the uncompressed model."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from edkm_cli.distributed import ALONE, World
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.evaluate.reference import Recorder, RememberedPredictions
from edkm_cli.progress import Track, no_progress

ORIGINAL, DENSE = "original", "dense"
STAGES = (ORIGINAL, "start", "trained", "exported")
DISTANCES = ("kl_per_token", "top1_agreement")


@dataclass
class Measurements:
    """What is found of each text (tokens,) at each stage: `by_stage`, stage -> name -> figures, as JSON. The first text is
    the one that decides what is best."""

    texts: dict[str, Tensor]
    context: int
    max_windows: int
    track: Track = no_progress
    stages: Sequence[str] = STAGES
    by_stage: dict[str, dict[str, dict[str, float | None]]] = field(default_factory=dict, init=False)
    _reference: RememberedPredictions | None = field(default=None, init=False)
    _why_not: str | None = field(default=None, init=False)

    def measure_original(self, model: Any, world: World = ALONE) -> str | None:
        """Measure the uncompressed model and remember its predictions, with which those of later stages are compared.

        Returns why they could not be remembered, if so: later stages then have perplexities only.
        """
        # Open files outlive their directory: nothing is left on the disk then (NFS keeps their names for a while).
        with tempfile.TemporaryDirectory(prefix="edkm-predictions-", ignore_cleanup_errors=True) as folder:
            recorder = Recorder(model, folder)
            self.by_stage[ORIGINAL] = self._figures(model, ORIGINAL, world, seen=recorder.see)
            if world.any(recorder.failure is not None):
                self._why_not = recorder.failure or "another process could not keep the original's predictions"
            else:
                self._reference = RememberedPredictions(folder)
        return self._why_not

    def measure(self, stage: str, model: Any, world: World = ALONE, *, compare: bool = True) -> None:
        """Measure a later stage. Without `compare` its distance from the uncompressed model is not."""
        self.by_stage[stage] = self._figures(model, stage, world, reference=self._reference if compare else None)

    def first_windows(self, model: Any, world: World = ALONE) -> list[float | None]:
        """The perplexity of each text's first window: enough to see whether two models are the same."""
        options: dict[str, Any] = {"context": self.context, "max_windows": 1, "world": world}
        return [perplexity(model, tokens, **options).perplexity for tokens in self.texts.values()]

    def on_the_way(self, model: Any, world: World = ALONE) -> dict[str, dict[str, float | None]]:
        """In the middle of training: figure -> text -> value, without those that are not measured."""
        by_text = self._figures(model, None, world, reference=self._reference)
        names = ("perplexity", *(DISTANCES if self._reference is not None else ()))
        return {name: {text: figures[name] for text, figures in by_text.items()} for name in names}

    def _figures(self, model: Any, stage: str | None, world: World, **how: Any) -> dict[str, dict[str, float | None]]:
        by_text = {}
        window = {"context": self.context, "max_windows": self.max_windows, "world": world, **how}
        for text, tokens in self.texts.items():
            about = f" of {text}" if len(self.texts) > 1 else ""
            shown: Any = {"track": self.track if stage else no_progress, "description": f"perplexity{about}, {stage}"}
            measured = perplexity(model, tokens, **window, **shown)
            by_text[text] = {name: getattr(measured, name) for name in ("perplexity", *DISTANCES)}
        return by_text

    @property
    def perplexity(self) -> dict[str, float | None]:
        """Stage -> perplexity of the first text; None for what is not measured."""
        return {stage: self._of(stage, next(iter(self.texts)), "perplexity") for stage in self.stages}

    def _of(self, stage: str, text: str, figure: str) -> float | None:
        return self.by_stage.get(stage, {}).get(text, {}).get(figure)

    def rows(self) -> list[dict[str, Any]]:
        """A row of the report for each text: its perplexities by stage, and the distances of the last stage that was
        compared; those of all stages are in `stages`. Where the uncompressed model was trained equally, its perplexity is
        `dense`, and `exported_over_dense` what compression costs."""
        rows = []
        for text, count in ((text, tokens.numel()) for text, tokens in self.texts.items()):
            width = min(self.context, count)
            windows = min(self.max_windows, count // width)
            row: dict[str, Any] = {"data": text, "context": width, "windows": windows, "tokens": count}
            row |= {stage: self._of(stage, text, "perplexity") for stage in self.stages}
            rows.append(row)
            if ORIGINAL not in self.stages:  # nothing to be compared with
                continue
            dense = self._of(DENSE, text, "perplexity")
            row |= {} if dense is None else {"dense": dense}
            if dense is not None and row.get("exported") is not None:
                row["exported_over_dense"] = row["exported"] / dense
            later = [stage for stage in self.stages[1:] if stage in self.by_stage]
            shown = [*later, DENSE] if dense is not None else later
            stages = {stage: {name: self._of(stage, text, name) for name in DISTANCES} for stage in shown}
            compared = [stages[stage] for stage in later if stages[stage]["kl_per_token"] is not None]
            row |= (compared[-1] if compared else dict.fromkeys(DISTANCES)) | {"stages": stages}
            row |= {"not_compared": self._why_not} if self._why_not else {}
        return rows
