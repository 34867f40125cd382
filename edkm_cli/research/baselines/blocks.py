"""Runs calibration text through the decoder, one block at a time.

GPTQ and AWQ look at the inputs of one decoder block's linears, change the block, and go on to the next; the model
never runs as a whole. Only the inputs of the current block are kept, in float32: 300 kB for 512 tokens of width 576.
"""

from contextlib import suppress
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.errors import UserError
from edkm_cli.initialize.layers import Layers, run
from edkm_cli.nn.hooks import LayerCall, Reached, decoder_layers, hooked
from edkm_cli.research.baselines.outcome import decoder_linears

_CHUNK_TOKENS = 4096


class BlockStream:
    """The decoder's `blocks`, module path -> decoder layer, in order, and the hidden states that enter the current one.

    `hidden` holds chunks (batch, length, width) of samples of equal length. Raises UserError without text, or where a
    decoder linear is in none of the blocks.
    """

    @torch.no_grad()
    def __init__(self, model: Any, batches: list[Tensor]):
        if not batches:
            raise UserError("this method needs calibration text, got none; give --data")
        self.blocks = decoder_layers(model)
        for name in decoder_linears(model):
            if not any(name.startswith(f"{path}.") for path in self.blocks):
                rule = "methods that calibrate block by block need all linears in decoder layers"
                raise UserError(f"{rule}, but {name} is outside; use rtn or kmeans for this model")
        self._list, layers = list(self.blocks.values()), Layers(model)
        device = next(model.parameters()).device
        self.hidden: list[Tensor] = []
        self._calls: dict[torch.Size, list[LayerCall]] = {}  # by the shape of the text
        for chunk in _chunks(batches):
            ids = chunk.to(device)
            calls = layers.calls(ids)
            self._calls.setdefault(ids.shape, [call._replace(hidden=torch.empty(0)) for call in calls])
            self.hidden.append(calls[0].hidden)
        self.tokens = sum(batch.numel() for batch in batches)

    def run(self, index: int, *, chunks: int | None = None) -> list[Tensor]:
        """The outputs of block `index` on all chunks, or the first `chunks`; none where a hook raised `Reached`."""
        outputs = []
        for hidden in self.hidden[:chunks]:
            with suppress(Reached):
                outputs.append(run(self._list[index], hidden, self._calls[hidden.shape[:2]][index]))
        return outputs

    def stages(self, index: int) -> list[list[str]]:
        """The block's linears (paths inside the block) in the order they are called, those with one input together."""
        layers = {module: name for name, module in self._list[index].named_modules() if type(module) is nn.Linear}
        calls: list[tuple[str, Tensor]] = []
        with hooked(layers, lambda layer, args: calls.append((layers[layer], args[0]))):
            self.run(index, chunks=1)
        stages = [[name for name, _ in stage] for _, stage in groupby(calls, key=lambda call: id(call[1]))]
        called = {name for name, _ in calls}
        return stages + [[name] for name in layers.values() if name not in called]


def _chunks(batches: list[Tensor]) -> list[Tensor]:
    """Samples (1, length) stacked where neighbours have one length, up to `_CHUNK_TOKENS` tokens together."""
    chunks: list[Tensor] = []
    for shape, alike in groupby(batches, key=lambda batch: batch.shape):
        chunks += torch.cat(list(alike)).split(max(1, _CHUNK_TOKENS // shape.numel()))
    return chunks


class Gram:
    """The sum of x x^T over a layer's inputs, (in, in) float32, and the mean magnitude of each input channel: a hook."""

    def __init__(self) -> None:
        self.tokens, self.products, self._magnitudes = 0, torch.zeros(()), torch.zeros(())

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0].reshape(-1, args[0].shape[-1]).float()  # (tokens, in)
        if not self.tokens:
            self.products, self._magnitudes = x.new_zeros(x.shape[1], x.shape[1]), x.new_zeros(x.shape[1])
        self.tokens += x.shape[0]
        self.products.addmm_(x.t(), x)
        self._magnitudes += x.abs().sum(0)

    def magnitude(self) -> Tensor:
        """Mean |x| of each input channel, (in,)."""
        return self._magnitudes / max(self.tokens, 1)
