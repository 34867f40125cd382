"""Experts as ordinary linears: what a mixture-of-experts block computes with, one module for each matrix of each expert.

transformers keeps the matrices of all experts of a block in one parameter of three dimensions, some families transposed
(gpt-oss, Llama 4). Here each is an `nn.Linear` named `...experts.gate_up_proj.3`: a lookup table never crosses from one to
another, hooks see the tokens that were routed there, and the forward pass reads the experts that are chosen, no others.
`split_experts` does this to a model, `fuse_experts` takes it back. Routers, shared experts and what a family does between
the matrices (`_apply_gate`) stay as they are.
"""

import copy
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_MATRIX = re.compile(rf"^(.+)\.({'|'.join(_PROJECTIONS)})\.(\d+)$")
# Experts that get their tokens beforehand, those of one expert after those of another; all others are told who gets which.
_SORTED = ("Llama4TextExperts",)
_BUSIEST = 4  # times the tokens of the mean expert: those that a plan gives the busiest one


def is_expert(name: str) -> bool:
    """Whether a module's path is that of an expert's matrix."""
    return _MATRIX.match(name) is not None


class Experts(nn.Module):
    """The experts of a block, of the `kind` of transformers' module, whose attributes it has."""

    def __init__(self, fused: Any):
        super().__init__()
        self.kind = type(fused)
        self.__dict__.update(_attributes(fused))
        self._modules.update(fused._modules)
        self._buffers.update(fused._buffers)
        self.transposed = bool(getattr(fused, "is_transposed", True))  # there: matrices are (experts, in, out)
        for name in _PROJECTIONS:
            if name in fused._parameters:
                weight, bias = fused._parameters.pop(name), fused._parameters.pop(f"{name}_bias", None)
                self.add_module(name, nn.ModuleList(_linears(weight, bias, transposed=self.transposed)))
        self.count = len(self.matrices()["down_proj"])
        self.train(fused.training)

    def matrices(self) -> dict[str, Any]:
        """The lists of linears, one for each expert, by name."""
        return {name: self._modules[name] for name in _PROJECTIONS if name in self._modules}

    def fused(self) -> Any:
        """The module of transformers, with the matrices in one parameter again."""
        made: Any = object.__new__(self.kind)
        nn.Module.__init__(made)
        made.__dict__.update(_attributes(self))
        del made.kind, made.count, made.transposed
        made._modules.update({name: child for name, child in self._modules.items() if name not in _PROJECTIONS})
        made._buffers.update(self._buffers)
        trains = any(parameter.requires_grad for parameter in self.parameters())
        for name, whole in self.joined(dict(self.named_parameters())).items():
            made.register_parameter(name, nn.Parameter(whole.detach(), trains))
        return made.train(self.training)

    def joined(self, tensors: dict[str, Tensor], path: str = "") -> dict[str, Tensor]:
        """Of tensors of the linears, by names that begin with `path`, those of transformers' module."""
        made = {}
        for leaf, linears in self.matrices().items():
            for kind, suffix in (("weight", ""), ("bias", "_bias")):
                names = [f"{path}{leaf}.{expert}.{kind}" for expert in range(len(linears))]
                if names[0] in tensors:
                    whole = torch.stack([tensors[name] for name in names])
                    flipped = self.transposed and kind == "weight"
                    made[f"{path}{leaf}{suffix}"] = whole.transpose(1, 2).contiguous() if flipped else whole
        return made

    def forward(self, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:
        """As transformers' module: of tokens (n, hidden) the sum of what the chosen experts give for them."""
        output = torch.zeros_like(hidden_states)
        for expert, tokens, weights in self._routes(hidden_states, *routing, *named.values()):
            given = self._expert(expert, hidden_states[tokens])
            output.index_add_(0, tokens, (given if weights is None else given * weights[:, None]).to(output.dtype))
        return output

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        lists: Any = self._modules
        if "gate_up_proj" in lists and self.kind.__name__ in _SORTED:
            gate, up = lists["gate_up_proj"][expert](x).chunk(2, dim=-1)
            inner = up * lists["act_fn"](gate)
        elif "gate_up_proj" in lists:
            inner = self.kind._apply_gate(self, lists["gate_up_proj"][expert](x))
        else:
            inner = lists["act_fn"](lists["up_proj"][expert](x))
        output = lists["down_proj"][expert](inner)
        return lists["post_expert_norm"](output) if getattr(self, "has_post_expert_norm", False) else output

    def _routes(
        self, hidden: Tensor, chosen: Tensor | None = None, weights: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """(expert, rows of `hidden` that it gets, their weights) of the experts that are chosen, in order.

        `chosen` and `weights`: (n, experts a token).
        """
        count = self.count
        if hidden.is_meta:  # nobody knows; what is kept for gradients takes as much for one with all tokens as for all
            rows = hidden.shape[0] // count if chosen is None else chosen.numel()
            if not torch.is_grad_enabled():
                rows = min(rows, math.ceil(_BUSIEST * rows / count))
            tokens = torch.zeros(rows, dtype=torch.int64, device=hidden.device)
            yield 0, tokens, None if weights is None else weights.reshape(-1)[:rows]
            return
        if chosen is None or weights is None:
            reached = (hidden.view(count, -1, hidden.shape[-1]) != 0).any(-1)  # the others are multiplied by zero
            for expert in reached.any(-1).nonzero().flatten().tolist():
                yield expert, reached[expert].nonzero().flatten() + expert * reached.shape[1], None
            return
        for expert in chosen.unique().tolist():
            if expert < count:
                tokens, places = (chosen == expert).nonzero(as_tuple=True)
                yield expert, tokens, weights[tokens, places]


def split_experts(model: nn.Module) -> bool:
    """Give each matrix of each expert a module of its own, in place; other layouts stay. Returns whether there was any."""
    fused = [(name, module) for name, module in model.named_modules() if _is_fused(module)]
    for name, module in fused:
        model.set_submodule(name, Experts(module))
    return bool(fused)


def with_one_expert(model: nn.Module) -> Any:
    """A copy of a split model on the meta device, of each block with the first expert only, which stands for `count`."""
    memo: dict[int, Any] = {}
    for block in model.modules():
        for linears in block.matrices().values() if isinstance(block, Experts) else ():
            memo[id(linears)] = nn.ModuleList([copy.deepcopy(linears[0])])
    return copy.deepcopy(model, memo)


def joined(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a dense model by name, with those of all experts of a block in one, as transformers has them.

    `model` has the same modules, of any kind; `tensors` all of a block's experts, or none.
    """
    made = {name: tensor for name, tensor in tensors.items() if not is_expert(name.rpartition(".")[0])}
    for path, module in model.named_modules():
        made |= module.joined(tensors, f"{path}.") if isinstance(module, Experts) else {}
    return made


def apart(model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Undo `joined`, of one tensor after another."""
    modules = dict(model.named_modules())
    for name, tensor in tensors:
        path, _, leaf = name.rpartition(".")
        if not isinstance(block := modules.get(path), Experts):
            yield name, tensor
            continue
        projection, kind = leaf.removesuffix("_bias"), "bias" if leaf.endswith("_bias") else "weight"
        for expert, matrix in enumerate(tensor.unbind()):
            flipped = block.transposed and kind == "weight"
            yield f"{path}.{projection}.{expert}.{kind}", matrix.t() if flipped else matrix


def fuse_experts(model: nn.Module) -> None:
    """Undo `split_experts`, in place, of a model whose experts are dense."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Experts):
            model.set_submodule(name, module.fused())


def _is_fused(module: nn.Module) -> bool:
    """Whether this is a module of transformers with the experts' matrices, and nothing else, in three dimensions."""
    known = type(module).__name__ in _SORTED or (hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"))
    names, parameters = {*_PROJECTIONS, *(f"{name}_bias" for name in _PROJECTIONS)}, module._parameters
    shaped = all(value is not None and value.dim() == 3 - name.endswith("_bias") for name, value in parameters.items())
    return known and "down_proj" in parameters and parameters.keys() <= names and shaped


def _linears(weight: Tensor, bias: Tensor | None, *, transposed: bool) -> Iterator[nn.Linear]:
    """A linear for each expert, with memory of its own."""
    for expert in range(weight.shape[0]):
        matrix = weight.detach()[expert].t() if transposed else weight.detach()[expert]
        linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=bias is not None, device="meta")
        linear.weight = nn.Parameter(matrix.clone(memory_format=torch.contiguous_format), weight.requires_grad)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach()[expert].clone(), bias.requires_grad)
        yield linear


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What a module has beside parameters, buffers, modules and hooks."""
    return {name: value for name, value in vars(module).items() if name not in vars(nn.Module())}
