"""What all baselines share: the interface, the stored form, the count of its bits, and the walk through the blocks."""

import inspect

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.research.baselines import METHODS, load
from edkm_cli.research.baselines.blocks import BlockStream
from edkm_cli.research.baselines.grid import Uniform
from edkm_cli.research.baselines.outcome import Outcome, decoder_linears
from helpers import quantized, tiny_llama, tiny_qwen

UNIFORM = ["rtn", "gptq", "awq"]
CLUSTERED = ["kmeans", "dkm"]


def texts(*lengths):
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, 257, (1, length), generator=generator) for length in lengths]


def run(method, model=None, **options):
    model = tiny_llama() if model is None else model
    defaults = {"bits": 3, "group_size": 8, **({"steps": 2} if method == "dkm" else {})}
    return quantized(load(method), model, texts(20, 20, 13, 20), **{**defaults, **options}), model


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_one_signature(name):
    task, *own = inspect.signature(load(name).quantize).parameters.values()
    assert task.name == "task"
    assert all(one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is not one.empty for one in own)


def test_an_unknown_method_is_refused():
    with pytest.raises(UserError, match="one of rtn, gptq"):
        load("gptqq")


@pytest.mark.parametrize("method", UNIFORM + CLUSTERED)
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen])
def test_weights_take_no_more_values_than_their_bits_allow_and_the_rest_stays(method, make):
    before = make().state_dict()
    outcome, model = run(method, make())
    assert type(outcome) is Outcome
    linears = decoder_linears(model)
    assert len(linears) == 14
    for name, layer in linears.items():
        assert type(layer) is torch.nn.Linear
        groups = layer.weight.detach().reshape(-1, 8 if method in UNIFORM else layer.in_features)
        assert max(len(group.unique()) for group in groups) <= 8, name
        assert layer.weight.requires_grad
    for name, value in model.state_dict().items():
        folded = method == "awq" and ("norm" in name or "v_proj.bias" in name)
        if name.removesuffix(".weight") not in linears and not folded:
            assert torch.equal(value, before[name]), name
    assert not model.training


@pytest.mark.parametrize("method", UNIFORM + CLUSTERED)
def test_the_same_call_gives_the_same_weights(method):
    (_, first), (_, second) = run(method), run(method)
    for name, layer in decoder_linears(first).items():
        assert torch.equal(layer.weight, second.get_submodule(name).weight)


@pytest.mark.parametrize("method", UNIFORM)
def test_a_group_size_that_does_not_divide_names_the_layer_and_changes_nothing(method):
    model = tiny_llama()
    with pytest.raises(UserError, match=r"group_size must divide the 40 columns of model\.layers\.0\.mlp\.down_proj"):
        run(method, model, group_size=12)
    for name, value in tiny_llama().state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("method", UNIFORM + CLUSTERED)
@pytest.mark.parametrize("bits", [1, 9])
def test_bits_out_of_range_are_refused(method, bits):
    with pytest.raises(UserError, match=f"2 to 8, got {bits}"):
        run(method, bits=bits)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_methods_that_calibrate_refuse_to_do_without_text(method):
    with pytest.raises(UserError, match="needs calibration text"):
        quantized(load(method), tiny_llama(), [], bits=3, group_size=8)


def test_group_sizes_and_their_errors():
    model = tiny_llama()
    for fits in (0, 8):
        assert len(Uniform(3, fits).linears(model)) == 14
    for wrong in (7, -8, 80):
        with pytest.raises(UserError, match=rf"columns of model\.layers\.0\.self_attn\.q_proj, got {wrong}"):
            Uniform(3, wrong).linears(model)


def test_sizes_count_scales_zero_points_and_orders():
    def size(form, rows, columns, **options):
        return form.outcome({"layer": torch.nn.Linear(columns, rows)}, **options)

    grouped = size(Uniform(3, 64), 10, 128)
    assert grouped.bits_per_weight == pytest.approx(3 + 19 / 64)
    assert grouped.stored_bytes == 10 * 48 + (20 * 19 + 7) // 8
    ordered = size(Uniform(4, 0, "symmetric"), 10, 128, order_bits=16)
    assert ordered.bits_per_weight == pytest.approx(4 + 16 / 128 + 16 / 10)
    # Rows are padded to whole bytes where they are stored, which is no property of the method.
    assert size(Uniform(3, 0, "symmetric"), 2, 9).stored_bytes == 2 * 4 + 4


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("rtn", {}, 3 + (16 + 3) / 8),
        ("rtn", {"rule": "symmetric"}, 3 + 16 / 8),
        ("rtn", {"rule": "autoround"}, 3 + 16 / 8),
        ("rtn", {"rule": "symmetric", "scale_dtype": "float32"}, 3 + 32 / 8),
        ("gptq", {}, 3 + (16 + 3) / 8),
        ("gptq", {"symmetric": True, "order": "within-groups"}, 3 + 16 / 8),
        ("gptq", {"symmetric": True, "order": "activation", "static_groups": True}, 3 + 16 / 8),
        ("awq", {"grid": 2}, 3 + (16 + 3) / 8),
        ("awq", {"grid": 2, "symmetric": True}, 3 + 16 / 8),
        ("awq", {"grid": 3, "duo_scaling": True, "scale_dtype": "float32"}, 3 + (32 + 3) / 8),
    ],
)
def test_what_is_not_stored_is_not_counted(method, options, expected):
    outcome, _ = run(method, **options)
    assert outcome.bits_per_weight == pytest.approx(expected)
    assert outcome.calibration_tokens == (0 if method == "rtn" else 73)
    assert outcome.training_tokens == 0


def test_an_order_of_columns_is_counted_where_groups_follow_it():
    grouped, _ = run("gptq", order="activation")
    by_row, _ = run("gptq", order="activation", group_size=0)
    assert grouped.bits_per_weight > 3 + 19 / 8
    shapes = [tuple(layer.weight.shape) for layer in decoder_linears(tiny_llama()).values()]
    weights = sum(rows * columns for rows, columns in shapes)
    assert by_row.bits_per_weight == pytest.approx(3 + sum(rows * 19 for rows, _ in shapes) / weights)


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen])
@torch.no_grad()
def test_blocks_run_one_by_one_are_the_model(make):
    model, batches = make(), texts(20, 20, 13, 20)
    stream = BlockStream(model, batches)
    assert stream.tokens == 73
    for index in range(len(stream.blocks)):
        assert stream.stages(index) == [
            ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        ]
        stream.hidden = stream.run(index)
    rows = [row for hidden in stream.hidden for row in model.model.norm(hidden)]
    for row, batch in zip(rows, batches, strict=True):
        torch.testing.assert_close(row, model.model(batch).last_hidden_state[0], rtol=1e-5, atol=1e-5)


def test_a_linear_outside_the_blocks_is_named():
    model = tiny_llama()
    model.model.extra = torch.nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"model\.extra is outside"):
        BlockStream(model, texts(8))
