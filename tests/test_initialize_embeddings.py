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
from edkm_cli.initialize.embeddings import compensating_rounding, rounded_embeddings
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.swap import Swap, plan_swaps
from edkm_cli.packing import unpack
from edkm_cli.runtime.embeddings import NEAREST, PalettizedEmbedding, PalettizedHead, to_nearest
from helpers import settings, tiny_llama

HEAD = Swap("lm_head", "head", (30, 16))


def problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(30, 16, generator=generator)
    inputs = torch.randn(200, 16, generator=generator) @ torch.randn(16, 16, generator=generator)
    scale = weight.unflatten(1, (2, 8)).abs().amax(2) / 7
    return weight, inputs.t() @ inputs / 200, (scale, torch.rand(16, generator=generator) + 0.7)


def steps_of(about):
    """The scale of each number, by those of a row's groups and the columns' factors."""
    scale, factors = about
    return scale.repeat_interleave(8, 1) * factors


def one_by_one(weight, moment, scale, low, high, damping):
    """The same in float64, as GPTQ states it: after each column the inverse of what is left is formed anew."""
    moment = moment.double().clone()
    moment.diagonal().add_(damping * moment.diagonal().mean())
    left, levels = weight.double().clone(), torch.zeros_like(weight)
    open_columns = moment.diagonal().argsort(descending=True, stable=True).tolist()
    while open_columns:
        inverse = torch.linalg.inv(moment[open_columns][:, open_columns])
        column = open_columns[0]
        levels[:, column] = (left[:, column] / scale[:, column]).round().clamp(low, high).float()
        error = left[:, column] - levels[:, column] * scale[:, column]
        left[:, open_columns] -= error[:, None] * inverse[0] / inverse[0, 0]
        open_columns = open_columns[1:]
    return levels


@pytest.mark.parametrize(("tied", "damping"), [(False, 0.01), (True, 0.1)])
def test_levels_are_those_of_the_reference(tied, damping):
    weight, moment, about = problem()
    swaps = [Swap("embed", "embedding", (30, 16)), Swap("lm_head", "head", (30, 16), tied=tied)]
    rounding = compensating_rounding(swaps, {"lm_head": moment}, 1 << 20)
    assert list(rounding) == ["embed" if tied else "lm_head"]
    found, _ = next(iter(rounding.values())).levels(weight, *about, -8, 7)
    assert torch.equal(found, one_by_one(weight, moment, steps_of(about), -8, 7, damping))


@pytest.mark.parametrize("tied", [False, True])
def test_an_input_embedding_is_rounded_by_the_gradients_in_its_rows(tied):
    weight, entering, about = problem(4)
    leaving = problem(5)[1]
    swaps = [Swap("embed", "embedding", (30, 16)), Swap("lm_head", "head", (30, 16), tied=tied)]
    rounding = compensating_rounding(swaps, {"embed": entering, "lm_head": leaving}, 1 << 20)
    assert set(rounding) == ({"embed"} if tied else {"embed", "lm_head"})
    cost = leaving + 2 * entering if tied else entering
    found, errors = rounding["embed"].levels(weight, *about, -8, 7)
    assert torch.equal(found, one_by_one(weight, cost, steps_of(about), -8, 7, 0.01))
    difference = to_nearest(weight, *about, -8, 7)[0] * steps_of(about) - weight
    assert float(errors.sum()) < 0.75 * float(((difference @ cost) * difference).sum())


def test_logits_are_nearer_than_with_each_number_rounded_by_itself():
    weight, moment, about = problem(1)
    (rounding,) = compensating_rounding([HEAD], {"lm_head": moment}, 1 << 20).values()

    def error(levels):
        difference = levels * steps_of(about) - weight
        return float(((difference @ moment) * difference).sum())

    assert error(rounding.levels(weight, *about, -8, 7)[0]) < 0.6 * error(to_nearest(weight, *about, -8, 7)[0])


def test_without_inputs_or_with_a_dense_head_numbers_are_rounded_by_themselves():
    assert compensating_rounding([HEAD], {}, 1 << 20) == {}
    dense = Swap("lm_head", "head", (30, 16), reason="matches --skip")
    assert rounded_embeddings([dense]) == {}
    assert compensating_rounding([dense], {"lm_head": torch.eye(16)}, 1 << 20) == {}


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


def packed_head(weight, rounding=NEAREST, *, bits=5, factors=True):
    """An output embedding with the weight."""
    dense = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head = PalettizedHead(dense, QuantizationSpec(3, "row:1", "float16", bits, embedding_factors=factors))
    head.fill(weight, rounding)
    return head


def error(head, weight, moment):
    difference = head.dequantize() - weight
    return ((difference @ moment) * difference).sum(1)


def test_large_columns_get_longer_steps_that_make_all_others_finer():
    weight, moment, _ = problem(2)
    weight[:, 3] *= 6
    (rounding,) = compensating_rounding([HEAD], {"lm_head": moment}, 1 << 20).values()
    with_them, without = packed_head(weight, rounding), packed_head(weight, rounding._replace(powers=(0.0,)))
    assert with_them.factors.argmax() == 3
    assert float(with_them.factors[3]) > 1.5 * float(with_them.factors.median())
    assert set(without.factors.tolist()) == {1.0}
    assert error(with_them, weight, moment).sum() < 0.7 * error(without, weight, moment).sum()


def test_factors_are_those_of_the_least_error():
    weight, moment, _ = problem(7)
    weight *= torch.logspace(-0.3, 0.5, 16)
    (rounding,) = compensating_rounding([HEAD], {"lm_head": moment}, 1 << 20).values()
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(16)
    heads = [packed_head(weight, rounding._replace(powers=(power,))) for power in rounding.powers]
    errors = [float(error(head, weight, damped).sum()) for head in heads]
    found = packed_head(weight, rounding)
    assert float(error(found, weight, damped).sum()) == min(errors) < 0.9 * errors[0]


def test_each_row_takes_the_step_that_keeps_its_logits_best():
    weight, moment, _ = problem(3)
    (rounding,) = compensating_rounding([HEAD], {"lm_head": moment}, 1 << 20).values()
    rounding = rounding._replace(powers=(0.0,))
    damped = moment + 0.01 * moment.diagonal().mean() * torch.eye(16)
    heads = [packed_head(weight, rounding._replace(tops=(top,)), bits=3) for top in rounding.tops]
    found = error(packed_head(weight, rounding, bits=3), weight, damped)
    best = torch.stack([error(head, weight, damped) for head in heads]).min(0).values
    torch.testing.assert_close(found, best, rtol=1e-4, atol=0)
    assert float(best.sum()) < 0.95 * float(error(heads[rounding.tops.index(1.0)], weight, damped).sum())


@pytest.mark.parametrize("bits", [2, 3, 5, 6])
def test_the_largest_number_gets_the_level_that_has_no_opposite(bits):
    weight, middle = torch.randn(40, 64, generator=torch.Generator().manual_seed(6)), 2 ** (bits - 1)
    head = packed_head(weight, bits=bits)
    codes = unpack(head.indices, bits, 64)
    largest = weight.abs().argmax(1, keepdim=True)
    assert torch.equal(head.scale < 0, weight.gather(1, largest) > 0)
    assert (codes.gather(1, largest) <= 1).all()
    assert float((codes.gather(1, largest) == 0).float().mean()) > 0.5
    values = head.scale * (codes.int() - middle)
    assert torch.equal(head.dequantize(), values)
    torch.testing.assert_close(values.gather(1, largest), weight.gather(1, largest))
    symmetric = weight.gather(1, largest) / (middle - 1)
    before = (weight / symmetric).round() * symmetric - weight
    assert (((values - weight).square().sum(1)) <= before.square().sum(1) * 1.0001).all()


def test_columns_of_one_size_and_empty_ones_get_equal_factors():
    signs = torch.randn(64, 16).sign()
    assert len(set(packed_head(signs, NEAREST._replace(powers=(0.0, 0.5))).factors.tolist())) == 1
    signs[:, 2] = 0
    head = packed_head(signs, NEAREST._replace(powers=(0.5,)))
    assert (head.factors > 0).all()
    assert head.factors.isfinite().all()
    torch.testing.assert_close(head.dequantize(), signs)
    assert not packed_head(torch.zeros(64, 16), NEAREST._replace(powers=(0.0, 0.5))).dequantize().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_enters_is_multiplied_with_factors_or_the_weight_is(dtype):
    generator = torch.Generator().manual_seed(8)
    weight = torch.randn(30, 16, generator=generator) * torch.logspace(-1, 1, 16)
    head = packed_head(weight, NEAREST._replace(powers=(0.5,)))
    codes = unpack(head.indices, 5, 16).int() - 16
    dense = head.scale * codes * head.factors.float()
    torch.testing.assert_close(head.dequantize(), dense, rtol=1e-6, atol=0)
    x = torch.randn(5, 16, generator=generator).to(dtype)
    entering = x * head.factors.to(dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    expected = entering.double() @ (head.scale * codes).double().T
    torch.testing.assert_close(head(x).double(), expected, rtol=tolerance, atol=tolerance)
    embedding = PalettizedEmbedding(
        torch.nn.Embedding(30, 16, dtype=dtype), QuantizationSpec(3, "row:1", "float16", 5, embedding_factors=True)
    )
    embedding.load_state_dict(head.state_dict())
    assert torch.equal(embedding(torch.arange(30)), head.dequantize(dtype))


def test_factors_are_stored_and_checked(model_directory, text_file, ids, tmp_path):
    options = {"steps": 0, "start": "reconstructed", "embedding_bits": 5, "lut_dtype": "float16"}
    compress(settings(model_directory, text_file, tmp_path / "out", **options))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format_version"] == 9
    model = load(tmp_path / "out", dtype="bfloat16")
    assert model.get_input_embeddings().factors.dtype == torch.bfloat16
    model = load(tmp_path / "out")
    packed, factors = model(ids).logits, model.get_input_embeddings().factors
    assert factors.dtype == torch.bfloat16
    torch.testing.assert_close(model.dequantize()(ids).logits, packed, atol=1e-5, rtol=1e-5)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    name = next(name for name in tensors if name.endswith(".factors"))
    (tmp_path / "out" / "checksums.json").unlink()

    def stored(factors, version):
        """The checkpoint with other factors, said to be of a version."""
        save_file({**tensors, name: factors}, tmp_path / "out" / "model.safetensors", {"format": "pt"})
        config["quantization_config"]["format_version"] = version
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
        return tmp_path / "out"

    whole = torch.full_like(factors, 2)
    newer = load(stored(whole, 9))(ids).logits
    torch.testing.assert_close(load(stored(whole.to(torch.uint8), 6))(ids).logits, newer)
    with pytest.raises(UserError, match="factors must be 1, 2 or 4"):
        load(stored((whole + 1).to(torch.uint8), 6))
    with pytest.raises(UserError, match="factors must be positive"):
        load(stored(-whole, 9))
    with pytest.raises(UserError, match="factors must be finite"):
        load(stored(whole * torch.nan, 9))
    with pytest.raises(UserError, match=r"factors must be uint8 \(24,\), got bfloat16"):
        load(stored(whole, 6))


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


def test_rows_of_small_numbers_keep_them_in_float16():
    weight = 3e-4 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    spec = QuantizationSpec(
        bits=4, palette="affine", granularity="block:1x32", embedding_bits=8, embedding_group=32, lut_dtype="float16"
    )
    layer = PalettizedEmbedding(torch.nn.Embedding(64, 64), spec)
    layer.fill(weight)
    assert (layer.dequantize() - weight).norm() < 0.01 * weight.norm()
