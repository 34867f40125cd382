"""ClusteredLinear, the swap plan and the sensitivity of weights, on tiny models."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from edkm_cli.distributed import ALONE
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity
from edkm_cli.initialize.importance import _Collector
from edkm_cli.nn.clustered import Clustering, clustered_layers
from edkm_cli.nn.hooks import hooked
from edkm_cli.nn.swap import check_geometry, decoder_bits_per_weight, plan_swaps
from edkm_cli.packing import Packed
from edkm_cli.runtime.embeddings import PalettizedEmbedding, PalettizedHead
from edkm_cli.runtime.lut_linear import decoded_rows
from families import family
from helpers import cluster, clustered_linear_of, importance_of, tiny_llama, tiny_qwen

MODES = ["straight-through", "hard", "soft"]
MODES_AND_ITERATIONS = [*((mode, 2) for mode in MODES), ("soft", 0), ("hard", 0)]


def layer_of(mode, method, granularity="row:1", dtype=torch.float32, iterations=2):
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 16).to(dtype)
    clustering = Clustering(3, granularity, "float16", method=method, mode=mode, iterations=iterations)
    return clustered_linear_of(linear, clustering, temperature=0.05, name="layer").train()


@pytest.mark.parametrize(("mode", "iterations"), MODES_AND_ITERATIONS)
@pytest.mark.parametrize("granularity", ["tensor", "row:1", "row:4", "block:4x8"])
def test_the_closed_form_and_the_dense_reference_train_alike(mode, iterations, granularity):
    fast, dense = (layer_of(mode, method, granularity, iterations=iterations) for method in ("edkm", "dkm"))
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    for layer in (fast, dense):
        layer(x).square().sum().backward()
    torch.testing.assert_close(fast(x), dense(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast.weight.grad, dense.weight.grad, rtol=2e-4, atol=1e-5)
    torch.testing.assert_close(fast.bias.grad, dense.bias.grad, rtol=1e-5, atol=1e-5)
    if mode == "straight-through" or iterations == 0:
        torch.testing.assert_close(fast.centroids.grad, dense.centroids.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("mode", "iterations"), MODES_AND_ITERATIONS)
def test_a_forward_pass_changes_no_state_and_commit_does(mode, iterations):
    layer = layer_of(mode, "edkm", iterations=iterations)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer(torch.randn(3, 24)).sum().backward()
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    layer.commit()
    assert torch.equal(layer.centroids, before["centroids"]) is (mode == "straight-through" or iterations == 0)
    assert torch.equal(layer.weight, before["weight"])


@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_add_up_to_the_batch(mode):
    whole, parts = layer_of(mode, "edkm"), layer_of(mode, "edkm")
    x = torch.randn(8, 24)
    whole(x).square().sum().backward()
    for part in x.split(2):
        parts(part).square().sum().backward()
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad, rtol=1e-5, atol=1e-5)


def test_evaluation_is_the_snapped_weight():
    layer = layer_of("soft", "edkm").eval()
    indices, lut = layer.snapped()
    expected = torch.gather(lut.float(), 1, indices.long())
    assert torch.equal(layer.hard_weight(), expected)
    x = torch.randn(3, 24)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, expected, layer.bias))


def test_hard_training_forward_is_the_snapped_weight_too():
    layer = layer_of("straight-through", "edkm")
    x = torch.randn(3, 24)
    torch.testing.assert_close(layer(x), layer.eval()(x), rtol=0, atol=0)


def test_a_nan_in_a_weight_names_the_layer():
    linear = torch.nn.Linear(8, 4)
    linear.weight.data[1, 2] = float("nan")
    with pytest.raises(UserError, match=r"model\.layers\.3\.up_proj"):
        clustered_linear_of(linear, Clustering(3, "row:1", "float16"), name="model.layers.3.up_proj")


def test_the_plan_names_every_linear_and_why_some_stay():
    swaps = plan_swaps(tiny_llama(tied=False), embedding_bits=16, skip=("*.mlp.*",))
    reasons = {swap.name: swap.reason for swap in swaps}
    assert len(swaps) == 2 + 2 * 7
    assert reasons["model.layers.0.self_attn.q_proj"] == ""
    assert "--skip" in reasons["model.layers.1.mlp.up_proj"]
    assert "dense" in reasons["lm_head"]
    assert "dense" in reasons["model.embed_tokens"]


def test_skipping_a_tied_head_skips_the_embedding():
    reasons = {swap.name: swap.reason for swap in plan_swaps(tiny_llama(), embedding_bits=8, skip=("lm_head",))}
    assert reasons["lm_head"]
    assert reasons["model.embed_tokens"]


def test_a_skip_that_matches_nothing_and_a_model_with_nothing_left_are_refused():
    with pytest.raises(UserError, match=r"lm_haed.*match none"):
        plan_swaps(tiny_llama(), embedding_bits=8, skip=("lm_haed",))
    with pytest.raises(UserError, match="none is left"):
        plan_swaps(tiny_llama(), embedding_bits=8, skip=("*_proj",))


def test_a_geometry_that_does_not_divide_names_the_layer_and_the_nearest():
    swaps = plan_swaps(tiny_llama(), embedding_bits=8)
    with pytest.raises(UserError, match=r"model\.layers\.0\.\S+ .*nearest that fits is block:8x"):
        check_geometry(swaps, Granularity.parse("block:8x64"))


def test_decoder_bits_are_those_of_the_design():
    swaps = plan_swaps(tiny_llama(hidden=32, inner=64), embedding_bits=8)
    assert decoder_bits_per_weight(swaps, QuantizationSpec(3, "block:8x32", "float8_e4m3fn", 8)) == 3.25
    assert decoder_bits_per_weight(swaps, QuantizationSpec(3, "tensor", "float16", 8)) < 3.2


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen])
def test_tied_embeddings_are_rounded_once_and_stay_tied(make):
    model = make()
    dense = model.get_input_embeddings().weight.detach().clone()
    cluster(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, PalettizedEmbedding)
    assert isinstance(head, PalettizedHead)
    assert torch.equal(embedding.dequantize(), head.dequantize())
    bound = dense.abs().amax(1, keepdim=True) / 127 / 2
    assert bool(((embedding.dequantize() - dense).abs() <= bound * 1.001).all())
    ids = torch.tensor([[5, 0, 5]])
    assert torch.equal(embedding(ids), embedding.dequantize()[ids])
    moved = copy.deepcopy(model)
    assert moved.get_output_embeddings().tied_to is moved.get_input_embeddings()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_an_embedding_have_bits_of_their_own(tied, dtype):
    ends = [[64, 6], [192, 3], [250, 5]]
    model = tiny_llama(tied=tied)
    spec = QuantizationSpec(3, "row:1", "float16", 4, embedding_factors=True, embedding_rows=ends)
    parts = [range(64), range(64, 192), range(192, 250), range(250, 257)]
    dense, embedding = torch.randn(257, 24), PalettizedEmbedding(model.model.embed_tokens, spec)
    head = PalettizedHead(model.lm_head, spec, tied_to=embedding if tied else None)
    for module in (embedding, head):
        module.to(dtype)
        if module is embedding or not tied:
            module.fill(dense)
        for rows, bits in zip(parts, (6, 3, 5, 4), strict=True):
            alone = PalettizedEmbedding(
                torch.nn.Embedding(len(rows), 24), QuantizationSpec(3, "row:1", "float16", bits, embedding_factors=True)
            )
            alone.fill(dense[rows.start : rows.stop])
            assert torch.equal(module.dequantize()[rows.start : rows.stop], alone.dequantize())
        whole, some = module.dequantize(dtype), torch.tensor([[0, 63, 64], [191, 250, 256]])
        if isinstance(module, PalettizedHead):
            for x in (torch.randn(2, 24).to(dtype), torch.randn(2, 24, requires_grad=True).to(dtype)):
                exact = x.float() @ module.dequantize().t()
                torch.testing.assert_close(module(x).float(), exact, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)
            continue
        for chosen in (some, some[0], some[1, 1:2], torch.arange(257), torch.zeros(0, dtype=torch.long)):
            assert torch.equal(module(chosen), whole[chosen])
        assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(some), whole[some])
        for wrong in (-1, 257):
            with pytest.raises(IndexError):
                module(torch.tensor([wrong, 5]))


@pytest.mark.parametrize("ids", [[7, 8], [-1, 0], [-5], [11]])
def test_an_id_outside_of_all_parts_of_an_embedding_is_refused(ids):
    parts = [Packed(torch.ones(4, 8, dtype=torch.uint8), torch.ones(4, 1), None, 8, None)] * 2
    with pytest.raises(IndexError):
        decoded_rows(torch.tensor(ids), parts, None, columns=8, dtype=torch.float32)


def test_activation_importance_is_the_mean_squared_input(ids):
    model = tiny_llama()
    name, seen = "model.layers.1.mlp.up_proj", []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    importance = importance_of(model, [name], [ids[:1], ids[1:]], kind="activation")[name]
    handle.remove()
    torch.testing.assert_close(importance, torch.cat(seen).flatten(0, 1).square().mean(0))


def test_gradient_importance_is_the_mean_squared_gradient_of_each_token(ids, exact_products):
    model = tiny_llama()
    name = "model.layers.0.self_attn.v_proj"
    importance = importance_of(model, [name], [ids[:1]], kind="gradient")[name]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.requires_grad for parameter in model.parameters())
    # The reference: capture x and g, then square each token's outer product.
    captured = {}
    layer = model.get_submodule(name)
    layer.register_forward_hook(lambda module, inputs, output: captured.update(x=inputs[0], y=output))
    logits = model(ids[:1]).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum")
    (g,) = torch.autograd.grad(loss, captured["y"])
    outer = g[0][:, :, None] * captured["x"][0].detach()[:, None, :]
    torch.testing.assert_close(importance, outer.square().mean(0), rtol=1e-4, atol=1e-9)


def test_a_token_counts_for_twenty_times_the_mean_at_most_but_for_the_first_of_a_text(exact_products):
    linear = torch.nn.Linear(8, 4, bias=False)
    x, gradients = torch.randn(2, 64, 8), torch.randn(2, 64, 4)
    gradients[0, 0] *= 1000
    gradients[1, 30:32] *= 1000
    collector = _Collector({"": linear}, "gradient", ALONE, (), False)
    with hooked([linear], collector.see, after=True):
        linear(x).backward(gradients)
    outer = gradients.square()[..., None] * x.square()[:, :, None]
    shares = outer.sum((2, 3))
    left = shares[:, 1:].sum() - shares[1, 30:32].sum()  # of 126 tokens two are at 20 times a mean that they are in
    outer[1, 30:32] *= (20 * left / (126 - 2 * 20) / shares[1, 30:32])[:, None, None]
    torch.testing.assert_close(collector.sums[""], outer.sum((0, 1)))


def test_importance_of_a_model_in_16_bits_is_added_up_in_float32(ids):
    names, ends = ["model.layers.0.mlp.up_proj"], ["lm_head", "model.embed_tokens"]
    found = importance_of(tiny_llama().bfloat16(), names, [ids[:1], ids[1:]], kind="gradient", moments=ends)
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys([*names, *ends], torch.float32)


def test_products_of_gradients_in_the_rows_of_an_embedding(ids, exact_products):
    model = tiny_llama(tied=False)
    name = "model.embed_tokens"
    found = importance_of(model, [], [ids[:1], ids[1:]], kind="gradient", moments=[name])[name]
    expected = torch.zeros_like(found)
    for text in ids:
        rows = model.get_input_embeddings()(text[None]).detach().requires_grad_(True)
        logits = model(inputs_embeds=rows).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], text[1:], reduction="sum")
        gradients = torch.autograd.grad(loss, rows)[0][0, 1:]
        expected += gradients.t() @ gradients / ids.numel()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-9)


def test_a_token_in_the_products_of_an_embeddings_gradients_counts_for_twenty_times_the_mean_at_most(exact_products):
    embedding = torch.nn.Embedding(64, 8)
    collector = _Collector({"": embedding}, "gradient", ALONE, [""], False)
    gradients = torch.randn(1, 64, 8)
    gradients[0, 0] *= 1000  # the first of a text says nothing of other rows
    gradients[0, 9] *= 1e5
    collector.see_entering(gradients)
    rows = gradients[0, 1:].clone()
    rows[8] = 0
    rows[8] = torch.nn.functional.normalize(gradients[0, 9], dim=0) * (20 * rows.square().sum() / (63 - 20)).sqrt()
    torch.testing.assert_close(collector.sums[""], rows.t() @ rows, rtol=1e-4, atol=1e-4)


def test_an_unknown_importance_is_refused(ids):
    with pytest.raises(UserError, match="importance must be one of"):
        importance_of(tiny_llama(), [], [ids], kind="magic")


def test_sensitivity_moves_the_start_towards_what_matters():
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 8, bias=False)
    importance = torch.ones(64)
    importance[:4] = 1000.0
    clustering = Clustering(2, "row:1", "float32")
    plain = clustered_linear_of(linear, clustering)
    weighted = clustered_linear_of(linear, clustering, importance=importance)

    def error(layer):
        return ((layer.hard_weight() - linear.weight)[:, :4]).square().sum()

    assert error(weighted) < error(plain)


def test_every_linear_of_the_decoder_is_clustered():
    model, _ = cluster(tiny_llama())
    assert len(clustered_layers(model)) == 14


def test_routers_stay_dense_and_what_is_only_as_wide_does_not():
    shared = family("qwen3_next", num_experts=16, shared_expert_intermediate_size=16)
    reasons = {
        swap.name.rpartition(".")[2]: swap.reason for swap in plan_swaps(shared) if "shared_expert." in swap.name
    }
    assert reasons == {"gate_proj": "", "up_proj": "", "down_proj": ""}
    sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 16, "num_key_value_heads": 2, "kv_channels": 8}
    config = AutoConfig.for_model("jetmoe", num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2, **sizes)
    fused = AutoModelForCausalLM.from_config(config)
    routers = [swap for swap in plan_swaps(fused) if "router" in swap.name]
    assert routers
    assert all(swap.reason.startswith("a router") for swap in routers)
