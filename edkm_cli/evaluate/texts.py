"""The texts that a run measures at each of its stages: perplexities, and the distance from the uncompressed model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edkm_cli.distributed import ALONE, World
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.evaluate.reference import Recorder, Reference, RememberedPredictions
from edkm_cli.progress import Track, no_progress

ORIGINAL, DENSE = "original", "dense"
STAGES = (ORIGINAL, "start", "trained", "exported")
DISTANCES = ("kl_per_token", "top1_agreement")


@dataclass(frozen=True)
class MeasuredText:
    """A text that is measured: its name in the report, and its token ids (tokens,) int64."""

    name: str
    tokens: Tensor

    def facts(self, *, context: int, max_windows: int) -> dict[str, Any]:
        """How much of it is measured, as reports have it."""
        width = min(context, self.tokens.numel())
        windows = min(max_windows, self.tokens.numel() // width)
        return {"data": self.name, "context": width, "windows": windows, "tokens": self.tokens.numel()}


class Measurements:
    """What is found of each text at each stage. The first text is the one that decides what is best."""

    def __init__(
        self,
        texts: Sequence[MeasuredText],
        *,
        context: int,
        max_windows: int,
        track: Track = no_progress,
        stages: Sequence[str] = STAGES,
    ):
        self.texts, self._stages = list(texts), stages
        self._context, self._max_windows, self._track = context, max_windows, track
        self._reference: RememberedPredictions | None = None
        self._why_not: str | None = None
        # stage -> text -> figures
        self._measured: dict[str, dict[str, dict[str, float | None]]] = {}

    def measure_original(self, model: Any, world: World = ALONE) -> str | None:
        """Measure the uncompressed model and remember its predictions, with which those of later stages are compared.

        Returns why they could not be remembered, if so: later stages then have perplexities only.
        """
        # Open files outlive their directory: nothing is left on the disk when the process ends, however it ends.
        with tempfile.TemporaryDirectory(prefix="edkm-predictions-") as folder:
            recorder = Recorder(model, folder)
            self._measured[ORIGINAL] = self._figures(model, ORIGINAL, world, recorder=recorder)
            if world.any(recorder.failure is not None):
                self._why_not = (
                    recorder.failure or "another process could not keep the uncompressed model's predictions"
                )
            else:
                self._reference = RememberedPredictions(folder)
        return self._why_not

    def measure(self, stage: str, model: Any, world: World = ALONE, *, compare: bool = True) -> None:
        """Measure a later stage. Without `compare` its distance from the uncompressed model is not."""
        self._measured[stage] = self._figures(model, stage, world, reference=self._reference if compare else None)

    def first_windows(self, model: Any, world: World = ALONE) -> list[float | None]:
        """The perplexity of each text's first window: enough to see whether two models are the same."""
        options: dict[str, Any] = {"context": self._context, "max_windows": 1, "world": world}
        return [perplexity(model, text.tokens, **options).perplexity for text in self.texts]

    def take(self, stage: str, of: str) -> None:
        """A stage has the figures of another, whose model is the same."""
        self._measured[stage] = self._measured[of]

    def on_the_way(self, model: Any, world: World = ALONE) -> dict[str, dict[str, float | None]]:
        """In the middle of training: figure -> text -> value, without those that are not measured."""
        by_text = self._figures(model, None, world, reference=self._reference)
        names = ("perplexity", *(DISTANCES if self._reference is not None else ()))
        return {name: {text: figures[name] for text, figures in by_text.items()} for name in names}

    def _figures(
        self,
        model: Any,
        stage: str | None,
        world: World,
        *,
        reference: Reference | None = None,
        recorder: Recorder | None = None,
    ) -> dict[str, dict[str, float | None]]:
        by_text = {}
        for text in self.texts:
            about = f" of {text.name}" if len(self.texts) > 1 else ""
            window: dict[str, Any] = {"context": self._context, "max_windows": self._max_windows, "world": world}
            window |= {"seen": recorder.see} if recorder is not None else {}
            shown: Any = {"track": self._track if stage else no_progress, "description": f"perplexity{about}, {stage}"}
            measured = perplexity(model, text.tokens, reference=reference, **window, **shown)
            by_text[text.name] = {name: getattr(measured, name) for name in ("perplexity", *DISTANCES)}
        return by_text

    @property
    def perplexity(self) -> dict[str, float | None]:
        """Stage -> perplexity of the first text; None for what is not measured."""
        return {stage: self._of(stage, self.texts[0].name, "perplexity") for stage in self._stages}

    def _of(self, stage: str, text: str, figure: str) -> float | None:
        return self._measured.get(stage, {}).get(text, {}).get(figure)

    def rows(self) -> list[dict[str, Any]]:
        """A row of the report for each text: its perplexities by stage, and the distances of the last stage that was
        compared; those of all stages are in `stages`. Where the uncompressed model was trained equally, its perplexity is
        `dense`, and `exported_over_dense` what compression costs."""
        rows = []
        for text in self.texts:
            row = text.facts(context=self._context, max_windows=self._max_windows)
            row |= {stage: self._of(stage, text.name, "perplexity") for stage in self._stages}
            rows.append(row)
            if ORIGINAL not in self._stages:  # nothing to be compared with
                continue
            dense = self._of(DENSE, text.name, "perplexity")
            row |= {} if dense is None else {"dense": dense}
            if dense is not None and row.get("exported") is not None:
                row["exported_over_dense"] = row["exported"] / dense
            later = [stage for stage in self._stages[1:] if stage in self._measured]
            stages = {stage: {name: self._of(stage, text.name, name) for name in DISTANCES} for stage in later}
            compared = [figures for figures in stages.values() if figures["kl_per_token"] is not None]
            row |= compared[-1] if compared else dict.fromkeys(DISTANCES)
            if dense is not None:
                stages[DENSE] = {name: self._of(DENSE, text.name, name) for name in DISTANCES}
            row["stages"] = stages
            row |= {"not_compared": self._why_not} if self._why_not else {}
        return rows

    def state(self) -> dict[str, Any]:
        """What has been found so far, as JSON."""
        return self._measured

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up what an interrupted run had found."""
        self._measured.update(state)
