"""The start layer by layer, from files and in memory, against the start of a whole model: the same to the bit."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from edkm_cli import models
from edkm_cli.compress import compress
from edkm_cli.distributed import ALONE
from edkm_cli.export.checkpoint import DenseFormat
from edkm_cli.format import QuantizationSpec
from edkm_cli.initialize import layers as streaming
from edkm_cli.initialize.build import Recipe, Steps, initialize, restore
from edkm_cli.initialize.embeddings import compensating_rounding
from edkm_cli.initialize.importance import collect
from edkm_cli.initialize.kept import KeptStart, tensors_of
from edkm_cli.initialize.layers import HiddenStates, Layers
from edkm_cli.initialize.reconstruct import reconstruct
from edkm_cli.initialize.sharded import open_layers
from edkm_cli.model_files import stored_dtypes
from edkm_cli.nn.allocation import choose, rises_of, tried_bits
from edkm_cli.nn.clustered import Clustering, hold, lut_layers
from edkm_cli.nn.hooks import decoder_layers
from edkm_cli.nn.swap import palettize_embeddings, plan_swaps
from edkm_cli.runtime.experts import split_experts
from families import FAMILIES, family
from helpers import cluster, clustered_linear_of, importance_of, settings, tiny_llama, tiny_qwen


def texts(count, length, seed=0):
    return list(torch.randint(0, 257, (count, 1, length), generator=torch.Generator().manual_seed(seed)))


def saved(model, directory):
    model.save_pretrained(directory)
    return models.resolve(str(directory))


def opened(source):
    layers = open_layers(source, dtype=torch.float32, device="cpu")
    assert layers is not None
    assert layers.streamed
    return layers


def recipe_of(model, **changes):
    swaps = plan_swaps(model, embedding_bits=6)
    spec = QuantizationSpec(3, "row:1", "float16", 6, [swap.name for swap in swaps if swap.reason])
    settings = {"importance": "gradient", "average_bits": 3.3, "passes": 1, "holds": True, **changes}
    return Recipe(swaps, spec, Clustering(3, "row:1", "float16"), **settings)


def plain_start(model, recipe, calibration, fitting):
    """What `initialize` gives, with the whole model, its importance and its dense weights in memory."""
    linears = [swap for swap in recipe.swaps if swap.clustered]
    names, kind = [swap.name for swap in linears], recipe.importance
    importance = importance_of(model, names, calibration, kind=kind, moments=["lm_head", "model.embed_tokens"])
    bits = dict.fromkeys(names, recipe.spec.bits)
    if recipe.average_bits:
        rises = {}
        for name in names:
            weight, about = model.get_submodule(name).weight, {"granularity": recipe.spec.granularity}
            starts = {
                bits: replace(recipe.clustering.grid, bits=bits).start(weight, importance=importance[name], **about)
                for bits in tried_bits(recipe.average_bits)
            }
            rises[name] = rises_of(name, weight, importance[name], recipe.spec, starts)
        bits = choose(linears, rises, recipe.spec, recipe.average_bits)
    for name in names:
        clustering, linear = replace(recipe.clustering, bits=bits[name]), model.get_submodule(name)
        model.set_submodule(name, clustered_linear_of(linear, clustering, importance=importance.get(name), name=name))
    spec, tokens = recipe.spec.with_bits(bits), sum(batch.numel() for batch in calibration)
    palettize_embeddings(model, recipe.swaps, spec, compensating_rounding(recipe.swaps, importance, tokens))
    reconstruct(model, fitting, passes=recipe.passes, seed=recipe.seed)
    if recipe.holds:
        hold(model)
    return model


def assert_same(first, second):
    ours, theirs = tensors_of(first), tensors_of(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("kind", ["gradient", "activation"])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen])
def test_importance_is_that_of_the_whole_model(make, kind, monkeypatch):
    monkeypatch.setattr(streaming, "_MEMORY_BYTES", 5000)  # some hidden states wait on disk
    model, batches, found = make(), texts(3, 32), {}
    names = [swap.name for swap in plan_swaps(model, embedding_bits=8) if swap.clustered]
    ends = ["lm_head", "model.embed_tokens"]
    expected = importance_of(model, names, batches, kind=kind, moments=ends)
    assert (ends[1] in expected) == (kind == "gradient")
    how = {"by_layer": True, "kind": kind, "moments": ends}
    found |= collect(Layers(model), names, batches, lambda _, __, more: found.update(more), **how)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("model_type", ["falcon", "bloom", "falcon_h1", "jamba"])
def test_layers_that_give_tuples_are_run_one_by_one_as_in_the_model(model_type, tmp_path, exact_products):
    """Those of all but Jamba do."""
    model = family(model_type)
    layers = open_layers(saved(model, tmp_path / "model"), dtype=torch.float32, device="cpu") or Layers(model)
    batches, found = texts(2, 32), {}
    names = [swap.name for swap in plan_swaps(model, embedding_bits=8) if swap.clustered]
    expected = importance_of(model, names, batches, kind="gradient")
    collect(layers, names, batches, lambda _, __, more: found.update(more), by_layer=True, kind="gradient")
    assert found.keys() == expected.keys() == set(names)
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm(), name


@pytest.mark.parametrize("model_type", ["gemma", "granite"])
def test_gradients_in_the_rows_of_an_embedding_that_is_multiplied(model_type, exact_products):
    """By the module in Gemma, after it in Granite."""
    model, batches, found = family(model_type, embedding_multiplier=3.0), texts(2, 32), []
    weight = model.get_input_embeddings().weight
    name = next(name for name, value in model.named_parameters() if value is weight).removesuffix(".weight")
    for whole in (True, False):
        about = {"by_layer": not whole, "kind": "gradient", "moments": [name]}
        found.append(collect(Layers(model), [], batches, lambda *_: None, **about)[name])
    ids = torch.cat(batches)
    rows = torch.nn.Parameter(weight.detach()[ids])  # one for each token, however it enters
    embed = lambda module, args, output: output / weight[ids] * rows  # noqa: E731
    handle = model.get_input_embeddings().register_forward_hook(embed)
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    handle.remove()
    loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    gradients = torch.autograd.grad(loss, rows)[0][:, 1:].flatten(0, 1)
    expected = gradients.t() @ gradients / ids.numel()
    for products in found:
        torch.testing.assert_close(products, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"average_bits": None},
        {"importance": "activation", "average_bits": None},
        {"importance": "none", "average_bits": None},
        {"holds": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
def test_from_files_and_in_memory_it_is_the_start_of_a_whole_model(tied, changes, tmp_path, monkeypatch):
    source = saved(tiny_llama(tied=tied), tmp_path / "model")
    recipe = recipe_of(tiny_llama(tied=tied), **changes)
    texts_of = {"calibration": texts(2, 48), "fitting": texts(3, 32, seed=1)}
    expected = plain_start(tiny_llama(tied=tied), recipe, **texts_of)
    monkeypatch.setattr(streaming, "_MEMORY_BYTES", 5000)  # some hidden states wait on disk
    streamed = initialize(opened(source), recipe, **texts_of)
    assert_same(initialize(tiny_llama(tied=tied), recipe, **texts_of), expected)
    assert_same(streamed, expected)
    ids = texts(1, 16, seed=2)[0]
    assert torch.equal(streamed(ids).logits, expected(ids).logits)


class Killed(Exception):
    """What a test ends a start with."""


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_killed_start_goes_on_with_the_layer_it_was_in(done, tmp_path, monkeypatch):
    monkeypatch.setattr("edkm_cli.initialize.reconstruct._TOKENS_A_STEP", 32)  # a text a step: their order counts
    source = saved(tiny_llama(), tmp_path / "model")
    recipe = recipe_of(tiny_llama())
    texts_of = {"calibration": texts(2, 48), "fitting": texts(3, 32, seed=1)}
    expected = initialize(opened(source), recipe, **texts_of)
    worked_on = []

    class Killing(KeptStart):
        def add(self, path, layer, states):
            if len(worked_on) == done:
                raise Killed
            worked_on.append(path)
            super().add(path, layer, states)
            if len(worked_on) == done == 2:
                raise Killed

    with pytest.raises(Killed):
        initialize(opened(source), recipe, **texts_of, kept=Killing(tmp_path / "start", ALONE))
    kept = KeptStart(tmp_path / "start", ALONE)
    add = kept.add
    monkeypatch.setattr(kept, "add", lambda path, *rest: (worked_on.append(path), add(path, *rest)))
    never = Steps(collect=None)  # the importance is not measured again
    model = initialize(opened(source), recipe, **texts_of, kept=kept, steps=never)
    assert worked_on == list(decoder_layers(model))  # each once
    assert_same(model, expected)
    kept.write(model, {name: layer.clustering.bits for name, layer in lut_layers(model).items()})
    assert sorted(path.name for path in (tmp_path / "start").iterdir()) == [
        "model.layers.0.safetensors",
        "model.layers.1.safetensors",
        "rest.safetensors",
        "state.json",
    ]
    whole = KeptStart(tmp_path / "start", ALONE)
    bits = whole.state()["module_bits"]
    restored = restore(
        opened(source).model, replace(recipe, spec=recipe.spec.with_bits(bits), average_bits=None), whole
    )
    assert_same(restored, expected)


def test_a_layer_that_was_damaged_begins_the_start_anew(tmp_path):
    source, recipe = saved(tiny_llama(), tmp_path / "model"), recipe_of(tiny_llama())
    texts_of = {"calibration": texts(2, 48), "fitting": texts(3, 32, seed=1)}
    expected = initialize(opened(source), recipe, **texts_of, kept=KeptStart(tmp_path / "start", ALONE))
    damaged = tmp_path / "start" / "model.layers.0.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    kept = KeptStart(tmp_path / "start", ALONE)
    assert kept.begun() is None
    assert_same(initialize(opened(source), recipe, **texts_of, kept=kept), expected)


def test_random_numbers_go_on_where_the_start_was_written(tmp_path):
    model, kept = cluster(tiny_llama())[0], KeptStart(tmp_path / "start", ALONE)
    kept.write(model, {})
    wanted = torch.rand(4)
    kept.fill(model)
    assert torch.equal(torch.rand(4), wanted)
    kept.begin({}, {})
    wanted = torch.rand(4)
    assert KeptStart(tmp_path / "start", ALONE).begun() is not None
    assert torch.equal(torch.rand(4), wanted)
    kept.add("layer", model.model.layers[0], {})
    wanted = torch.rand(4)
    assert KeptStart(tmp_path / "start", ALONE).begun()[0] == 1
    assert torch.equal(torch.rand(4), wanted)


def test_a_model_in_files_can_be_called_and_read_as_a_whole(tmp_path):
    model = tiny_qwen()
    layers, ids = opened(saved(model, tmp_path / "model")), texts(1, 16)[0]
    with layers.at_hand() as lent, torch.no_grad():
        assert torch.equal(lent(ids).logits, model(ids).logits)
    read = list(layers.named_parameters())
    assert [name for name, _ in read] == [name for name, _ in model.named_parameters()]
    assert all(torch.equal(value, model.get_parameter(name)) for name, value in layers.named_parameters())
    inside = [p for path in layers.paths for p in layers.model.get_submodule(path).parameters()]
    assert all(parameter.is_meta for parameter in inside)


def test_hidden_states_come_back_from_memory_and_disk(monkeypatch):
    monkeypatch.setattr(streaming, "_MEMORY_BYTES", 100)
    states = HiddenStates()
    pushed = [torch.randn(2, 3, 4).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32)]
    for hidden in pushed:
        states.push(hidden)
    states.pop()
    states.push(pushed[3])
    assert torch.equal(states.some(slice(0, 1)), pushed[0])
    for index, hidden in [*enumerate(pushed)][::-1]:
        assert torch.equal(states[index], hidden)
        assert torch.equal(states.pop(), hidden)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_each_family_is_read_layer_by_layer_or_not_at_all(kind, splits, tmp_path):
    model = family(kind)
    source = replace(saved(model, tmp_path / "model"), splits=splits)
    layers = open_layers(source, dtype=torch.float32, device="cpu")
    if layers is None:
        return
    if splits:
        split_experts(model)
    ids = texts(1, 16)[0]
    with layers.at_hand() as lent, torch.no_grad():
        assert torch.equal(lent(ids, use_cache=False).logits, model.eval()(ids, use_cache=False).logits)
    assert layers.paths == list(decoder_layers(model))


def test_a_run_killed_in_its_start_ends_with_the_same_weights(model_directory, text_file, tmp_path, monkeypatch):
    def run(name, **options):
        return compress(settings(model_directory, text_file, tmp_path / name, steps=0, save_every=1), **options)

    run("whole")
    add = KeptStart.add
    monkeypatch.setattr(KeptStart, "add", lambda *arguments: (add(*arguments), _kill()))
    with pytest.raises(Killed):
        run("killed")
    worked_on = []
    monkeypatch.setattr(KeptStart, "add", lambda kept, path, *rest: (worked_on.append(path), add(kept, path, *rest)))
    run("killed", resume=True)
    assert worked_on == ["model.layers.1"]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def _kill():
    raise Killed


def test_what_transformers_keeps_in_float32_is_read_and_stored_so(tmp_path):
    model = family("deepseek_v3", torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_submodule("model.layers.1.mlp.gate").register_buffer("e_score_correction_bias", 7 + torch.arange(4) / 100)
    directory = saved(model, tmp_path / "model")
    layers = open_layers(directory, dtype=torch.bfloat16, device="cpu")
    expected = AutoModelForCausalLM.from_pretrained(directory.location, dtype=torch.bfloat16).get_buffer(name)
    with layers.whole("model.layers.1"):
        found = layers.model.get_buffer(name)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert name in DenseFormat.of(layers, torch.bfloat16, {}).wider


def test_layers_whose_tensors_the_files_name_are_not_read_once_more(tmp_path, monkeypatch):
    source = saved(tiny_llama(), tmp_path / "model")
    layers = opened(source)
    monkeypatch.setattr(layers, "named_parameters", lambda: pytest.fail("all layers were read"))
    assert DenseFormat.of(layers, torch.bfloat16, stored_dtypes(source.path)).wider
