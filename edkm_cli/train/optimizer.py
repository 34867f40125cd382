"""Optimizers: which parameters train, how fast, and with what state."""

from typing import Any

import torch
from torch import nn

from edkm_cli.config import TrainingSettings
from edkm_cli.distributed import World
from edkm_cli.nn.clustered import clustered_layers, lut_layers
from edkm_cli.train.masters import MasterOptimizer

_BETAS = (0.9, 0.95)


def parameter_groups(model: nn.Module, config: TrainingSettings) -> list[dict[str, Any]]:
    """The optimizer's groups: clustered weights, or adapters, of a dense model its linears; LUT entries; and the
    rest (norms, biases), which is not decayed."""
    luts = {id(layer.centroids) for layer in lut_layers(model).values()}
    weights = {id(layer.weight) for layer in clustered_layers(model).values()}
    weights |= {id(parameter) for name, parameter in model.named_parameters() if ".lora_" in f".{name}"}
    if not luts:  # a dense model, trained for comparison: what is clustered otherwise
        weights |= {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    groups: dict[str, list[nn.Parameter]] = {"weights": [], "luts": [], "other": []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            kind = "luts" if id(parameter) in luts else "weights" if id(parameter) in weights else "other"
            groups[kind].append(parameter)
    return [
        {"params": groups["weights"], "lr": config.learning_rate, "weight_decay": config.weight_decay},
        {"params": groups["luts"], "lr": config.lut_learning_rate, "weight_decay": 0.0},
        {"params": groups["other"], "lr": config.learning_rate, "weight_decay": 0.0},
    ]


def needs_masters(groups: list[dict[str, Any]]) -> bool:
    """Whether a parameter that trains has 16 bits, so that plain steps would round their updates away."""
    return any(parameter.dtype.itemsize == 2 for group in groups for parameter in group["params"])


def build_optimizer(model: nn.Module, config: TrainingSettings, world: World) -> torch.optim.Optimizer:
    """AdamW, on masters where parameters have 16 bits."""
    groups = parameter_groups(model, config)
    if needs_masters(groups):
        return MasterOptimizer(groups, betas=_BETAS)
    # Fused, a step needs no memory of its own; PyTorch's choice on a GPU needs as much as the weights.
    fused = True if world.device.startswith("cuda") else None
    return torch.optim.AdamW(groups, betas=_BETAS, eps=1e-8, fused=fused)
