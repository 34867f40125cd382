"""The reconstructed start against its compensated one, on layers whose outputs can be computed by hand."""

import copy
from itertools import chain

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.initialize import compensate as compensation
from edkm_cli.initialize import reconstruct as reconstructing
from edkm_cli.initialize.compensate import compensate
from edkm_cli.initialize.reconstruct import _picks, reconstruct, relative_error
from edkm_cli.nn.clustered import clustered_layers
from helpers import cluster, tiny_llama, tiny_qwen


def texts(count=4, length=32):
    return list(torch.randint(0, 257, (count, 1, length), generator=torch.Generator().manual_seed(0)))


def outputs(model, ids):
    """Hidden states after each decoder layer."""
    with torch.no_grad():
        return model.eval()(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[1:-1]


def clustered(dense, **options):
    return cluster(copy.deepcopy(dense), granularity="row:1", embedding_bits=16, **options)[0]


@pytest.mark.parametrize("family", [tiny_llama, tiny_qwen])
def test_the_first_layer_comes_closer_to_what_it_gave_before(family):
    dense = family(hidden=32, inner=64) if family is tiny_llama else family()
    fitted, compensated = clustered(dense), clustered(dense)
    compensate(compensated, texts())
    reconstruct(fitted, texts(), passes=6)
    ids = torch.cat(texts())
    wanted, ours, theirs = outputs(dense, ids)[0], outputs(fitted, ids)[0], outputs(compensated, ids)[0]
    assert relative_error(ours, wanted) < 0.95 * relative_error(theirs, wanted)


def test_without_passes_errors_of_earlier_layers_are_made_up_for():
    dense = tiny_llama(hidden=32, inner=64)
    corrected, compensated = clustered(dense), clustered(dense)
    compensate(compensated, texts(16))
    reconstruct(corrected, texts(16), passes=0)
    ids = torch.cat(texts(16))
    for wanted, ours, theirs in zip(*(outputs(model, ids) for model in (dense, corrected, compensated)), strict=True):
        assert relative_error(ours, wanted) < 0.9 * relative_error(theirs, wanted)


def test_a_step_takes_short_texts_together_and_each_text_once_a_pass():
    order = torch.Generator().manual_seed(0)
    picks = list(_picks([torch.zeros(1, 300)] * 7, 2, order))
    assert [len(pick) for pick in picks] == [3, 3, 1] * 2
    assert sorted(chain(*picks[:3])) == sorted(chain(*picks[3:])) == list(range(7))
    assert list(_picks([torch.zeros(1, 4096)] * 2, 1, order)) in ([[0], [1]], [[1], [0]])


def test_tables_and_norms_train_and_flags_and_dtypes_are_given_back():
    model = clustered(tiny_llama(hidden=32, inner=64))
    before = {name: (p.detach().clone(), p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    model.train()
    reconstruct(model, texts(), passes=1)
    assert model.training
    for name, parameter in model.named_parameters():
        value, flag, dtype = before[name]
        assert (parameter.requires_grad, parameter.dtype, parameter.grad) == (flag, dtype, None)
        inside = "layers." in name
        assert torch.equal(value, parameter) != inside, name


def test_the_same_seed_gives_the_same_weights(monkeypatch):
    monkeypatch.setattr(reconstructing, "_TOKENS_A_STEP", 1)  # a text a step, so that their order counts
    dense = tiny_llama()
    states = []
    for seed in (1, 1, 2):
        model = clustered(dense)
        reconstruct(model, texts(), passes=1, seed=seed)
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_weights_in_16_bits_train_in_float32_and_are_stored_as_they_were():
    model = clustered(tiny_llama().to(torch.bfloat16))
    reconstruct(model, texts(), passes=1)
    assert {layer.weight.dtype for layer in clustered_layers(model).values()} == {torch.bfloat16}
    assert {layer.centroids.dtype for layer in clustered_layers(model).values()} == {torch.float32}


def test_weights_that_are_not_finite_are_refused():
    model = clustered(tiny_llama())
    model.model.layers[0].input_layernorm.weight.data.fill_(float("inf"))
    with pytest.raises(UserError, match="finite"):
        reconstruct(model, texts(), passes=1)


@pytest.mark.parametrize("start", [compensate, reconstruct])
def test_what_solves_for_weights_multiplies_in_float32_whatever_is_set_outside(start, monkeypatch):
    """Rounded, products in the choice of entries cost a fifth of the KL on a Xeon with AMX."""
    seen = []
    for name in ("inverse_factor", "compensated", "fitted_tables"):
        function = getattr(compensation, name)

        def noted(*args, function=function, **options):
            precisions = [getattr(torch.backends, name).matmul.fp32_precision for name in ("cuda", "mkldnn")]
            seen.append((*precisions, torch.is_autocast_enabled("cpu")))
            return function(*args, **options)

        monkeypatch.setattr(compensation, name, noted)
    monkeypatch.setattr("edkm_cli.precision.multiplies_bfloat16", lambda device: True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        start(clustered(tiny_llama()), texts())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert set(seen) == {("ieee", "ieee", False)}
