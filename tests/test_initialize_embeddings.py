"""The output embedding's errors compensate one another: as a reference in float64 does it, and better than rounding to
nearest on the inputs that it sees."""

import pytest
import torch

from edkm_cli.compress import compress
from edkm_cli.format import QuantizationSpec, read_spec
from edkm_cli.initialize.build import Recipe, initialize
from edkm_cli.initialize.embeddings import compensating_rounding, output_embedding
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.swap import Swap, plan_swaps
from edkm_cli.runtime.palettized import to_nearest
from helpers import settings, tiny_llama

HEAD = Swap("lm_head", "head", (30, 16))


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(30, 16, generator=generator)
    inputs = torch.randn(200, 16, generator=generator) @ torch.randn(16, 16, generator=generator)
    scale = (weight.abs().amax(1, keepdim=True) / 7).expand(-1, 16)
    return weight, inputs.t() @ inputs / 200, scale


def one_by_one(weight, moment, scale, top, damping):
    """The same in float64, as GPTQ states it: after each column the inverse of what is left is formed anew."""
    moment = moment.double().clone()
    moment.diagonal().add_(damping * moment.diagonal().mean())
    left, levels = weight.double().clone(), torch.zeros_like(weight)
    open_columns = moment.diagonal().argsort(descending=True, stable=True).tolist()
    while open_columns:
        inverse = torch.linalg.inv(moment[open_columns][:, open_columns])
        column = open_columns[0]
        levels[:, column] = (left[:, column] / scale[:, column]).round().clamp(-top, top).float()
        error = left[:, column] - levels[:, column] * scale[:, column]
        left[:, open_columns] -= error[:, None] * inverse[0] / inverse[0, 0]
        open_columns = open_columns[1:]
    return levels


@pytest.mark.parametrize(("tied", "damping"), [(False, 0.01), (True, 0.1)])
def test_levels_are_those_of_the_reference(tied, damping):
    weight, moment, scale = problem()
    swaps = [Swap("embed", "embedding", (30, 16)), Swap("lm_head", "head", (30, 16), tied=tied)]
    rounding = compensating_rounding(swaps, {"lm_head": moment})
    assert list(rounding) == ["embed" if tied else "lm_head"]
    found = next(iter(rounding.values()))(weight, scale, 7)
    assert torch.equal(found, one_by_one(weight, moment, scale, 7, damping))


def test_logits_are_nearer_than_with_each_number_rounded_by_itself():
    weight, moment, scale = problem(1)
    (rounded,) = compensating_rounding([HEAD], {"lm_head": moment}).values()

    def error(levels):
        difference = levels * scale - weight
        return float(((difference @ moment) * difference).sum())

    assert error(rounded(weight, scale, 7)) < 0.6 * error(to_nearest(weight, scale, 7))


def test_without_inputs_or_with_a_dense_head_numbers_are_rounded_by_themselves():
    assert compensating_rounding([HEAD], {}) == {}
    dense = Swap("lm_head", "head", (30, 16), reason="matches --skip")
    assert output_embedding([dense]) == []
    assert compensating_rounding([dense], {"lm_head": torch.eye(16)}) == {}


def test_a_model_keeps_its_logits_better(ids):
    def distance(calibration):
        model = tiny_llama(tied=False)
        expected = model(ids).logits
        swaps = [swap for swap in plan_swaps(model, embedding_bits=3) if swap.role != "linear"]
        recipe = Recipe(
            swaps,
            QuantizationSpec(3, "row:1", "float16", 3),
            Clustering(3, "row:1", "float16"),
            importance="activation",
        )
        model = initialize(model, recipe, calibration=calibration)
        return float((model.eval()(ids).logits - expected).square().mean())

    assert distance([ids]) < distance([])


def test_by_default_embeddings_give_two_bits_to_the_linears(model_directory, text_file, tmp_path):
    def run(name, **changes):
        config = settings(model_directory, text_file, tmp_path / name, steps=0, start="reconstructed", **changes)
        report = compress(config)
        return report, read_spec(tmp_path / name)

    uniform, plain = run("uniform", allocation="uniform")
    ours, spec = run("ours")
    assert (plain.embedding_bits, spec.embedding_bits) == (8, 6)
    assert ours["decoder_bits_per_weight"] > uniform["decoder_bits_per_weight"]
    assert ours["weights_bytes"] <= 1.01 * uniform["weights_bytes"]
    assert run("asked", embedding_bits=8)[1].embedding_bits == 8
