"""Runs calibration text through the decoder, one block at a time.

GPTQ and AWQ look at the inputs of one decoder block's linears, change the block, and go on to the next; the model
never runs as a whole. Only the inputs of the current block are kept, in float32: 300 kB for each 512-token sample at
width 576.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.errors import UserError
from edkm_cli.initialize.sharded import decoder_blocks
from edkm_cli.research.baselines.outcome import decoder_linears

_CHUNK_TOKENS = 4096
Visit = Callable[[tuple[Any, ...], dict[str, Any]], None]


class _Reached(Exception):
    """Raised by a hook to leave a forward pass."""


def _blocks(model: Any) -> dict[str, nn.Module]:
    """Module path -> decoder layer, in order. Raises UserError where a decoder linear is in none of them."""
    blocks = decoder_blocks(model)
    for name in decoder_linears(model):
        if not any(name.startswith(f"{path}.") for path in blocks):
            raise UserError(
                f"methods that calibrate block by block need all linears in decoder layers, but {name} is outside; "
                "use rtn or kmeans for this model"
            )
    return blocks


class BlockStream:
    """The decoder's blocks and the hidden states that enter the current one.

    `hidden` holds chunks (batch, length, width) of samples of equal length. Between its first block and its last, a
    decoder passes the same positions and masks for every text of a shape, so one full run a shape tells them.
    """

    def __init__(self, model: Any, batches: list[Tensor]):
        if not batches:
            raise UserError("this method needs calibration text, got none; give --data")
        self.blocks = _blocks(model)
        self._list = list(self.blocks.values())
        device = next(model.parameters()).device
        chunks = [chunk.to(device) for chunk in _chunks(batches)]
        self.tokens = sum(chunk.numel() for chunk in chunks)
        self._arguments: dict[torch.Size, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        with torch.no_grad():
            for chunk in chunks:
                if chunk.shape not in self._arguments:
                    self._arguments[chunk.shape] = self._arguments_of(model, chunk)
            self.hidden = [self._first_input(model, chunk) for chunk in chunks]

    def _arguments_of(self, model: Any, chunk: Tensor) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """What each block is called with besides the hidden states."""
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
            seen.append((args[1:] if "hidden_states" not in kwargs else args, rest))

        handles = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in self._list]
        try:
            model.base_model(input_ids=chunk, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return seen

    def _first_input(self, model: Any, chunk: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])
            raise _Reached

        handle = self._list[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            model.base_model(input_ids=chunk, use_cache=False)
        except _Reached:
            pass
        finally:
            handle.remove()
        return seen[0]

    def run(
        self, index: int, visits: Mapping[nn.Module, Visit] | None = None, *, until: nn.Module | None = None
    ) -> list[Tensor]:
        """Run block `index` on all chunks and return its outputs.

        Args:
            visits: submodule -> called with (args, kwargs) before each of its calls.
            until: leave each forward pass when this submodule is reached, after its visit; nothing is returned then.
        """
        handles = []
        for module in {**(visits or {}), **({until: None} if until else {})}:
            visit = (visits or {}).get(module)
            handles.append(module.register_forward_pre_hook(_hook(visit, module is until), with_kwargs=True))
        outputs = []
        try:
            for hidden in self.hidden:
                args, kwargs = self._arguments[hidden.shape[:2]][index]
                try:
                    output = self._list[index](hidden, *args, **kwargs)
                except _Reached:
                    continue
                outputs.append(output[0] if isinstance(output, tuple) else output)
        finally:
            for handle in handles:
                handle.remove()
        return outputs

    def stages(self, index: int) -> list[list[str]]:
        """The block's linears (paths inside the block) in the order they are called, those with one input together."""
        block, whole = self._list[index], self.hidden
        layers = {name: module for name, module in block.named_modules() if type(module) is nn.Linear}
        calls: list[tuple[str, Tensor]] = []
        self.hidden = whole[:1]
        try:
            self.run(index, {layer: _note(calls, name) for name, layer in layers.items()})
        finally:
            self.hidden = whole
        stages: list[list[str]] = []
        for position, (name, x) in enumerate(calls):
            if position and x is calls[position - 1][1]:
                stages[-1].append(name)
            else:
                stages.append([name])
        missed = [name for name in layers if name not in {called for called, _ in calls}]
        return stages + [[name] for name in missed]


def _hook(visit: Visit | None, last: bool) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if visit is not None:
            visit(args, kwargs)
        if last:
            raise _Reached

    return hook


def _note(calls: list[tuple[str, Tensor]], name: str) -> Visit:
    return lambda args, kwargs: calls.append((name, args[0]))


def _chunks(batches: list[Tensor]) -> list[Tensor]:
    """Samples (1, length) stacked where neighbours have one length, up to `_CHUNK_TOKENS` tokens together."""
    chunks: list[list[Tensor]] = []
    for batch in batches:
        last = chunks[-1] if chunks else []
        if last and last[0].shape == batch.shape and (len(last) + 1) * batch.numel() <= _CHUNK_TOKENS:
            last.append(batch)
        else:
            chunks.append([batch])
    return [torch.cat(chunk) for chunk in chunks]


class Gram:
    """The sum of x x^T over a layer's inputs, (in, in) float32, and the mean magnitude of each input channel."""

    def __init__(self) -> None:
        self.tokens = 0
        self.products = torch.zeros(())
        self._magnitudes = torch.zeros(())

    def visit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1]).float()  # (tokens, in)
        if not self.tokens:
            self.products, self._magnitudes = x.new_zeros(x.shape[1], x.shape[1]), x.new_zeros(x.shape[1])
        self.tokens += x.shape[0]
        self.products.addmm_(x.t(), x)
        self._magnitudes += x.abs().sum(0)

    def magnitude(self) -> Tensor:
        """Mean |x| of each input channel, (in,)."""
        return self._magnitudes / max(self.tokens, 1)
