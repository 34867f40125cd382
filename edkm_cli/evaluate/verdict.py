"""What `edkm eval --reference` measures of the uncompressed model first, and then of the model beside it.

Only one of the two is in memory at a time: of the reference remain its predictions and layer outputs, in files, its texts
and its answers. Its noise floor, what the number format alone costs, is measured at its end, where there is room: it is
cast to the other format and compared with what it predicted before.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from edkm_cli.config import known_positions
from edkm_cli.environment import physical_bytes
from edkm_cli.errors import UserError
from edkm_cli.evaluate import tasks, writing
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.evaluate.layers import TOKENS, compare_layers, record_layers
from edkm_cli.evaluate.perplexity import Perplexity, by_position, distribution, perplexity
from edkm_cli.evaluate.reference import Recorder, RememberedPredictions
from edkm_cli.model_files import stays_wide
from edkm_cli.nn.swap import dequantize_model, is_packed
from edkm_cli.progress import Track, no_progress

Pass = tuple[str, Tensor, int, int | None]
"""Description, tokens, context and most windows of a measurement."""
_FLOOR_WINDOWS = 2
_FULL_CONTEXT = 8192  # a longer one is measured where it is asked for: attention costs its square


@dataclass
class Study:
    """The texts and how much of them is measured; after `see_reference` also what is left of the reference.

    `tokens` are those of each of the settings' texts, `benchmarks` the loaded tasks.
    """

    settings: EvalConfig
    tokens: list[Tensor]
    tokenizer: Any
    directory: Path
    benchmarks: dict[str, Any]
    track: Track = no_progress
    _predictions: RememberedPredictions | None = field(default=None, init=False)
    _longest: list[Pass] = field(default_factory=list, init=False)

    def see_reference(self, model: Any) -> None:
        """Measure the uncompressed model. Raises UserError where the disk has no room for what is kept of it."""
        self._asked = writing.prompts(self.settings.prompts, self.tokenizer)  # before the work: a template may refuse
        recorder, self._longest = Recorder(model, self.directory), self._longest_window(model)

        def see(*window: Any) -> None:
            recorder.see(*window)
            if recorder.failure:
                raise UserError(recorder.failure)

        self._measure(model, [*self._texts_passes, *self._longest], "reference: ", seen=see)
        (self.directory / "layers").mkdir()
        self._knows_layers = True
        try:
            record_layers(model, self._sample, self.directory / "layers")
        except UserError:
            self._knows_layers = False
        except (OSError, SafetensorError) as error:
            rule = f"outputs of the reference's layers could not be kept on disk ({error}); set TMPDIR"
            raise UserError(rule) from error
        self._predictions = RememberedPredictions(self.directory)
        self._texts = writing.write(model, self._asked, track=self.track) if self._asked else []
        self._answers = self._run_tasks(model)
        self._floor = self._noise_floor(model)

    def see_model(self, model: Any) -> tuple[list[Perplexity], dict[str, Any]]:
        """The figures of each text, and the keys of the result that compare the model with the reference."""
        measured = self._measure(model, self._texts_passes)
        if self._predictions is None:
            return measured, {}
        longest = (self._measure(model, self._longest) or measured)[0]
        assert longest.predictions is not None
        nothing: dict[str, Any] = {"layers": [], "matrices": []}
        rows = compare_layers(model, self._sample, self.directory / "layers") if self._knows_layers else nothing
        compared = None
        if self._asked:
            texts = writing.write(model, self._asked, track=self.track)
            compared = writing.compare_writing(self._asked, texts, self._texts, self.tokenizer, model)
        positions = {"context": longest.context, "rows": by_position(longest.predictions)}
        return measured, {"noise_floor": self._floor, **rows, "positions": positions, "writing": compared}

    def see_tasks(self, model: Any) -> dict[str, Any]:
        """The keys that tasks add. What is packed of the model is decoded."""
        results, scores = self._run_tasks(model)
        recovery = {} if self._predictions is None else {"recovery": tasks.compared(results, scores, *self._answers)}
        return {"tasks": results, **recovery}

    def _run_tasks(self, model: Any) -> Any:
        if not self.benchmarks:
            return None
        if is_packed(model):  # once, not in each of many thousand short passes
            dequantize_model(model, model.dtype)
        limit, batch_size = self.settings.limit, self.settings.batch_size
        return tasks.run_tasks(model, self.tokenizer, self.benchmarks, limit=limit, batch_size=batch_size)

    @property
    def _sample(self) -> Tensor:
        """The tokens that layers are compared on, (1, tokens)."""
        return self.tokens[0][: min(TOKENS, self.settings.context)][None]

    def _measure(self, model: Any, passes: list[Pass], prefix: str = "", **how: Any) -> list[Perplexity]:
        how |= {"reference": self._predictions, "track": self.track}
        return [
            perplexity(model, ids, context=context, max_windows=most, description=prefix + description, **how)
            for description, ids, context, most in passes
        ]

    @property
    def _texts_passes(self) -> list[Pass]:
        context, most = self.settings.context, self.settings.max_windows
        texts = zip(self.settings.texts, self.tokens, strict=True)
        return [(f"perplexity of {name}", ids, context, most) for name, ids in texts]

    def _longest_window(self, model: Any) -> list[Pass]:
        """A window of the model's full context, where that is longer than those of the texts."""
        full = self.settings.positions or min(known_positions(model.config) or self.settings.context, _FULL_CONTEXT)
        if not self.settings.positions and min(full, len(self.tokens[0])) <= self.settings.context:
            return []
        return [("positions", self.tokens[0], full, 1)]

    def _noise_floor(self, model: Any) -> dict[str, Any] | None:
        """The distance of the reference in the other number format from itself; None of one that is packed, or that has no
        room in that format. Casts it."""
        if is_packed(model) or model.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return None
        other = torch.bfloat16 if model.dtype == torch.float32 else torch.float32
        room = physical_bytes() if model.device.type == "cpu" else torch.cuda.mem_get_info(model.device)[1]
        if 1.1 * sum(weight.numel() for weight in model.parameters()) * other.itemsize > room:
            return None
        for name, weight in model.named_parameters():  # not what is computed, as rotary frequencies are
            weight.data = weight.data if stays_wide(model, name, other) else weight.data.to(other)
        most = min(self.settings.max_windows or _FLOOR_WINDOWS, _FLOOR_WINDOWS)
        (floor,) = self._measure(model, [("noise floor", self.tokens[0], self.settings.context, most)])
        figures = {"kl_per_token": floor.kl_per_token, "top1_agreement": floor.top1_agreement}
        return {"dtype": str(other).removeprefix("torch."), "windows": floor.windows, **figures}


def text_row(name: str, measured: Perplexity) -> dict[str, Any]:
    """A row of `texts` in the result of `edkm eval`."""
    row = {"data": name} | {key: getattr(measured, key) for key in ("context", "windows", "tokens", "perplexity")}
    if measured.predictions is None:
        return row
    row |= {"kl_per_token": measured.kl_per_token, "top1_agreement": measured.top1_agreement}
    return row | distribution(measured.predictions)
