"""What a model's predictions are compared with: those of the uncompressed model, computed beside it or remembered.

A run that compresses a model has no room for the uncompressed one beside it, so its predictions on the few windows that
are measured are remembered before it is changed. Logits are large (200 MB for 1,024 tokens and 49,152 words). Where they
are the output head's product with the last hidden states, as in the LLaMA family, those are kept instead (2.4 MB for 1,024
tokens of 576 numbers) with one copy of the head, and the product is done again: nothing is rounded. A model that does more
to its logits (caps or scales them) has its log-probabilities kept in float16, which changes a KL by less than 0.001.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from edkm_cli.distributed import full
from edkm_cli.errors import UserError
from edkm_cli.model_files import save_tensors
from edkm_cli.nn.parts import Parts

CHUNK_TOKENS = 64  # temporaries of a comparison then take less memory than the loss before it

Reference = Callable[[Tensor], Iterable[Tensor]]
"""Token ids of a window (1, context) -> its logits or log-probabilities, (CHUNK_TOKENS, vocabulary) at a time."""


def other_vocabulary(ours: int, theirs: int) -> UserError:
    """The error for a reference with so many tokens, where the model has `ours`."""
    rule = f"--reference must have the model's vocabulary, {ours} tokens, got {theirs}"
    return UserError(f"{rule}; give the model that was compressed")


class Recorder:
    """Writes a model's predictions into `directory` while it is measured: `see` is given to `perplexity` as `seen`.

    All processes of a sharded model make one alike. A full disk stops no measurement: `failure` says why.
    """

    def __init__(self, model: Any, directory: str | Path):
        self.failure: str | None = None
        self._directory = Path(directory)
        head = model.get_output_embeddings()
        self._head: dict[str, Tensor] = {}
        if isinstance(head, nn.Linear):
            self._head = {name: full(tensor.detach()) for name, tensor in head.named_parameters()}
            self._save(lambda: save_tensors(self._directory / _HEAD, self._head))

    def see(self, ids: Tensor, states: Tensor, parts: Parts) -> None:
        """Keep the predictions of a window (1, context): its states (context, n), where the head makes logits of them."""
        if self._explains(states[-8:], parts):
            kind, kept = _HIDDEN, states
        else:
            lowest = torch.finfo(torch.float16).min
            chunks = (parts.logits(some[None])[0].float() for some in states.split(CHUNK_TOKENS))
            below = (chunk - chunk.amax(1, keepdim=True) for chunk in chunks)  # so that the likeliest one stays it
            kind, kept = "logits", torch.cat([chunk.clamp_min(lowest).half() for chunk in below])
        self._save(lambda: self._add(ids, kind, kept))

    def _add(self, ids: Tensor, kind: str, kept: Tensor) -> None:
        about = [_digest_of(ids), kind, str(kept.dtype).removeprefix("torch."), *kept.shape]
        with open(self._directory / _WINDOWS, "ab") as file:
            file.write(json.dumps(about).encode() + b"\n")
            file.write(kept.cpu().contiguous().view(torch.uint8).numpy().data)

    def _explains(self, states: Tensor, parts: Parts) -> bool:
        """Whether the logits are the head's product with the states and nothing more."""
        if "weight" not in self._head or states.shape[1] != self._head["weight"].shape[1]:
            return False
        wanted = parts.logits(states[None])[0].float()
        error = (nn.functional.linear(states, **self._head).float() - wanted).abs().max()
        return bool(error <= (1e-4 if states.dtype == torch.float32 else 1e-2) * wanted.abs().max())

    def _save(self, write: Callable[[], object]) -> None:
        if self.failure is None:
            try:
                write()
            except OSError as error:
                self.failure = f"the uncompressed model's predictions could not be kept on disk ({error}); set TMPDIR"


class RememberedPredictions:
    """What a `Recorder` wrote, as a reference. Its two files are open from the start, so the directory may be removed; a
    window is in memory only while it is computed with."""

    def __init__(self, directory: str | Path):
        self._files = {path.name: path.open("rb") for path in Path(directory).glob("predictions.*")}
        self._places: dict[str, tuple[int, str, torch.dtype, list[int]]] = {}
        windows = self._files.get(_WINDOWS)
        while windows and (line := windows.readline()):
            digest, kind, dtype, *shape = json.loads(line)
            self._places[digest] = windows.tell(), kind, getattr(torch, dtype), shape
            windows.seek(getattr(torch, dtype).itemsize * math.prod(shape), 1)

    def __call__(self, ids: Tensor) -> Iterator[Tensor]:
        """The logits of a window that was seen; KeyError for another."""
        start, kind, dtype, shape = self._places[_digest_of(ids)]
        kept = torch.empty(shape, dtype=dtype)
        self._files[_WINDOWS].seek(start)
        self._files[_WINDOWS].readinto(kept.view(torch.uint8).numpy().data)
        if kind != _HIDDEN:
            yield from kept.split(CHUNK_TOKENS)
            return
        with safe_open(f"/dev/fd/{self._files[_HEAD].fileno()}", framework="pt") as opened:
            head = {name: opened.get_tensor(name).to(ids.device) for name in opened.keys()}  # noqa: SIM118 - no mapping
        for hidden in kept.split(CHUNK_TOKENS):
            yield nn.functional.linear(hidden.to(ids.device), **head)

    def knows_text(self, tokens: Tensor, context: int) -> bool:
        """Whether the first window of `context` tokens of a text (tokens,) was seen."""
        return _digest_of(tokens[: min(context, tokens.numel())]) in self._places


# Of all windows, each a line of JSON (a digest of its tokens, what is kept, its format and shape), and the numbers.
_HEAD, _WINDOWS, _HIDDEN = "predictions.safetensors", "predictions.windows", "hidden"


def _digest_of(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()
