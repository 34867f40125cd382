"""LoRA under clustering: what trains, what it trains to, the free teacher, and adapters that peft loads."""

import copy

import pytest
import torch
from peft import PeftModel

from edkm_cli.clustering import round_lut
from edkm_cli.errors import UserError
from edkm_cli.hf import load
from edkm_cli.nn.clustered import ClusteredLinear, Clustering, clustered_layers
from edkm_cli.nn.lora import ClusteredLora, add_lora, dense_weights, lora_layers, merge_lora, save_adapter
from families import family
from helpers import cluster, export, tiny_llama

MODES = ["straight-through", "hard", "soft"]
GRANULARITIES = ["tensor", "row:1", "row:4", "block:4x8"]


def lora_model(*, dtype=torch.float32, rank=4, seed=0, updated=True, **options):
    """A clustered tiny LLaMA with LoRA; `updated`: B is not zero, as after some training."""
    model, spec = cluster(tiny_llama(bias=True).to(dtype), **options)
    add_lora(model, rank=rank, alpha=2.0 * rank, seed=seed)
    if updated:
        generator = torch.Generator().manual_seed(9)
        for layer in lora_layers(model).values():
            torch.nn.init.normal_(layer.low_rank().b, std=0.02, generator=generator)
    return model, spec


def lora_layer(mode, method, granularity="row:1", dtype=torch.float32):
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 16).to(dtype)
    clustering = Clustering(3, granularity, "float16", method=method, mode=mode, iterations=2)
    model = torch.nn.Sequential(ClusteredLinear.from_linear(linear, clustering, temperature=0.05, name="layer"))
    add_lora(model, rank=3, alpha=6)
    torch.nn.init.normal_(model[0].low_rank().b, std=0.02, generator=torch.Generator().manual_seed(1))
    return model[0].train()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_closed_form_and_the_dense_reference_train_alike(mode, granularity):
    fast, dense = lora_layer(mode, "edkm", granularity), lora_layer(mode, "dkm", granularity)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    for layer in (fast, dense):
        layer(x).square().sum().backward()
        assert layer.weight.grad is layer.bias.grad is None
    torch.testing.assert_close(fast(x), dense(x), rtol=1e-5, atol=1e-6)
    trained = [(a, b) for a, b in zip(fast.parameters(), dense.parameters(), strict=True) if a.requires_grad]
    assert len(trained) == (3 if mode == "straight-through" else 2)
    for a, b in trained:
        torch.testing.assert_close(a.grad, b.grad, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_only_updates_and_trained_entries_require_gradients_and_names_stay(mode):
    plain, _ = cluster(tiny_llama(bias=True), mode=mode, skip=("model.layers.1.mlp.up_proj",))
    model = copy.deepcopy(plain)
    add_lora(model, rank=4, alpha=8.0)
    names = {name for name, _ in model.named_parameters()}
    added = names - {name for name, _ in plain.named_parameters()}
    paths = list(clustered_layers(plain))
    assert added == {f"{path}.lora_{part}.default.weight" for path in paths for part in "AB"}
    assert list(lora_layers(model)) == paths == list(clustered_layers(model))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    entries = {f"{path}.centroids" for path in paths} if mode == "straight-through" else set()
    assert trained == added | entries


def test_of_a_model_with_fused_experts_every_clustered_layer_and_nothing_else_gets_an_update(tmp_path):
    """peft would take `mlp.down_proj` of the first, dense layer for the experts' fused parameter of that name."""
    model, spec = cluster(family("deepseek_v3"))
    paths = list(clustered_layers(model))
    assert "model.layers.0.mlp.down_proj" in paths
    add_lora(model, rank=2, alpha=4.0)
    assert list(lora_layers(model)) == paths
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not [name for name in trained if ".experts." in name]
    ids = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(3))
    for layer in lora_layers(model).values():
        torch.nn.init.normal_(layer.low_rank().b, std=0.02, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(load(export(model, spec, tmp_path))(ids).logits, model(ids).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_update_changes_nothing(dtype, ids):
    plain, _ = cluster(tiny_llama(bias=True).to(dtype))
    model, _ = lora_model(dtype=dtype, updated=False)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    for train in (model, plain):
        train.train()
    assert torch.equal(model(ids).logits, plain(ids).logits)
    low_rank = next(iter(lora_layers(model).values())).low_rank()
    assert low_rank.a.dtype == low_rank.b.dtype == torch.float32


def test_the_start_depends_on_seed_and_name_only_and_not_on_which_part_is_injected():
    def starts(model):
        return {name: layer.low_rank().a.detach() for name, layer in lora_layers(model).items()}

    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = starts(lora_model(seed=5, updated=False)[0])
    torch.set_rng_state(state)
    drawn = torch.rand(1)
    torch.set_rng_state(state)
    parts, _ = cluster(tiny_llama(bias=True))
    torch.set_rng_state(state)
    for block in reversed(parts.model.layers):
        add_lora(block, rank=4, alpha=8.0, seed=5)
    assert torch.equal(torch.rand(1), drawn)  # the global generator was left alone
    second, other = starts(parts), starts(lora_model(seed=6, updated=False)[0])
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    same_shape = [first[f"model.layers.{i}.self_attn.q_proj"] for i in (0, 1)]
    assert not torch.equal(*same_shape)
    bound = 1 / 24**0.5  # of peft's Kaiming uniform, for 24 inputs
    assert bound / 2 < same_shape[0].abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("granularity", ["row:1", "block:4x8"])
def test_snapped_is_the_nearest_entry_of_the_float32_sum(dtype, granularity):
    model, _ = lora_model(dtype=dtype, granularity=granularity)
    moved = 0
    for layer in lora_layers(model).values():
        a, b, scaling = layer.low_rank()
        assert scaling == 2.0
        total = torch.addmm(layer.weight.float(), b, a, alpha=2.0)
        indices, lut = layer.snapped()
        rows, columns = (1, total.shape[1]) if granularity == "row:1" else (4, 8)
        row, column = torch.meshgrid(*(torch.arange(size) for size in total.shape), indexing="ij")
        group = (row // rows) * (total.shape[1] // columns) + column // columns
        entries = round_lut(layer.centroids.detach(), "float16")[group]  # (out, in, k)
        nearest = entries.gather(2, (total[..., None] - entries).abs().argmin(2, keepdim=True))[..., 0]
        assert torch.equal(layer.hard_weight(), nearest)
        assert torch.equal(lut.float()[group].gather(2, indices[..., None].long())[..., 0], nearest)
        plain = entries.gather(2, (layer.weight.float()[..., None] - entries).abs().argmin(2, keepdim=True))[..., 0]
        moved += int((plain != nearest).sum())
    assert moved > 50


@pytest.mark.parametrize(("mode", "dtype"), [*((m, torch.float32) for m in MODES), (MODES[0], torch.bfloat16)])
def test_training_lowers_the_loss_changes_only_what_trains_and_exports_what_it_evaluates(mode, dtype, ids, tmp_path):
    model, spec = lora_model(mode=mode, dtype=dtype, updated=False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    model.train()
    for _ in range(12):
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        for layer in clustered_layers(model).values():
            layer.commit()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    parts = ("lora_A.default.weight", "lora_B.default.weight", "centroids")
    assert changed == {name for name in before if name.endswith(parts)}
    loaded = load(export(model.eval(), spec, tmp_path / "out"), dtype=dtype)
    for name, layer in clustered_layers(model).items():
        assert torch.equal(loaded.get_submodule(name).dequantize(), layer.hard_weight())
    if dtype == torch.float32:  # a 16-bit cast of the whole model has rounded its rotary frequencies too
        assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_micro_batches_and_checkpointing_give_the_batch_s_gradients(checkpointing):
    model, _ = lora_model()
    model.train()
    ids = torch.randint(0, 257, (4, 17), generator=torch.Generator().manual_seed(3))

    def gradients(batches):
        model.zero_grad()
        for batch in batches:
            (model(batch, labels=batch).loss * len(batch) / 4).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}

    whole = gradients([ids])
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        again = gradients([ids])
        assert all(torch.equal(again[name], whole[name]) for name in whole)
    parts = gradients(ids.split(1))
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["hard", "soft"])
def test_the_iterations_of_a_step_are_shared_until_an_update_changes(mode):
    layer = lora_layer(mode, "edkm")
    first = layer._new_centroids()
    assert layer._new_centroids() is first
    with torch.no_grad():
        layer.low_rank().b.add_(0.05)
    second = layer._new_centroids()
    assert not torch.equal(second, first)
    layer.commit()
    assert torch.equal(layer.centroids, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_plain_weights_are_the_uncompressed_model(dtype, autocast, ids):
    dense = tiny_llama(bias=True).to(dtype)
    model, _ = lora_model(dtype=dtype, embedding_bits=16)
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), torch.no_grad():
        expected = dense(ids).logits
        with dense_weights(model):
            assert torch.equal(model(ids).logits, expected)
            assert not model.training
        assert model.training
        assert not torch.equal(model(ids).logits, expected)


def test_plain_weights_end_with_the_block_and_need_frozen_layers(ids):
    model, _ = lora_model()
    expected = model(ids).logits
    with pytest.raises(RuntimeError, match="stop"), dense_weights(model):
        raise RuntimeError("stop")
    assert torch.equal(model(ids).logits, expected)
    plain, _ = cluster(tiny_llama())
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj is trained"), dense_weights(plain):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_keeps_every_index_and_trains_as_usual(dtype, ids):
    model, _ = lora_model(dtype=dtype)
    expected = {name: layer.snapped() for name, layer in clustered_layers(model).items()}
    logits = model(ids).logits
    merge_lora(model)
    assert not lora_layers(model)
    for name, layer in clustered_layers(model).items():
        assert all(torch.equal(a, b) for a, b in zip(layer.snapped(), expected[name], strict=True))
    assert torch.equal(model(ids).logits, logits)
    model.train()(ids, labels=ids).loss.backward()
    assert all(layer.weight.grad is not None for layer in clustered_layers(model).values())


def test_peft_loads_the_adapter_into_the_uncompressed_model(tmp_path, ids):
    model, _ = lora_model(skip=("model.layers.1.mlp.up_proj",))
    save_adapter(model, tmp_path, base_model="some/base")
    adapted = PeftModel.from_pretrained(tiny_llama(bias=True), tmp_path)
    assert adapted.peft_config["default"].base_model_name_or_path == "some/base"
    merged = adapted.merge_and_unload()
    for name, layer in lora_layers(model).items():
        torch.testing.assert_close(merged.get_submodule(name).weight, layer.effective_weight(), rtol=1e-6, atol=1e-7)
    untouched = "model.layers.1.mlp.up_proj"
    assert torch.equal(merged.get_submodule(untouched).weight, model.get_submodule(untouched).weight)


def test_a_copy_has_updates_of_its_own(ids):
    model, _ = lora_model()
    before = model(ids).logits
    for layer in lora_layers(copy.deepcopy(model)).values():
        torch.nn.init.ones_(layer.low_rank().b)
    assert torch.equal(model(ids).logits, before)


def test_a_part_without_clustered_layers_is_frozen_and_bad_numbers_are_user_errors():
    norm = torch.nn.LayerNorm(4)
    add_lora(norm, rank=2, alpha=4.0)
    assert not norm.weight.requires_grad
    model, _ = cluster(tiny_llama())
    with pytest.raises(UserError, match=r"--lora-rank must be at least 1.*got 0"):
        add_lora(model, rank=0, alpha=1.0)
    for alpha in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match=r"--lora-alpha must be a positive number"):
            add_lora(model, rank=2, alpha=alpha)
    assert not any(isinstance(module, ClusteredLora) for module in model.modules())
