"""A causal language model in two parts: the decoder, which gives a state for each token, and what makes logits of states.

Logits are large: 200 MB for 1,024 tokens and 49,152 words, where the last hidden states are 2.4 MB. So losses and
comparisons take them some tokens at a time, and what is remembered of a model are its states, with one copy of its head.

The second part is the model's own forward with the decoder's place taken by given states, so caps and scales of logits
are whatever the family makes them. Where that does not give the model's logits again, the logits are the states.
"""

import os
import tempfile
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from edkm_cli.distributed import full
from edkm_cli.nn.hooks import LAST, evaluating, hooked

_PROBE_TOKENS = 8


class Parts:
    """The parts of `model`, a causal LM, perhaps with an adapter; `width` and `dtype` are those of a state.

    `frozen`: what follows the decoder is copied, with whole weights of its own. `whole`: the states are the logits, as
    training with sharded parameters asks for, which are gathered inside the model's forward only.
    """

    def __init__(self, model: Any, *, frozen: bool = False, whole: bool = False):
        self._model: Any = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft wraps the model
        self._decoder: Any = None
        self._shell: Any = None
        embedding = self._model.get_input_embeddings()
        holds = [n for n, part in self._model.named_children() if any(m is embedding for m in part.modules())]
        if holds and not whole:
            self._decoder, self._given = self._model.get_submodule(holds[0]), _Given()
            plain = {name: value for name, value in vars(self._decoder).items() if isinstance(value, (int, float))}
            self._given.__dict__.update(plain)  # some families' heads look for a scale there
            others = {name: _frozen(m) if frozen else m for name, m in self._model.named_children() if name != holds[0]}
            self._shell = _twin(self._model)
            self._shell.__dict__["_modules"] = {**others, holds[0]: self._given}
        self.dtype: torch.dtype = self._model.dtype
        self.width = self._probe()

    @torch.no_grad()
    def _probe(self) -> int:
        """The width of a state; of states that are the logits where the parts do not give the model's."""
        parameter = next(chain(self._model.parameters(), self._model.buffers()))  # packed weights are buffers
        ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64, device=parameter.device)
        if not parameter.is_meta:
            vocabulary = self._model.config.get_text_config().vocab_size
            ids += torch.arange(_PROBE_TOKENS, device=parameter.device) % vocabulary
        # The errors are those of a family that calls its decoder in another way.
        with evaluating(self._model), suppress(AttributeError, IndexError):
            seen, wanted = self._pass(input_ids=ids, use_cache=False)
            if seen:
                given, near = self.logits(seen[0]).float(), 1e-2 * wanted.float().abs().max()
                if parameter.is_meta or bool((given - wanted.float()).abs().max() <= near):
                    return seen[0].shape[-1]
        self._shell = None
        return self._model(input_ids=ids, use_cache=False).logits.shape[-1]

    def states(self, **inputs: Any) -> Tensor:
        """The states (batch, sequence, n) of a forward pass; differentiable."""
        return self._model(**inputs).logits if self._shell is None else self._pass(**inputs, logits_to_keep=LAST)[0][0]

    def _pass(self, **inputs: Any) -> tuple[list[Tensor], Tensor]:
        """What the decoder gave in a pass of the model, and its logits."""
        seen: list[Tensor] = []

        def take(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

        with hooked([self._decoder] if self._shell is not None else [], take, after=True):
            logits = self._model(**inputs).logits
        return seen, logits

    def logits(self, states: Tensor) -> Tensor:
        """The logits (batch, tokens, vocabulary) of states (batch, tokens, n), any of them; differentiable."""
        if self._shell is None:
            return states
        self._given.states = states
        ids = torch.zeros(states.shape[:2], dtype=torch.int64, device=states.device)
        return self._shell.forward(input_ids=ids, use_cache=False).logits

    def head_parameters(self) -> list[nn.Parameter]:
        """What trains in the second part: an adapter of the output embedding, perhaps."""
        return [] if self._shell is None else [p for p in self._shell.parameters() if p.requires_grad]

    def round_linears(self) -> None:
        """Keep the frozen second part's linears in bfloat16, to which autocast would round them at each call."""
        for module in () if self._shell is None else self._shell.modules():
            if type(module) is nn.Linear:
                module.weight = nn.Parameter(_copy(module.weight.detach().bfloat16()), requires_grad=False)

    def release(self) -> None:
        """Let go of the model; `logits` is left."""
        self._model = self._decoder = None


class _Given(nn.Module):
    """In the decoder's place: gives the states it was given."""

    states: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(last_hidden_state=self.states)


class _Output(BaseModelOutputWithPast):
    def __getattr__(self, name: str) -> None:
        return None  # whatever else a family's decoder may give


def _twin(module: nn.Module) -> Any:
    """A shallow copy, of the class that the module had before FSDP2 changed it."""
    kind = next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed"))
    made: Any = object.__new__(kind)
    made.__dict__.update(module.__dict__)
    return made


def _frozen(module: nn.Module) -> nn.Module:
    """A copy with whole weights of its own, however the module's are sharded."""
    made = _twin(module)
    whole = {name: _copy(full(parameter.detach())) for name, parameter in module.named_parameters(recurse=False)}
    kept = {name: nn.Parameter(value, requires_grad=False) for name, value in whole.items()}
    made.__dict__["_parameters"] = {**module._parameters, **kept}
    made.__dict__["_modules"] = {name: _frozen(child) for name, child in module.named_children()}
    return made.eval()


def _copy(tensor: Tensor) -> Tensor:
    """A copy: in host memory that of a file without a name, which takes memory only from when it is computed with."""
    if tensor.device.type == "cpu" and os.name != "nt":
        with suppress(OSError), tempfile.NamedTemporaryFile(prefix="edkm-head-") as file:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            file.flush()
            return torch.from_file(file.name, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
    return tensor.clone()
