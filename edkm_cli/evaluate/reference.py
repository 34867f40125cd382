"""What a model's predictions are compared with: those of the uncompressed model, computed beside it or remembered.

A run that compresses a model has no room for the uncompressed one beside it, so its predictions on the few windows that
are measured are remembered before it is changed. Logits are large (200 MB for 1,024 tokens and 49,152 words). Where they
are the output head's product with the last hidden states, as in the LLaMA family, those are kept instead (2.4 MB for 1,024
tokens of 576 numbers) with one copy of the head, and the product is done again: nothing is rounded. A model that does more
to its logits (caps or scales them) has its log-probabilities kept in float16, which changes a KL by less than 0.001.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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

    All processes of a sharded model make one alike. A disk that cannot be written to stops no measurement: `failure` says
    why.
    """

    def __init__(self, model: Any, directory: str | Path):
        self.failure: str | None = None
        self._directory = Path(directory)
        head = model.get_output_embeddings()
        self._head: dict[str, Tensor] = {}
        if isinstance(head, nn.Linear):
            self._head = {name: full(tensor.detach()) for name, tensor in head.named_parameters()}
            self._save(self._head, _HEAD)

    def see(self, ids: Tensor, states: Tensor, parts: Parts) -> None:
        """Keep the predictions of a window (1, context): its states (context, n), where the head makes logits of them."""
        if self._explains(states[-8:], parts):
            kept = {"hidden": states}
        else:
            lowest = torch.finfo(torch.float16).min
            chunks = (parts.logits(some[None])[0].float() for some in states.split(CHUNK_TOKENS))
            below = (chunk - chunk.amax(1, keepdim=True) for chunk in chunks)  # so that the likeliest one stays it
            kept = {"logits": torch.cat([chunk.clamp_min(lowest).half() for chunk in below])}
        self._save(kept, _file_of(ids))

    def _explains(self, states: Tensor, parts: Parts) -> bool:
        """Whether the logits are the head's product with the states and nothing more."""
        if not self._head or states.shape[1] != self._head["weight"].shape[1]:
            return False
        wanted = parts.logits(states[None])[0].float()
        error = (nn.functional.linear(states, **self._head).float() - wanted).abs().max()
        return bool(error <= (1e-4 if states.dtype == torch.float32 else 1e-2) * wanted.abs().max())

    def _save(self, tensors: dict[str, Tensor], name: str) -> None:
        if self.failure is None:
            try:
                save_tensors(self._directory / name, tensors)
            except OSError as error:
                self.failure = f"the uncompressed model's predictions could not be kept on disk ({error}); set TMPDIR"


class RememberedPredictions:
    """What a `Recorder` wrote, as a reference. The files are open from the start, so the directory may be removed; each is
    in memory only while it is computed with."""

    def __init__(self, directory: str | Path):
        with suppress(ImportError):  # Windows
            import resource

            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # there is one for each window
            most = min(hard, _MOST_FILES) if hard > 0 else _MOST_FILES
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        self._files = {path.name: path.open("rb") for path in Path(directory).glob("*.safetensors")}

    def __call__(self, ids: Tensor) -> Iterator[Tensor]:
        """The logits of a window that was seen; KeyError for another."""
        kept = self._tensors(_file_of(ids))
        if "hidden" not in kept:
            yield from kept["logits"].split(CHUNK_TOKENS)
            return
        head = {name: tensor.to(ids.device) for name, tensor in self._tensors(_HEAD).items()}
        for hidden in kept["hidden"].split(CHUNK_TOKENS):
            yield nn.functional.linear(hidden.to(ids.device), **head)

    def _tensors(self, name: str) -> dict[str, Tensor]:
        with safe_open(f"/dev/fd/{self._files[name].fileno()}", framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - not a mapping

    def knows_text(self, tokens: Tensor, context: int) -> bool:
        """Whether the first window of `context` tokens of a text (tokens,) was seen."""
        return _file_of(tokens[: min(context, tokens.numel())]) in self._files


_HEAD, _MOST_FILES = "head.safetensors", 10240  # what macOS allows, too


def _file_of(ids: Tensor) -> str:
    """The name of a window's file, by its tokens."""
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest() + ".safetensors"
