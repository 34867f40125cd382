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


def test_smaller_weights_and_entries_get_a_smaller_rate_by_default():
    """A model whose weights are a tenth as large trains as fast, relative to them; norms are as large in all models."""
    rates = []
    for size in (1.0, 0.1):
        model = tiny_llama(bias=True)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "proj.weight" in name:
                    parameter.mul_(size * 0.4 / parameter.square().mean().sqrt())
        model, _ = cluster(model)
        rates.append([group["lr"] for group in build_optimizer(model, CompressConfig(), World()).param_groups])
    assert rates[0] == [2e-4, 2e-4, 2e-4]
    assert rates[1][0] == pytest.approx(2e-4 * 0.04 / 0.15, rel=0.01)
    assert 1e-5 < rates[1][1] < 4e-5
    assert rates[1][2] == 2e-4
    given = build_optimizer(model, CompressConfig(learning_rate=1e-3, lut_learning_rate=1e-2), World())
    assert [group["lr"] for group in given.param_groups] == [1e-3, 1e-2, 1e-3]  # as somebody said


def test_the_rate_rises_linearly_then_falls_along_a_cosine():
    factors = [learning_rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[55] == pytest.approx(0.001 + 0.999 * (1 + math.cos(math.pi * 45 / 90)) / 2)
    assert torch.tensor(factors[10:]).diff().max() < 0
    assert 0.001 < factors[-1] < 0.002
