"""Optimizers: which parameters train, how fast, and steps that lose nothing to the rounding of 16-bit parameters.

A bfloat16 number has eight bits of mantissa, so an update below about 1/500 of a weight vanishes when it is added: at the
usual learning rates no norm ever moves, and most weights never do (Zamirai et al., Revisiting BFloat16 Training,
arXiv 2010.06192). The remedy is a float32 master. A bfloat16 number is the upper half of a float32 one, so of the master
only the lower half must be kept beside the parameter: two bytes a weight where a copy takes four, and the arithmetic is
exactly that of the copy. The parameter is the master rounded to nearest, its `remainder` what is missing, an int16.

    master bits (32) = parameter bits (16) * 2**16 + remainder        remainder in [-2**15, 2**15)

float16 has another exponent, so its parameters get a whole float32 `master`, and float32 moments: squared gradients are
below its range. float32 parameters (LUT entries, low-rank updates) are stepped as they are.

torchao rounds at random instead and compiles its steps; here a run must resume bit for bit and be rehearsed on the meta
device, so the rounding has to be a function of the state.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.config import TrainingSettings
from edkm_cli.distributed import World, full, local
from edkm_cli.nn.clustered import clustered_layers, lut_layers

_MOMENT_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 4, torch.float64: 8}
_MASTER_BYTES = {torch.float32: 0, torch.bfloat16: 2, torch.float16: 4, torch.float64: 0}
_BETAS = (0.9, 0.95)
_RATE = 2e-4  # of weights and entries that are as large as SmolLM2's, or more
_USUAL_WEIGHT, _USUAL_ENTRY = 0.15, 0.25  # root mean squares, a little below SmolLM2's
_CHUNK = 2**22  # numbers worked on at a time, so that a step needs little memory of its own
_HALF = 2**15


def master_of(parameter: Tensor, remainder: Tensor) -> Tensor:
    """The float32 number whose upper half is a bfloat16 parameter, and whose lower half is its int16 remainder."""
    return ((parameter.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """(bfloat16 parameter, int16 remainder) of a float32 master: the inverse of `master_of`."""
    bits = master.view(torch.int32)
    upper = (bits + _HALF) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


_MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterOptimizer(torch.optim.Optimizer):
    """AdamW, as PyTorch computes it, on float32 masters of 16-bit parameters; groups have `lr` and `weight_decay`."""

    def __init__(self, groups: Any, *, betas: tuple[float, float], eps: float = 1e-8):
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._betas, self._eps = betas, eps

    def _prepare(self, parameter: nn.Parameter) -> dict[str, Any]:
        """The parameter's state, made before its first step."""
        if not (state := self.state[parameter]):
            state["step"] = 0
            wide = torch.float32 if parameter.dtype == torch.float16 else parameter.dtype
            state |= {name: torch.zeros_like(parameter, dtype=wide) for name in _MOMENTS}
            if parameter.dtype == torch.bfloat16:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
            elif parameter.dtype == torch.float16:
                state["master"] = parameter.detach().float()
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._prepare(parameter)
                state["step"] += 1
                for part, grad, parts in _chunks(parameter, state):
                    self._step_part(part, grad.float(), parts, state["step"], group)

    def _step_part(self, part: Tensor, grad: Tensor, parts: dict[str, Tensor], step: int, group: dict) -> None:
        master = master_of(part, parts["remainder"]) if "remainder" in parts else parts.get("master", part)
        mean, square = (parts[name].float() for name in _MOMENTS)  # the same tensors where they are float32
        rate, (first, second) = group["lr"], self._betas
        master.mul_(1 - rate * group["weight_decay"])
        mean.lerp_(grad, 1 - first)
        square.mul_(second).addcmul_(grad, grad, value=1 - second)
        rate /= 1 - first**step
        master.addcdiv_(mean, square.sqrt().div_(math.sqrt(1 - second**step)).add_(self._eps), value=-rate)
        for name, moment in zip(_MOMENTS, (mean, square), strict=True):
            parts[name].copy_(moment)
        if "remainder" in parts:
            rounded, remainder = split_master(master)
            part.copy_(rounded)
            parts["remainder"].copy_(remainder)
        elif "master" in parts:
            part.copy_(master)


def state_bytes(parameters: list[nn.Parameter]) -> tuple[float, float]:
    """(bytes of an optimizer's state, bytes of its own that a step needs)."""
    state = sum(p.numel() * (2 * _MOMENT_BYTES[p.dtype] + _MASTER_BYTES[p.dtype]) for p in parameters)
    largest = max((p.numel() for p in parameters if _MASTER_BYTES[p.dtype]), default=0)
    return state, 6 * 4 * min(_CHUNK, largest)  # the master, the gradient, moments and two results in float32


def _chunks(parameter: nn.Parameter, state: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """(part of the parameter, of its gradient, of its state by name): flat views, this process's share if sharded."""
    assert parameter.grad is not None
    weight, grad = local(parameter.detach()), local(parameter.grad)
    tensors = {name: local(value) for name, value in state.items() if isinstance(value, Tensor)}
    if not all(tensor.is_contiguous() for tensor in (weight, *tensors.values())):
        yield weight, grad, tensors
        return
    flat, gradient = weight.view(-1), grad.reshape(-1)
    for first in range(0, flat.numel(), _CHUNK):
        part = slice(first, first + _CHUNK)
        yield flat[part], gradient[part], {name: tensor.view(-1)[part] for name, tensor in tensors.items()}


def parameter_groups(model: nn.Module, config: TrainingSettings) -> list[dict[str, Any]]:
    """The optimizer's groups, one for each parameter, since each has its own size: clustered weights, or adapters, of a
    dense model its linears; LUT entries; and the rest (norms, biases), which is not decayed."""
    tables = {id(layer.centroids): layer for layer in lut_layers(model).values()}
    weights = {id(layer.weight) for layer in clustered_layers(model).values()}
    weights |= {id(parameter) for name, parameter in model.named_parameters() if ".lora_" in f".{name}"}
    if not tables:  # a dense model, trained for comparison: what is clustered otherwise
        weights |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}

    def rate(parameter: nn.Parameter) -> float:
        if layer := tables.get(id(parameter)):
            # Without a text to learn, a step is a share of what rounding leaves, which is less the more entries there are.
            usual = _USUAL_ENTRY * (2**layer.clustering.bits / 8 if config.label_weight == 0 else 1)
            entries = layer.clustering.grid.tables(full(parameter.detach()))
            return config.lut_learning_rate or _RATE * relative_size([entries], usual)
        return config.learning_rate or _RATE * (relative_size([parameter]) if id(parameter) in weights else 1.0)

    trained, decay = [parameter for parameter in model.parameters() if parameter.requires_grad], config.weight_decay
    return [{"params": [p], "lr": rate(p), "weight_decay": decay if id(p) in weights else 0.0} for p in trained]


def relative_size(tensors: Iterable[Tensor], usual: float = _USUAL_WEIGHT) -> float:
    """Their root mean square by the usual one, at most 1; 1 of none, and on the meta device. A step of Adam is as large
    whatever it changes: what suits SmolLM2 is ten times as much to weights a tenth as large, as those of larger models."""
    squares, count = 0.0, 0
    for tensor in (tensor.detach() for tensor in tensors if not tensor.is_meta):
        squares, count = squares + float(full(tensor.float().square().sum())), count + tensor.numel()
    return min(1.0, math.sqrt(squares / count) / usual) if count else 1.0


def build_optimizer(model: nn.Module, config: TrainingSettings, world: World) -> torch.optim.Optimizer:
    """AdamW, on masters where parameters have 16 bits: plain steps would round their updates away."""
    groups = parameter_groups(model, config)
    if any(parameter.dtype.itemsize == 2 for group in groups for parameter in group["params"]):
        return MasterOptimizer(groups, betas=_BETAS)
    # Fused, a step needs no memory of its own; PyTorch's choice on a GPU needs as much as the weights.
    return torch.optim.AdamW(groups, betas=_BETAS, eps=1e-8, fused=True if world.device.startswith("cuda") else None)
