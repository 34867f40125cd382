"""The decoder layers of a causal LM as a chain, of which one is in memory at a time.

What enters a layer is what the one before it gives; masks and positions are the same for all texts of a shape. So a layer
can be worked on alone, with the hidden states of the text at its two ends: the whole of a model needs never be in memory.
Layers come from a model that is in memory already, or from files, from which one is read whenever it is needed.

Gradients go through the layers in reverse: each pass forward keeps what entered every layer, in memory or on disk, and a
layer's own pass is made again. Sums are taken in the same order wherever layers come from.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.nn.hooks import LAST, LayerCall, Reached, decoder_layers, entering, hidden_of, hooked, layer_calls
from edkm_cli.precision import bfloat16_linears

_MEMORY_BYTES = 2**24  # of hidden states that wait for their turn; more of them do so on disk


class Layers:
    """The decoder layers of `model`, by module path, in order.

    `read(path, layer)` fills the parameters of a layer, which are on the meta device until then, and again afterwards;
    None where all of them are in memory.
    """

    def __init__(self, model: Any, read: Callable[[str, nn.Module], None] | None = None):
        self.model, self._read, self._stays = model, read, set[str]()
        self._tuples: bool | None = None

    @cached_property
    def paths(self) -> list[str]:
        """Raises UserError where the model does not say which its decoder layers are."""
        return list(decoder_layers(self.model))

    @property
    def streamed(self) -> bool:
        return self._read is not None

    def stay(self, path: str) -> None:
        """A layer that is whole is kept in memory from now on."""
        self._stays.add(path)

    @contextmanager
    def whole(self, path: str) -> Iterator[nn.Module]:
        layer = self.model.get_submodule(path)
        if self._read is None or path in self._stays:
            yield layer
            return
        self._read(path, layer)
        try:
            yield layer
        finally:
            if path not in self._stays:
                for module in layer.modules():
                    for name, parameter in module.named_parameters(recurse=False):
                        setattr(module, name, nn.Parameter(parameter.to("meta"), parameter.requires_grad))

    @contextmanager
    def at_hand(self) -> Iterator[Any]:
        """The model, to be called as a whole: each layer is read before its pass and forgotten after it."""
        paths = {self.model.get_submodule(path): path for path in self.paths} if self.streamed else {}
        held = ExitStack()

        def enter(layer: nn.Module, *_: Any) -> None:
            held.enter_context(self.whole(paths[layer]))

        with hooked(paths, enter), hooked(paths, lambda *_: held.close(), after=True):
            yield self.model

    @contextmanager
    def gathered(self) -> Iterator[Any]:
        """The model with all its layers in memory, for many passes with `bfloat16_linears`."""
        with ExitStack() as held:
            for path in self.paths if self.streamed else ():
                held.enter_context(bfloat16_linears(held.enter_context(self.whole(path)), alone=True))
            yield self.model

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As those of the model, in the same order."""
        names, paths = [name for name, _ in self.model.named_parameters()], self.paths if self.streamed else []
        for path, inside in groupby(names, lambda name: next((p for p in paths if name.startswith(f"{p}.")), "")):
            with self.whole(path) if path else nullcontext():
                for name in inside:
                    yield name, self.model.get_parameter(name).detach()

    def calls(self, ids: Tensor) -> list[LayerCall]:
        """What each layer is called with, for texts (batch, sequence): the hidden states of all but the first are those
        that enter the first. No layer computes anything."""
        with self._passing_on(ids, lambda hidden: hidden) as layers:
            return layer_calls(lambda: self.model(input_ids=ids, use_cache=False, logits_to_keep=LAST), layers)

    def logits(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """The model's logits for what its last layer gave, (batch, sequence, hidden)."""
        with self._passing_on(ids, lambda _: hidden):
            return self.model(input_ids=ids, use_cache=False).logits

    @torch.no_grad()
    def _give_tuples(self, ids: Tensor) -> bool:
        """Whether a layer gives a tuple, of which the hidden states are the first, and the model takes them out of it."""
        if self._tuples is None:

            def see(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                self._tuples = isinstance(output, tuple)
                raise Reached

            with self.whole(self.paths[0]) as layer, hooked([layer], see, after=True), suppress(Reached):
                self.model(input_ids=ids[:1, :1], use_cache=False)
        return bool(self._tuples)

    @contextmanager
    def _passing_on(self, ids: Tensor, give: Callable[[Tensor], Tensor]) -> Iterator[list[nn.Module]]:
        """Inside, the layers give what `give` makes of the hidden states that enter them."""
        tuples = self._give_tuples(ids)
        layers = [self.model.get_submodule(path) for path in self.paths]

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = give(entering(args, kwargs))
            return (hidden,) if tuples else hidden

        for layer in layers:
            layer.forward = forward  # type: ignore[method-assign]
        try:
            yield layers
        finally:
            for layer in layers:
                del layer.forward


def run(layer: nn.Module, hidden: Tensor, call: LayerCall) -> Tensor:
    """What a layer gives for hidden states (batch, sequence, hidden), called as `call` says."""
    return hidden_of(layer(hidden, *call.args, **call.kwargs))


class HiddenStates:
    """Hidden states of texts in their order, where they were or, beyond some, in a file without a name."""

    def __init__(self, states: Iterable[Tensor] = ()) -> None:
        self._kept: list[tuple[Tensor | None, torch.dtype, torch.Size, torch.device]] = []
        self._bytes, self._starts = 0, [0]  # of what is in memory; where each begins in the file
        self._file: Any = None
        for hidden in states:
            self.push(hidden)

    def push(self, hidden: Tensor) -> None:
        on_disk = self._bytes + hidden.nbytes > _MEMORY_BYTES
        self._kept.append((None if on_disk else hidden, hidden.dtype, hidden.shape, hidden.device))
        self._bytes += 0 if on_disk else hidden.nbytes
        self._starts.append(self._starts[-1] + hidden.nbytes * on_disk)
        if on_disk and not hidden.is_meta:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="edkm-states-")  # noqa: SIM115  # closed when this is forgotten
            self._file.seek(self._starts[-2])
            self._file.write(hidden.detach().contiguous().cpu().view(torch.uint8).numpy().data)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Tensor:
        hidden, dtype, shape, device = self._kept[index]
        if hidden is None:
            hidden = torch.empty(shape, dtype=dtype, device="meta" if device.type == "meta" else "cpu")
            if not hidden.is_meta:
                self._file.seek(self._starts[index])
                self._file.readinto(hidden.view(-1).view(torch.uint8).numpy())
        return hidden.to(device)

    def some(self, at: slice = slice(None)) -> Tensor:
        """Those of some texts, one after the other."""
        return torch.cat([self[index] for index in range(*at.indices(len(self)))])

    def pop(self) -> Tensor:
        """The last one, which is forgotten."""
        last = self[len(self) - 1]
        if self._kept.pop()[0] is not None:
            self._bytes -= last.nbytes
        self._starts.pop()
        return last
