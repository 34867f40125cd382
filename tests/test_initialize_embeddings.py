"""The errors of an embedding's row compensate one another: as a reference in float64 does it, and better than rounding to
nearest on what is seen."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from edkm_cli import load
from edkm_cli.compress import compress
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec, read_spec
from edkm_cli.initialize.build import Recipe, initialize
from edkm_cli.initialize.embeddings import column_factors, compensating_rounding, rounded_embeddings
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.swap import Swap, plan_swaps
from edkm_cli.runtime.embeddings import NEAREST, PalettizedEmbedding, PalettizedHead, Rounding, to_nearest
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
    found, _ = next(iter(rounding.values())).levels(weight, scale, 7)
    assert torch.equal(found, one_by_one(weight, moment, scale, 7, damping))


@pytest.mark.parametrize("tied", [False, True])
def test_an_input_embedding_is_rounded_by_the_gradients_in_its_rows(tied):
    weight, entering, scale = problem(4)
    leaving = problem(5)[1]
    swaps = [Swap("embed", "embedding", (30, 16)), Swap("lm_head", "head", (30, 16), tied=tied)]
    rounding = compensating_rounding(swaps, {"embed": entering, "lm_head": leaving})
    assert set(rounding) == ({"embed"} if tied else {"embed", "lm_head"})
    cost = leaving + 2 * entering if tied else entering
    found, errors = rounding["embed"].levels(weight, scale, 7)
    assert torch.equal(found, one_by_one(weight, cost, scale, 7, 0.01))
    difference = to_nearest(weight, scale, 7)[0] * scale - weight
    assert float(errors.sum()) < 0.75 * float(((difference @ cost) * difference).sum())


def test_logits_are_nearer_than_with_each_number_rounded_by_itself():
    weight, moment, scale = problem(1)
    (rounding,) = compensating_rounding([HEAD], {"lm_head": moment}).values()

    def error(levels):
        difference = levels * scale - weight
        return float(((difference @ moment) * difference).sum())

    assert error(rounding.levels(weight, scale, 7)[0]) < 0.6 * error(to_nearest(weight, scale, 7)[0])


def test_without_inputs_or_with_a_dense_head_numbers_are_rounded_by_themselves():
    assert compensating_rounding([HEAD], {}) == {}
    dense = Swap("lm_head", "head", (30, 16), reason="matches --skip")
    assert rounded_embeddings([dense]) == {}
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


def packed_head(weight, rounding=NEAREST, *, factors=True):
    """An output embedding of five bits with the weight."""
    dense = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head = PalettizedHead(dense, QuantizationSpec(3, "row:1", "float16", 5, embedding_factors=factors))
    head.fill(weight, rounding)
    return head


def test_large_columns_get_factors_that_make_all_others_finer():
    weight, moment, _ = problem(2)
    weight[:, 3] *= 6
    (rounding,) = compensating_rounding([HEAD], {"lm_head": moment}).values()
    factors = rounding.factors(weight)
    assert factors[3] > 1
    assert int((factors > 1).sum()) <= 2

    def error(head):
        difference = head.dequantize() - weight
        return float(((difference @ moment) * difference).sum())

    with_them, without = packed_head(weight, rounding), packed_head(weight, rounding._replace(factors=None))
    assert torch.equal(with_them.factors, factors)
    assert set(without.factors.tolist()) == {1}
    assert error(with_them) < 0.7 * error(without)


def test_each_row_takes_the_step_that_keeps_its_logits_best():
    weight, moment, _ = problem(3)
    weight[:, 0] *= 3  # of which a step of the largest number makes a coarse one
    (rounding,) = compensating_rounding([HEAD], {"lm_head": moment}).values()
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(16)

    def errors(head):
        difference = head.dequantize() - weight
        return ((difference @ damped) * difference).sum(1)

    heads = [packed_head(weight, rounding._replace(factors=None, tops=(top,))) for top in rounding.tops]
    found = packed_head(weight, rounding._replace(factors=None))
    best = torch.stack([errors(head) for head in heads]).min(0).values
    torch.testing.assert_close(errors(found), best, rtol=1e-4, atol=0)
    assert float(best.sum()) < 0.95 * float(errors(heads[rounding.tops.index(1.0)]).sum())


def test_equal_columns_get_no_factors():
    signs = torch.randn(64, 16).sign()
    assert set(column_factors(signs, torch.ones(16)).tolist()) == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_change_what_is_multiplied_and_no_rounding(dtype):
    factors = torch.tensor([1, 2, 4, 1] * 4, dtype=torch.uint8)
    weight = torch.randn(30, 16) * factors
    head = packed_head(weight, Rounding(factors=lambda weight: factors))
    plain = packed_head(weight / factors, factors=False)
    assert torch.equal(head.indices, plain.indices)
    assert torch.equal(head.scale, plain.scale)
    assert torch.equal(head.dequantize(), plain.dequantize() * factors)
    x = torch.randn(5, 16).to(dtype)
    assert torch.equal(head(x), plain(x * factors))
    embedding = PalettizedEmbedding(
        torch.nn.Embedding(30, 16, dtype=dtype), QuantizationSpec(3, "row:1", "float16", 5, embedding_factors=True)
    )
    embedding.load_state_dict(head.state_dict())
    assert torch.equal(embedding(torch.arange(30)), head.dequantize(dtype))


def test_factors_are_stored_and_checked(model_directory, text_file, ids, tmp_path):
    options = {"steps": 0, "start": "reconstructed", "embedding_bits": 5, "lut_dtype": "float16"}
    compress(settings(model_directory, text_file, tmp_path / "out", **options))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["format_version"] == 6
    model = load(tmp_path / "out")
    packed = model(ids).logits
    factors = model.get_input_embeddings().factors
    assert factors.dtype == torch.uint8
    torch.testing.assert_close(model.dequantize()(ids).logits, packed, atol=1e-5, rtol=1e-5)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".factors"))
    save_file(
        {**tensors, name: torch.full_like(tensors[name], 3)}, tmp_path / "out" / "model.safetensors", {"format": "pt"}
    )
    (tmp_path / "out" / "checksums.json").unlink()
    with pytest.raises(UserError, match="factors must be 1, 2 or 4"):
        load(tmp_path / "out")


def test_by_default_embeddings_give_bits_to_the_linears(model_directory, text_file, tmp_path):
    def run(name, **changes):
        config = settings(model_directory, text_file, tmp_path / name, steps=0, start="reconstructed", **changes)
        report = compress(config)
        return report, read_spec(tmp_path / name)

    uniform, plain = run("uniform", allocation="uniform")
    ours, spec = run("ours")
    assert plain.embedding_bits == 8
    assert spec.embedding_bits in (4, 5, 6)
    assert ours["decoder_bits_per_weight"] > uniform["decoder_bits_per_weight"]
    assert ours["model_bits_per_weight"] <= 1.01 * uniform["model_bits_per_weight"]
    assert run("asked", embedding_bits=8)[1].embedding_bits == 8
