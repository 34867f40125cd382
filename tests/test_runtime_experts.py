"""Experts as linears: the same model, and a start that says which of them the text does not reach."""

import copy

import pytest
import torch
from torch import nn

import edkm_cli
from edkm_cli.compress import compress
from edkm_cli.format import QuantizationSpec
from edkm_cli.initialize.build import Recipe, initialize
from edkm_cli.initialize.compensate import few_tokens
from edkm_cli.initialize.sharded import StoredModel
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.swap import plan_swaps
from edkm_cli.runtime.experts import Experts, fuse_experts, is_expert, split_experts
from families import family
from helpers import byte_tokenizer, cluster, export, importance_of, settings

IDS = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "llama4_text", "jamba"])
@torch.no_grad()
def test_split_experts_compute_what_their_family_computes_and_are_fused_again(model_type):
    model = family(model_type)
    wanted, tensors = model(IDS).logits, copy.deepcopy(model.state_dict())
    assert split_experts(model)
    assert not split_experts(model)
    assert torch.allclose(model(IDS).logits, wanted, atol=1e-5)
    fuse_experts(model)
    assert torch.equal(model(IDS).logits, wanted)
    found = model.state_dict()
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def unreached():
    """A Mixtral whose router never chooses expert 3 of the first layer."""
    model = family("mixtral")
    split_experts(model)
    router = model.model.layers[0].mlp.gate
    router.forward = without(router.forward, 3)
    return model


def without(forward, expert):
    def changed(*args):
        logits, weights, chosen = forward(*args)
        others = (chosen + 1) % 3
        taken = torch.where((others == chosen.flip(-1)), (others + 1) % 3, others)
        return logits, weights, torch.where(chosen == expert, taken, chosen)

    return changed


def test_only_experts_that_are_chosen_are_called():
    model = unreached()
    called = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_expert(name):
            module.register_forward_hook(lambda *_, name=name: called.add(name))
    with torch.no_grad():
        model(IDS)
    first = {name for name in called if name.startswith("model.layers.0.")}
    assert {name.rpartition(".")[2] for name in first} == {"0", "1", "2"}


def test_an_expert_that_no_token_reaches_counts_as_the_least_of_its_siblings_and_is_named():
    model = unreached()
    swaps = plan_swaps(model, embedding_bits=8)
    names = [swap.name for swap in swaps if swap.clustered]
    importance = importance_of(model, names, [IDS.repeat(8, 1)], kind="gradient")
    path = "model.layers.0.mlp.experts.down_proj"
    lone = importance[f"{path}.3"]
    assert lone.unique().numel() == 1
    assert torch.isclose(lone[0, 0], min(importance[f"{path}.{index}"].mean() for index in range(3)))
    before = model.get_submodule(f"{path}.3").weight.detach().clone()
    spec = QuantizationSpec(3, "row:1", "float16", 8, split_experts=True)
    recipe = Recipe(swaps, spec, Clustering(3, "row:1", "float16"), importance="gradient")
    made = initialize(model, recipe, calibration=[IDS.repeat(8, 1)], fitting=[IDS])
    clustered = made[0] if isinstance(made, tuple) else made
    assert torch.equal(clustered.get_submodule(f"{path}.3").weight, before)
    said = []
    few = few_tokens(clustered, said.append)
    assert few[f"{path}.3"] == 0
    assert "too few tokens" in said[0]
    assert any(isinstance(module, Experts) for module in clustered.modules())


def test_packed_experts_that_are_not_chosen_are_not_read(tmp_path):
    packed = edkm_cli.load(export(*cluster(family("qwen3_moe", num_experts=16)), tmp_path), dtype=torch.float32)
    block = packed.model.layers[0].mlp
    experts = {name: m for name, m in block.named_modules() if is_expert(name)}
    sizes = {name: m.indices.nbytes + m.lut.nbytes for name, m in experts.items()}
    read = []
    for name, module in experts.items():
        module.register_forward_hook(lambda *_, name=name: read.append(sizes[name]))
    with torch.no_grad():
        block(torch.randn(1, 1, 32))
    assert len(experts) == 32
    assert sum(read) * 16 == sum(sizes.values()) * 2  # two experts a token


@pytest.mark.parametrize("assignments", ["held", "free"])
def test_training_lowers_the_loss_of_a_mixture(assignments, text_file, tmp_path):
    family("mixtral").save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    changes = {"steps": 30, "assignments": assignments, "lut_learning_rate": 3e-3, "learning_rate": 3e-3, "bits": 2}
    config = settings(tmp_path / "model", text_file, tmp_path / "out", **changes)
    report = compress(config)
    assert report["perplexity"]["trained"] < report["perplexity"]["start"]
    if assignments == "held":  # the reconstructed start compares what routers choose
        assert set(report["rerouted"]) == {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"}
        assert all(0 < share < 1 for share in report["rerouted"].values())


def test_experts_stored_in_float16_are_joined_under_autocast_too(tmp_path):
    model = family("mixtral", torch.float16)
    model.save_pretrained(tmp_path)
    stored = StoredModel(model, tmp_path, split=False)
    name = next(name for name, _ in model.named_parameters() if "experts" in name)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(stored.get(name), model.get_parameter(name))
