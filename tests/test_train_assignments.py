"""Assignments that are held: weights stay with the entries of the start, while the entries move."""

from dataclasses import replace

import pytest
import torch

from edkm_cli.clustering import nearest_indices
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.distributed import ALONE
from edkm_cli.errors import UserError
from edkm_cli.nn.clustered import clustered_layers
from edkm_cli.train.loop import prepare
from helpers import cluster, tiny_llama


def entries(layer):
    return nearest_indices(layer.weight, layer.lut(), granularity=layer.clustering.granularity)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_follow_their_entries_wherever_those_go(dtype):
    model, _ = cluster(tiny_llama().to(dtype), embedding_bits=None)
    layers = clustered_layers(model)
    before = {name: entries(layer) for name, layer in layers.items()}
    prepare(model, CompressConfig(assignments="held"), ALONE)
    values = {name: layer.hard_weight() for name, layer in layers.items()}
    for layer in layers.values():
        assert not layer.weight.requires_grad
        with torch.no_grad():
            layer.centroids += 0.2 * layer.centroids.std() * torch.randn(layer.centroids.shape)
        layer.follow()
    for name, layer in layers.items():
        moved = layer.hard_weight()
        assert not torch.equal(moved, values[name])
        # An entry that passes another one exchanges its weights with it: they stay together all the same.
        for group in range(len(layer.centroids)):
            for entry in range(layer.centroids.shape[1]):
                together = moved[group][before[name][group] == entry]
                assert together.numel() == 0 or together.min() == together.max()


def test_without_holding_a_step_of_the_tables_moves_weights_to_other_entries():
    model, _ = cluster(tiny_llama(), embedding_bits=None)
    layer = next(iter(clustered_layers(model).values()))
    before = entries(layer)
    with torch.no_grad():
        layer.centroids += 0.2 * layer.centroids.std() * torch.randn(layer.centroids.shape)
    layer.follow()
    assert not torch.equal(entries(layer), before)


def test_a_run_that_learns_from_the_teacher_alone_holds_them_and_resumes_to_the_same(
    model_directory, text_file, tmp_path, monkeypatch
):
    from edkm_cli.train import loop

    seen: list[dict[str, torch.Tensor]] = []
    original = loop.follow

    def follow(model):
        original(model)
        seen.append({name: entries(layer) for name, layer in clustered_layers(model).items()})

    monkeypatch.setattr(loop, "follow", follow)
    config = CompressConfig(
        model=str(model_directory), data=(str(text_file),), label_weight=0.0, output=str(tmp_path / "whole"), steps=4,
        sequence_length=32, calibration_tokens=64, start_tokens=256, context=32, eval_windows=1, save_every=2, device="cpu",
    )  # fmt: skip
    assert config.holds_assignments
    assert compress(config)["steps"] == 4
    (held,) = seen
    stopped = replace(config, output=str(tmp_path / "stopped"))

    class Stop(Exception):
        pass

    def stop_after_two(self, done, *arguments):
        save(self, done, *arguments)
        if done == 2:
            raise Stop

    save = loop.Checkpoints.save
    with monkeypatch.context() as patch:
        patch.setattr(loop.Checkpoints, "save", stop_after_two)
        with pytest.raises(Stop):
            compress(stopped)
    compress(stopped, resume=True)
    assert all(torch.equal(held[name], seen[-1][name]) for name in held)
    whole, resumed = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert whole == resumed


@pytest.mark.parametrize(
    ("changes", "held"),
    [
        ({}, True),
        ({"data": ("builtin",)}, False),
        ({"label_weight": 1.0}, False),
        ({"data": ("builtin",), "label_weight": 0.0}, True),
        ({"mode": "soft"}, False),
        ({"lora_rank": 4}, False),
        ({"sharding": "full"}, False),
        ({"assignments": "free"}, False),
        ({"data": ("builtin",), "assignments": "held"}, True),
    ],
    ids=str,
)
def test_auto_holds_them_where_the_teacher_alone_is_learnt(changes, held):
    assert CompressConfig(**changes).holds_assignments == held


@pytest.mark.parametrize("changes", [{"mode": "soft"}, {"lora_rank": 2}, {"sharding": "full"}], ids=str)
def test_what_cannot_hold_them_is_refused(changes):
    with pytest.raises(UserError, match="use assignments free"):
        CompressConfig(assignments="held", **changes)
