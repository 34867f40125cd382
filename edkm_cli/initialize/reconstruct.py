"""The reconstructed start: decoder layer by decoder layer, what each gave before it was compressed is restored, in closed
form (`edkm_cli.initialize.corrections`), and with `passes` by a few small steps, too (docs/clustering.md, "The start").

The loss is the squared error relative to the squared norm, token by token: the first tokens of a text have activations a
thousand times as large as all others and would be all that counts.

Only one decoder layer is worked on at a time, and of the text only the hidden states at its two ends are kept, and what
its matrices got. No second model is needed: until a layer is compensated, its weights are those of the uncompressed model.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.clustering.schedule import learning_rate_factor
from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.initialize.compensate import Compensation, gets_too_few
from edkm_cli.initialize.corrections import Corrections
from edkm_cli.initialize.layers import HiddenStates, Layers, run
from edkm_cli.nn.clustered import ClusteredLinear, clustered_layers
from edkm_cli.nn.hooks import LayerCall, changed, evaluating, hooked, without_dropout
from edkm_cli.precision import bfloat16_autocast
from edkm_cli.progress import Track, no_progress
from edkm_cli.runtime.experts import Experts

# Highest learning rates of Adam, by the root mean square of what is trained: models differ tenfold in the size of their
# weights. A weight crosses half the gap of a 3-bit table in some fifty steps; an entry moves many weights at once.
_WEIGHTS_RATE, _LUTS_RATE, _REST_RATE = 5e-3, 1e-3, 5e-3
_BETAS = (0.9, 0.95)
_WARMUP = 0.1
_TOKENS_A_STEP = 1024


def reconstruct(
    model: Any,
    batches: list[Tensor],
    *,
    layers: Layers | None = None,
    begin: Callable[[str, nn.Module], None] = lambda path, layer: None,
    end: Callable[[str, nn.Module, dict[str, Tensor]], None] = lambda path, layer, states: None,
    done: int = 0,
    states: dict[str, Tensor] | None = None,
    passes: int = 2,
    seed: int = 0,
    world: World = ALONE,
    track: Track = no_progress,
    compensating: Callable[[World, Corrections], Callable[..., None]] = Compensation,
    at_most_layers: int | None = None,
    at_most_steps: int | None = None,
) -> None:
    """Compensate and train all `ClusteredLinear` layers of a causal LM, decoder layer by decoder layer, in place.

    Layers outside of the decoder's list keep their weights. Several processes round some of the rows of each matrix; all
    else they do alike, and take the first one's result.

    Args:
        model: with `ClusteredLinear` layers whose weights are those of the uncompressed model, in mode
            `straight-through`, not sharded, without low-rank updates.
        batches: token ids, (1, sequence) int64, all of one shape, the same on all processes. Kept are three hidden
            states of each token.
        layers: of the model, where they are not in memory already.
        begin, end: called with each decoder layer, `begin` to swap its linears, `end` when it is done, with the hidden
            states of the text at its end.
        done, states: how many decoder layers are done already, and what `end` got of the last of these.
        passes: how often each layer's training goes over the text; 0 corrects and compensates only.
        compensating: makes the hook before each clustered layer; a rehearsal has another one.
        at_most_layers, at_most_steps: stop early, for a rehearsal: a number of decoder layers, of steps in each.

    Raises UserError if the loss is not finite, or the model does not name its decoder layers.
    """
    layers = layers or Layers(model)
    texts = [batch.to(world.device) for batch in batches]
    with evaluating(model), torch.no_grad():
        calls = layers.calls(texts[0])
        exact = HiddenStates(layers.calls(text)[0].hidden for text in texts)
        compressed = exact.some()  # (texts, sequence, hidden)
        if states is not None:
            exact = HiddenStates(states["exact"].to(world.device).split(1))
            compressed = states["compressed"].to(world.device)
        order = torch.Generator().manual_seed(seed)
        for _ in range(done):
            list(_picks(texts, passes, order))
        todo = list(zip(layers.paths, calls, strict=True))[done:at_most_layers]
        for path, call in track(todo, "reconstruction", len(todo)):
            with layers.whole(path) as layer:
                begin(path, layer)
                block = _Block(layer, call)
                corrections = Corrections(block.module, block.layers)
                exact = block.exact_outputs(exact, corrections)
                corrections.weigh(exact)
                entering = compressed
                compressed = block.compensate(entering, corrections, compensating(world, corrections))
                if picks := [*_picks(texts, passes, order)][:at_most_steps]:
                    block.fit(entering, exact, picks)
                    for parameter in block.module.parameters():
                        world.broadcast(parameter.data)  # processors may differ in the last bit
                    del compressed
                    compressed = block.outputs(entering)
                end(path, layer, {"exact": exact.some(), "compressed": compressed})
                del block, corrections, entering  # before the next layer is read


class _Block:
    """One decoder layer and how to call it, where no gradients are asked for."""

    def __init__(self, module: nn.Module, call: LayerCall):
        self.module, self._call = module, call
        self.layers: list[ClusteredLinear] = list(clustered_layers(module).values())
        self._chosen: dict[Any, list[Tensor]] = {m: [] for m in module.modules() if isinstance(m, Experts)}

    def _run(self, hidden: Tensor) -> Tensor:
        with bfloat16_autocast(hidden.device.type, hidden.dtype):
            return run(self.module, hidden, self._call)

    def exact_outputs(self, hidden: HiddenStates, corrections: Corrections) -> HiddenStates:
        """Of the layer with its weights as they are, which is on record then."""
        self.module.eval()
        with changed(*self.layers, dense=True):
            corrections.find_residuals(self._run, hidden[0])
            with corrections.recording(), hooked(self._chosen, self._keep):
                return HiddenStates(self._run(hidden[text]) for text in range(len(hidden)))

    def outputs(self, hidden: Tensor) -> Tensor:
        """Of the compressed layer, for all texts."""
        given = torch.empty_like(hidden)
        for text, output in zip(hidden.split(1), given.split(1), strict=True):
            output.copy_(self._run(text))
        return given

    def compensate(self, hidden: Tensor, corrections: Corrections, compensation: Callable[..., None]) -> Tensor:
        """`edkm_cli.initialize.compensate` on the inputs that the layer gets now; returns what it gives then."""
        exact = {experts: torch.cat(chosen) for experts, chosen in self._chosen.items() if chosen}
        self._chosen = {experts: [] for experts in exact}
        with corrections.following(), hooked(self.layers, compensation), hooked(exact, self._keep):
            output = self._run(hidden)
        for experts, before in exact.items() if not hidden.is_meta else ():
            now = torch.cat(self._chosen[experts])
            experts.rerouted = float((before.sort(-1).values != now.sort(-1).values).any(-1).float().mean())
        return output

    def _keep(self, experts: Any, args: tuple[Any, ...]) -> None:
        """Which experts tokens go to, (tokens, experts a token)."""
        if len(args) > 1:
            self._chosen[experts].append(args[1])

    def fit(self, hidden: Tensor, wanted: HiddenStates, picks: list[list[int]]) -> None:
        """Train weights, tables, norms and biases, on some of the texts a step."""
        if not self.layers:
            return
        kept = [(parameter, parameter.requires_grad, parameter.dtype) for parameter in self.module.parameters()]
        for parameter, _, _ in kept:
            parameter.requires_grad_(False)
            parameter.data = parameter.data.float()  # 16 bits would swallow small steps
        groups = self._parameters()
        for group in groups:
            for parameter in group["params"]:
                parameter.requires_grad_(True)
        fused = None if hidden.is_meta else True  # a step needs no memory of its own
        optimizer = torch.optim.Adam(groups, betas=_BETAS, fused=fused)
        self.module.train()
        without_dropout(self.module)
        for step, pick in enumerate(picks):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * learning_rate_factor(step, len(picks), _WARMUP, last=0.05)
            inputs, outputs = hidden[pick].float(), torch.cat([wanted[text] for text in pick]).float()
            with torch.enable_grad():
                loss = relative_error(self._run(inputs).float(), outputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        self.module.eval()
        if not loss.is_meta and not math.isfinite(loss.item()):
            raise UserError("a decoder layer's reconstruction must stay finite, but is not; use --start compensated")
        for parameter, flag, dtype in kept:
            parameter.data = parameter.data.to(dtype)
            parameter.requires_grad_(flag)

    def _parameters(self) -> list[dict[str, Any]]:
        """The optimizer's groups, one for each parameter: clustered weights, their tables, norms and biases. Linears that
        were skipped keep their weights."""
        trained_layers = [layer for layer in self.layers if not gets_too_few(layer)]
        rates = {id(layer.weight): _WEIGHTS_RATE for layer in trained_layers}
        rates |= {id(layer.centroids): _LUTS_RATE for layer in trained_layers}
        trained = [p for p in self.module.parameters() if id(p) in rates or p.dim() == 1]
        return [{"params": [p], "peak": rates.get(id(p), _REST_RATE) * _size(p)} for p in trained]


def _size(parameter: Tensor) -> float:
    """The root mean square; 1 on the meta device, which has none."""
    return 1.0 if parameter.is_meta else float(parameter.detach().float().square().mean().sqrt())


def relative_error(output: Tensor, wanted: Tensor) -> Tensor:
    """Squared error by squared norm of each token's hidden state, averaged over tokens; both (batch, sequence, hidden)."""
    return ((output - wanted).square().sum(-1) / wanted.square().sum(-1).clamp_min(1e-12)).mean()


def _picks(texts: list[Tensor], passes: int, order: torch.Generator) -> Iterator[list[int]]:
    """Which texts go into each step: each once a pass."""
    at_once = max(1, _TOKENS_A_STEP // texts[0].numel())
    for _ in range(passes):
        shuffled = torch.randperm(len(texts), generator=order, device="cpu").tolist()
        yield from (shuffled[start : start + at_once] for start in range(0, len(texts), at_once))
