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


def rates_of(model, config):
    """(learning rate, decay) of each parameter that trains, by name; each is in one group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, config, World()).param_groups
    found = [(names[id(p)], (group["lr"], group["weight_decay"])) for group in groups for p in group["params"]]
    assert len(dict(found)) == len(found)
    return dict(found)


def test_only_clustered_weights_decay_and_tables_have_their_own_rate():
    model, _ = cluster(tiny_llama(bias=True))
    config = CompressConfig(learning_rate=1e-3, lut_learning_rate=1e-2, weight_decay=0.1)
    rates = rates_of(model, config)
    assert set(rates) == {name for name, p in model.named_parameters() if p.requires_grad}
    for name in clustered_layers(model):
        assert rates.pop(f"{name}.weight") == (1e-3, 0.1)
        assert rates.pop(f"{name}.centroids") == (1e-2, 0.0)
    assert rates
    assert all(model.get_parameter(name).dim() == 1 for name in rates)  # norms and biases
    assert set(rates.values()) == {(1e-3, 0.0)}


@pytest.mark.parametrize("labels", [0.0, 1.0])
def test_each_matrix_has_the_rate_of_its_own_size_and_norms_keep_theirs(labels):
    """A matrix whose weights are a tenth as large trains as fast, relative to them, and more entries, which are nearer to
    one another, are moved by less where no text is learned; norms are as large in all models."""
    model = tiny_llama(bias=True)
    small = "model.layers.1.mlp.down_proj"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj.weight" in name:
                parameter.mul_((0.04 if small in name else 0.4) / parameter.square().mean().sqrt())
    finer = "model.layers.0.self_attn.q_proj"
    model, _ = cluster(model, mixed={"module_bits": {finer: 6}})
    rates = {name: rate for name, (rate, _) in rates_of(model, CompressConfig(label_weight=labels)).items()}
    assert rates.pop(f"{small}.weight") == pytest.approx(2e-4 * 0.04 / 0.15, rel=1e-3)
    for name, entries in ((small, 8), (finer, 64)):
        size = float(model.get_submodule(name).lut().square().mean().sqrt())
        usual = 0.25 if labels else entries / 32
        assert rates.pop(f"{name}.centroids") == pytest.approx(2e-4 * min(1, size / usual), rel=1e-6)
        assert (size < usual) == (name == small or not labels)
    assert set(rates.values()) == {2e-4}
    given = rates_of(model, CompressConfig(learning_rate=1e-3, lut_learning_rate=1e-2))
    assert {rate for rate, _ in given.values()} == {1e-3, 1e-2}  # as somebody said


def test_the_rate_rises_linearly_then_falls_along_a_cosine():
    factors = [learning_rate_factor(step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert factors[55] == pytest.approx(0.001 + 0.999 * (1 + math.cos(math.pi * 45 / 90)) / 2)
    assert torch.tensor(factors[10:]).diff().max() < 0
    assert 0.001 < factors[-1] < 0.002
