"""Which parameters an optimizer gets, its schedule, and what is refused before any work."""

import math

import pytest
import torch

from edkm_cli.clustering.schedule import learning_rate_factor
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import World
from edkm_cli.nn.clustered import clustered_layers
from edkm_cli.train.optimizer import build_optimizer
from helpers import cluster, tiny_llama


def test_only_clustered_weights_decay_and_tables_have_their_own_rate():
    model, _ = cluster(tiny_llama(bias=True))
    config = CompressConfig(learning_rate=1e-3, lut_learning_rate=1e-2, weight_decay=0.1)
    weights, luts, other = build_optimizer(model, config, World()).param_groups
    layers = clustered_layers(model).values()
    assert {id(p) for p in weights["params"]} == {id(layer.weight) for layer in layers}
    assert {id(p) for p in luts["params"]} == {id(layer.centroids) for layer in layers}
    assert all(p.dim() == 1 for p in other["params"])  # norms and biases
    assert other["params"]
    assert [(group["lr"], group["weight_decay"]) for group in (weights, luts, other)] == [
        (1e-3, 0.1), (1e-2, 0.0), (1e-3, 0.0),
    ]  # fmt: skip
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert {id(p) for group in (weights, luts, other) for p in group["params"]} == trained


def test_the_rate_rises_linearly_then_falls_along_a_cosine():
    factors = [learning_rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[55] == pytest.approx(0.001 + 0.999 * (1 + math.cos(math.pi * 45 / 90)) / 2)
    assert torch.tensor(factors[10:]).diff().max() < 0
    assert 0.001 < factors[-1] < 0.002
