"""A model's logits, from its states and the rest of it, are those of the whole model: in every family."""

import pytest
import torch

from edkm_cli.nn.clustered import hold
from edkm_cli.nn.parts import Parts
from families import FAMILIES, family
from helpers import cluster, tiny_llama


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "opt"])  # its logits are its states
def test_states_and_head_give_the_logits_of_the_model(name):
    model = family(name).eval()
    ids = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(0))
    parts = Parts(model, frozen=True)
    assert parts.width == 32
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        states = parts.states(input_ids=ids, use_cache=False)
        torch.testing.assert_close(parts.logits(states), wanted)
        torch.testing.assert_close(parts.logits(states[1:, 3:5]), wanted[1:, 3:5])
        parts.release()
        for parameter in model.parameters():
            parameter.zero_()
        torch.testing.assert_close(parts.logits(states), wanted)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_head_that_is_kept_rounded_gives_what_autocast_gives(name):
    parts = Parts(family(name).eval(), frozen=True)
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = parts.logits(states)
        parts.round_linears()
        assert torch.equal(parts.logits(states), wanted)


def test_what_is_packed_multiplies_as_autocast_says(ids):
    model, _ = cluster(tiny_llama())
    hold(model)
    wanted = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids).logits
    assert logits.dtype == torch.bfloat16
    assert wanted.dtype == torch.float32
    torch.testing.assert_close(logits.float(), wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))


def test_gradients_pass_both_parts_and_rounded_embeddings():
    model, _ = cluster(tiny_llama())
    ids = torch.randint(0, 257, (1, 12))
    model(input_ids=ids).logits.square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    parts = Parts(model)
    parts.logits(parts.states(input_ids=ids)).square().sum().backward()
    for name, gradient in wanted.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient)


def test_of_a_whole_model_the_states_are_the_logits(ids):
    model = tiny_llama()
    parts = Parts(model, whole=True)
    assert torch.equal(parts.logits(parts.states(input_ids=ids)), model(ids).logits)
