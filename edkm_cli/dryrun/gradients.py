"""The gradients of a rehearsed training step, as one process of several holds them, and what teaches it."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.data import Batch
from edkm_cli.dryrun.ledger import STANDS_FOR, Ledger, stands_for
from edkm_cli.dryrun.meta import GRADIENTS, META, SHARDING
from edkm_cli.nn.decoder import decoder_layers
from edkm_cli.nn.parts import Parts
from edkm_cli.preflight import Launch

# FSDP2 holds of a layer's gradients the buffer that is reduced, beside the one of the layer before.
_REDUCED_LAYERS = 2


def size_bytes(tensors: Any) -> int:
    """Bytes of some tensors, each counted, and those that it stands for."""
    return sum(tensor.numel() * tensor.element_size() * stands_for(tensor) for tensor in tensors)


def layer_bytes(model: Any) -> int:
    """The parameters of the largest decoder layer."""
    return max(size_bytes(block.parameters()) for block in decoder_layers(model).values())


def rounded_bytes(model: Any, *, alone: bool) -> int:
    """What linears in bfloat16 take more (`bfloat16_linears`), of layers `alone` instead of their float32 weights."""
    head = model.get_output_embeddings()
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    weights = [(linear.weight, -2 if alone and linear is not head else 2) for linear in linears]
    return sum(more * weight.numel() * stands_for(weight) for weight, more in weights)


class Gradients:
    """The gradients of training as one process holds them: alone, in data parallelism's buckets, or reduced to shards."""

    def __init__(self, model: Any, trained: list[nn.Parameter], ledger: Ledger, launch: Launch):
        self._trained, self._ledger, self._launch = trained, ledger, launch
        self._buckets = launch.processes > 1 and not launch.sharded
        self._layers = self._by_layer(model) if launch.sharded else {}
        self._exits = ExitStack()

    def _by_layer(self, model: Any) -> dict[int, list[nn.Parameter]]:
        """Parameter id -> the trained parameters of its decoder layer."""
        found: dict[int, list[nn.Parameter]] = {}
        for block in decoder_layers(model).values():
            own = [parameter for parameter in block.parameters() if parameter.requires_grad]
            found.update((id(parameter), own) for parameter in own)
        return found

    def __enter__(self) -> Gradients:
        if self._buckets:  # they are there from the beginning to the end, and gradients are views of them
            self._exits.enter_context(self._ledger.more(size_bytes(self._trained), GRADIENTS))
        for parameter in self._trained:
            handle = parameter.register_post_accumulate_grad_hook(self._arrived)
            self._exits.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def make(self) -> None:
        """Gradients as an earlier micro-batch leaves them."""
        for parameter in self._trained:
            parameter.grad = torch.empty_like(parameter)
            setattr(parameter.grad, STANDS_FOR, stands_for(parameter))
            self._ledger.move([parameter.grad], GRADIENTS, share=0.0 if self._buckets else self._launch.share)

    def restore(self) -> None:
        """Before the optimizer: what went into buckets is seen again as gradients."""
        if self._buckets:
            self.make()

    def _arrived(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self._buckets:
            parameter.grad = None
            return
        setattr(parameter.grad, STANDS_FOR, stands_for(parameter))
        self._ledger.move([parameter.grad], GRADIENTS)
        layer = self._layers.get(id(parameter), [])
        if layer and all(other.grad is not None for other in layer):
            gradients = [other.grad for other in layer if other.grad is not None]
            with self._ledger.more(_REDUCED_LAYERS * size_bytes(gradients), SHARDING):
                pass
            self._ledger.move(gradients, GRADIENTS, share=self._launch.share)


class Taught:
    """A teacher whose states are read from the disk."""

    def __init__(self, parts: Parts):
        self._parts = parts

    def states(self, batch: Batch) -> Tensor:
        return torch.empty(*batch.ids.shape, self._parts.width, dtype=torch.float16, device=META)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        return self._parts.logits(states.to(self._parts.dtype))
