"""Corrections in closed form: against the regression written out, and on real decoder layers."""

import pytest
import torch
from torch import nn

from edkm_cli.initialize import corrections as correcting
from edkm_cli.initialize.corrections import Corrections
from edkm_cli.nn.clustered import clustered_layers
from helpers import cluster, tiny_llama, tiny_qwen

HIDDEN = 12


class Layer(nn.Module):
    """A decoder layer: the stream plus a matrix of another module's output."""

    def __init__(self, linear):
        super().__init__()
        self.norm, self.linear = nn.Identity(), linear

    def forward(self, hidden_states):
        return hidden_states + self.linear(self.norm(hidden_states))


def a_linear():
    model = tiny_llama(hidden=HIDDEN, inner=24)
    cluster(model, embedding_bits=16)
    return model.model.layers[0].self_attn.o_proj


@pytest.mark.parametrize(("texts", "damping"), [(3, 1e-6), (3, 0.2), (1, 0.2)])
def test_the_target_is_the_regression_of_what_is_wanted_on_what_there_is(texts, damping, monkeypatch, exact_products):
    monkeypatch.setattr(correcting, "_INPUTS", 1.0)
    monkeypatch.setattr(correcting, "_RESIDUAL", 1.0)
    generator = torch.Generator().manual_seed(0)
    block = Layer(a_linear())
    layer = block.linear
    layer.dense = True
    corrections = Corrections(block, [layer])
    exact = torch.randn(texts, 20 if texts > 1 else 7, HIDDEN, generator=generator)  # one: fewer tokens than columns
    now = exact + 0.1 * torch.randn(exact.shape, generator=generator)
    with torch.no_grad():
        corrections.find_residuals(block, exact[:1])
        with corrections.recording():
            wanted = torch.cat([block(text[None]) for text in exact])
        with corrections.following():
            block(now)
            x = now.reshape(-1, HIDDEN).double()
            damped = x.t() @ x
            damped.diagonal().add_(damping * damped.diagonal().mean())
            found = corrections.target(layer, now, lambda rows: rows @ damped.inverse().float(), damping)
    branch = (wanted - now).reshape(-1, HIDDEN).double()  # what the matrix has to give for the stream to be as it was
    weight = layer.weight.detach().double()
    expected = weight + (branch - x @ weight.t()).t() @ x @ damped.inverse()  # drawn to the weight as it was
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_matrices_with_the_same_inputs_share_what_is_solved(exact_products):
    generator = torch.Generator().manual_seed(0)
    block = nn.Sequential(a_linear(), a_linear())  # none adds to a stream
    exact, now = torch.randn(2, 2, 10, HIDDEN, generator=generator)
    solved = []

    def times_inverse(rows):
        solved.append(rows)
        return rows @ torch.eye(HIDDEN)

    for layer in block:
        layer.dense = True
    corrections = Corrections(block, list(block))
    with torch.no_grad(), corrections.recording():
        for layer in block:
            layer(exact[:1]), layer(exact[1:])
    x = now.reshape(-1, HIDDEN)
    for layer in block:
        expected = layer.weight + 0.9 * layer.weight @ (exact.reshape(-1, HIDDEN) - x).t() @ x
        found = corrections.target(layer, now, times_inverse, 0.2)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(solved) == 1


@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_matrices_that_add_to_the_residual_stream_are_found(family, scaled):
    model = family()
    cluster(model, embedding_bits=16)
    block = model.model.layers[0]
    layers = clustered_layers(block)
    corrections = Corrections(block, list(layers.values()))
    for layer in layers.values():
        layer.dense = True
    seen = []
    handle = block.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(7)[None], use_cache=False)
        handle.remove()
        ((hidden, *args), kwargs) = seen[0]
        if scaled:  # as Granite and MiniCPM do: what is added is not the output
            block.self_attn.register_forward_hook(lambda module, args, output: (output[0] * 0.5, *output[1:]))
        run = lambda x: block(x, *args, **kwargs)  # noqa: E731
        corrections.find_residuals(run, hidden)
    names = {module: name for name, module in block.named_modules()}
    assert {names[layer]: names[stream] for layer, stream in corrections._adds_to.items()} == {
        **({} if scaled else {"self_attn.o_proj": ""}),
        "mlp.down_proj": "post_attention_layernorm",
    }


def test_a_layer_that_sees_other_tokens_keeps_its_weight():
    layer = a_linear()
    corrections = Corrections(nn.Sequential(layer), [layer])
    with torch.no_grad(), corrections.recording():
        layer(torch.randn(1, 5, HIDDEN))
    for inputs in (torch.randn(5, HIDDEN), torch.randn(2, 5, HIDDEN)):
        assert corrections.target(layer, inputs, lambda rows: rows, 0.2) is layer.weight


def test_a_token_that_is_huge_in_the_compressed_model_alone_counts_no_more(exact_products):
    layer = a_linear()
    layer.dense = True
    corrections = Corrections(nn.Sequential(layer), [layer])
    exact = torch.randn(2, 10, HIDDEN, generator=torch.Generator().manual_seed(0))
    now = exact.clone()
    now[1, 3] *= 1000
    with torch.no_grad(), corrections.recording():
        layer(exact[:1]), layer(exact[1:])
    corrections.weigh([torch.ones(1, 10, HIDDEN)] * 2)
    torch.testing.assert_close(corrections.hessian(layer, now), corrections.hessian(layer, exact))
    now[1, 3] = exact[1, 3] / 2  # one that lost something is not lifted
    x = now.reshape(-1, HIDDEN)
    torch.testing.assert_close(corrections.hessian(layer, now), x.t() @ x)
