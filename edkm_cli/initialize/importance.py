"""How much an error in each weight raises the loss of the model: the importance that weighs k-means and decides bits.

`activation`: the mean squared input of each column (the diagonal of GPTQ's Hessian). `gradient`: the diagonal of the
empirical Fisher matrix, sum over tokens of (g_o x_i)^2 (SqueezeLLM, arXiv 2306.07629, section 4.1, there per sequence).
Taken per token it is one product of squared gradients and squared inputs for each layer, which costs as much as the
gradient of the weight and gives a sample for every token instead of every sequence.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.initialize.layers import HiddenStates, Layers, run
from edkm_cli.nn.hooks import evaluating, frozen, hooked
from edkm_cli.precision import bfloat16_autocast, float32_products, sum_of_products
from edkm_cli.progress import Track, no_progress
from edkm_cli.runtime.experts import is_expert

# Tokens that an expert must get, or its squared gradients are those of single tokens: all its weights count alike then.
_LEAST_TOKENS = 32
_MOST = 20.0  # times the mean: what a token counts for at most
IMPORTANCES = ("gradient", "activation", "none")
_LOGITS = 2**25  # at a time: 130 MB, as much again for their gradient
Take = Callable[[str, nn.Module, dict[str, Tensor]], None]


class _Collector:
    """A hook on linears that adds up squared inputs, or squared gradients of the weight, in float32 in host memory, or
    `near`, where they are; of those in `moments`, products of the inputs, or of what an embedding gives, of its gradients.

    Where the model is sharded, so are the sums: each process keeps its rows of every matrix.
    """

    def __init__(self, layers: dict[str, Any], kind: str, world: World, moments: Sequence[str], near: bool):
        self.sums: dict[str, Tensor] = {}
        self.tokens = dict.fromkeys(layers, 0)
        self.counts = True
        self._waiting: dict[str, list[Tensor]] | None = None
        self._kind, self._world, self._moments, self._home = kind, world, moments, None if near else "cpu"
        self._layers, self._names = layers, {layer: name for name, layer in layers.items()}

    def see(self, module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """After each pass of a layer."""
        name, x = self._names[module], inputs[0].detach().reshape(-1, module.in_features)  # (tokens, in)
        self.tokens[name] += x.shape[0] if self.counts else 0
        if name in self._moments and self._waiting is not None:
            self._waiting.setdefault(name, []).append(inputs[0].detach())
        elif name in self._moments:
            self._add_products(name, x)
        elif self._kind == "activation":
            self._add(name, x.float().square().sum(0))
        elif output.requires_grad:

            def arrived(grad: Tensor) -> None:  # squares are taken when they are needed
                squares, columns = grad.float().square(), x.float().square()
                shares = squares.sum(-1) * columns.sum(-1).view(squares.shape[:-1])
                first = 1 if squares.ndim > 2 else 0  # an expert gets a choice of the tokens
                squares[..., first:, :].mul_(_bound(shares[..., first:])[..., None])
                self._add(name, sum_of_products(squares.flatten(0, -2), columns), by_rows=True)

            output.register_hook(arrived)

    def see_entering(self, gradients: Tensor) -> None:
        """In what entered, (batch, sequence, hidden). First tokens, where attention rests, have some that are thousands of
        times as large, which tell of the row of one token only."""
        for name in self._moments:
            if isinstance(self._layers[name], nn.Embedding):
                rows = gradients[:, 1:].float()
                self._add_products(name, rows * _bound(rows.square().sum(-1)).sqrt_()[..., None])

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, moments wait for all parts of a text, (batch, tokens, in) each."""
        self._waiting = {}
        yield
        for name, parts in self._waiting.items():
            self._add_products(name, torch.cat(parts, 1))
        self._waiting = None

    def _add_products(self, name: str, x: Tensor) -> None:
        """Not from bfloat16: one direction can have all but a thousandth, and what is left decides how errors make up."""
        x = x.flatten(0, -2).float()  # in float16 sums of squares overflow
        with torch.autocast("cuda" if x.is_cuda else "cpu", enabled=False), float32_products():
            self._add(name, x.t() @ x)

    def _add(self, name: str, value: Tensor, *, by_rows: bool = False) -> None:
        value = value.float() if self.counts else torch.zeros_like(value, dtype=torch.float32)
        value = (self._world.scatter_rows(value) if by_rows and self._world.sharded else value).to(device=self._home)
        self.sums[name] = self.sums[name].add_(value) if name in self.sums else value

    def means(self, tokens: int) -> dict[str, Tensor]:
        """Over all processes, by `tokens`. The weights of an expert that got too few all count alike, as those of
        the sibling that counts least do on average."""
        split = self._world.sharded and self._kind == "gradient"
        for name in self._layers:  # one that this process's tokens did not reach takes part with zeros
            if is_expert(name) and name not in self.sums:
                shape = self._layers[name].weight.shape[self._kind == "activation" :]
                self.sums[name] = torch.zeros(shape, device="meta" if self._layers[name].weight.is_meta else "cpu")
        # In place: the sums of a 7B model are 26 GB.
        found = {
            name: (value if split and name not in self._moments else self._world.sum(value.cpu())).div_(max(tokens, 1))
            for name, value in sorted(self.sums.items())
        }
        experts = [name for name in found if is_expert(name) and not found[name].is_meta]
        counts = torch.tensor([float(self.tokens[name]) for name in experts], device="cpu")
        reached = self._world.sum(counts).tolist() if experts else []
        means: dict[str, float] = {}
        for name, count in zip(experts, reached, strict=True):
            if count >= _LEAST_TOKENS:
                block = name.rpartition(".")[0]
                means[block] = min(float(found[name].mean()), means.get(block, math.inf))
        for name, count in zip(experts, reached, strict=True):
            if count < _LEAST_TOKENS:
                found[name].fill_(means.get(name.rpartition(".")[0], 1.0))
        return found


def _bound(shares: Tensor) -> Tensor:
    """What tokens' shares of a sum, (batch, tokens) or (tokens,), are to be multiplied with: none is to be more than `_MOST`
    times the mean of what is left.

    In the first layers one token in ten thousand has a tenth of all in SmolLM2, and in Qwen2.5 one had all but a
    thousandth, so that other text gives other bits, and no loss rises quadratically that far. First tokens of texts, where
    attention rests, all have hundreds of times the mean in the values, and it is felt by all others: they keep it.
    """
    if not shares.numel():
        return shares
    count = shares.numel() - _MOST * torch.arange(shares.numel(), device=shares.device)
    # With the k largest at that bound it is 20 times the sum of the others by (tokens - 20 k): least where it holds.
    bounds = _MOST * shares.flatten().sort().values.cumsum(0).flip(0) / count
    most = bounds.where(count > 0, math.inf).min()
    return torch.where(shares > most, most / shares, 1.0)


def collect(
    layers: Layers,
    names: list[str],
    batches: list[Tensor],
    take: Take,
    *,
    by_layer: bool,
    kind: str,
    moments: Sequence[str] = (),
    world: World = ALONE,
    track: Track = no_progress,
) -> dict[str, Tensor]:
    """Gives the importance of the named linears' weights over calibration batches, which the processes share, to
    `take(path, part, importance)`, which may pop what it is done with.

    Args:
        layers: of a dense causal LM; its parameters are left as they are, none gets a gradient.
        batches: token ids, (batch, sequence) int64; the same on all processes.
        take: gets module path -> float32 means over tokens, in host memory: all at once, of the model as one part at path
            "", or `by_layer`, to the same bits, with one decoder layer in memory at a time, in any order; a model that is
            sharded cannot be taken so.
        kind: `activation` gives (in,) a layer, `gradient` (out, in), `none` nothing.
        moments: further modules, outside of the decoder layers: a linear gives the products of its inputs, (in, in), and
            the input embedding, with `gradient`, those of the gradients in its rows, (hidden, hidden).
        world: the processes. Where the model is sharded, `gradient` gives each its share of the rows
            (`World.gather_rows` makes them whole).

    Returns the products of `moments`, and what nobody has taken of a whole model. Raises UserError for an unknown kind.
    """
    if kind not in IMPORTANCES:
        raise UserError(f"importance must be one of {', '.join(IMPORTANCES)}, got {kind!r}")
    if by_layer:
        return _by_layer(layers, names, batches, take, (kind, world, moments), track)
    found = {} if kind == "none" else _of_whole(layers.model, names, batches, (kind, world, moments), track)
    take("", layers.model, found)
    return found


How = tuple[str, World, Sequence[str]]  # kind, world and moments of `collect`


@contextmanager
def _collecting(model: Any, names: Sequence[str], how: How, *, near: bool) -> Iterator[_Collector]:
    layers = {name: model.get_submodule(name) for name in names}
    collector = _Collector(layers, *how, near)
    with hooked([layer for layer in layers.values() if isinstance(layer, nn.Linear)], collector.see, after=True):
        yield collector


def _of_whole(model: Any, names: list[str], batches: list[Tensor], how: How, track: Track) -> dict[str, Tensor]:
    kind, world, moments = how
    turns = world.turns(batches)
    rounding = bfloat16_autocast(world.device, model.dtype)
    with _collecting(model, (*names, *moments), how, near=False) as sums, frozen(model), evaluating(model), rounding:
        for batch, sums.counts in track(turns, "calibration", len(turns)):
            _run(model, batch.to(world.device), kind, sums)
    return sums.means(sum(batch.numel() for batch in batches))


def _by_layer(
    layers: Layers, names: list[str], batches: list[Tensor], take: Take, how: How, track: Track
) -> dict[str, Tensor]:
    kind, world, moments = how
    if kind == "none":
        for path in track(layers.paths, "k-means start", len(layers.paths)):
            with layers.whole(path) as layer:
                take(path, layer, {})
        return {}
    gradient, tokens = kind == "gradient", sum(batch.numel() for batch in batches)
    turns = [(batch.to(world.device), counts) for batch, counts in world.turns(batches)]
    passes = len(layers.paths) * (2 if gradient else 1)
    progress = iter(track(range(passes), "calibration", passes))
    inputs, model = HiddenStates(), layers.model

    def collector(path: str) -> AbstractContextManager[_Collector]:
        return _collecting(model, [name for name in names if name.startswith(f"{path}.")], how, near=True)

    with frozen(model), evaluating(model), bfloat16_autocast(world.device, model.dtype):
        with torch.no_grad():
            calls = list(zip(layers.paths, layers.calls(turns[0][0]), strict=True))
            hidden = [layers.calls(batch)[0].hidden for batch, _ in turns]
        for path, call in calls:
            with layers.whole(path) as layer, collector(path) as sums, torch.no_grad():
                for index, (_, sums.counts) in enumerate(turns):
                    if gradient:
                        inputs.push(hidden[index])
                    hidden[index] = run(layer, hidden[index], call)
                if not gradient:
                    take(path, layer, sums.means(tokens))
            next(progress, None)
        with _collecting(model, moments, how, near=True) as ends:
            for index, (batch, ends.counts) in enumerate(turns):
                hidden[index] = _from_the_end(layers, hidden[index], batch, gradient=gradient, sums=ends)
        for path, call in reversed(calls) if gradient else ():
            entered = [inputs.pop() for _ in turns][::-1]
            with layers.whole(path) as layer, collector(path) as sums:
                for index, (_, sums.counts) in enumerate(turns):
                    start = entered[index].detach().requires_grad_()
                    with torch.enable_grad():
                        output = run(layer, start, call)
                    hidden[index] = torch.autograd.grad(output, start, hidden[index])[0]
                take(path, layer, sums.means(tokens))
            next(progress, None)
        for index, (batch, ends.counts) in enumerate(turns if gradient else ()):
            scale = _scale_of_rows(model.get_input_embeddings().weight, batch, entered[index])
            ends.see_entering(hidden[index] * scale)
    return ends.means(tokens)


def _from_the_end(layers: Layers, hidden: Tensor, batch: Tensor, *, gradient: bool, sums: _Collector) -> Tensor:
    """The gradient of the loss in what the last layer gave, (batch, sequence, hidden), if it is asked for. Logits exist
    some tokens at a time; `sums` sees the inputs of the head once, all together."""
    ends = hidden.detach()
    gradients = torch.empty_like(ends) if gradient else ends
    some = max(1, _LOGITS // max(1, len(batch) * layers.model.config.get_text_config(decoder=True).vocab_size))
    with sums.together():
        for first in range(0, ends.shape[1], some):
            at = slice(first, first + some)
            labels = batch[:, first + 1 : at.stop + 1]
            with torch.set_grad_enabled(gradient):
                end = ends[:, at].clone().requires_grad_(gradient)
                logits = layers.logits(batch[:, at], end)[:, : labels.shape[1]]
            if gradient:
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
                gradients[:, at] = torch.autograd.grad(loss, end)[0]
    return gradients


def _scale_of_rows(weight: Tensor, ids: Tensor, entered: Tensor) -> Tensor:
    """What an embedding's rows were multiplied with on the way to what entered, (batch, sequence, hidden)."""
    rows = weight.detach()[ids].float()
    return (entered.detach().float() * rows).sum() / rows.square().sum()


def _run(model: Any, batch: Tensor, kind: str, collector: _Collector) -> None:
    if kind == "activation":
        with torch.no_grad():
            model(input_ids=batch, use_cache=False)  # the whole model: FSDP2 gathers the root's parameters for it alone
        return
    entered: list[Any] = []

    def ask(embedding: nn.Embedding, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """No parameter asks for a gradient, so the embedded tokens do, or there would be no graph."""
        entered[:] = output.detach().requires_grad_(True), _scale_of_rows(embedding.weight, batch, output)
        return entered[0]

    with hooked([model.get_input_embeddings()], ask, after=True), torch.enable_grad():
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].flatten(0, 1)
        # A sum, not a mean: each token's own gradient is squared.
        nn.functional.cross_entropy(logits.float(), batch[:, 1:].flatten(), reduction="sum").backward()
    collector.see_entering(entered[0].grad * entered[1])
