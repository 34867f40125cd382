"""Bits by sensitivity: the best choice there is on small cases, in the room of the average, and through a whole run."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig, build_config
from edkm_cli.distributed import World
from edkm_cli.errors import Preempted, UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.hf import load
from edkm_cli.nn.allocation import (
    average_in,
    bits_by_row,
    choose,
    choose_embedding_bits,
    embedding_bits_saved,
    expected_rise,
    planned_spec,
    rises_of,
    size_bits,
    spread_evenly,
    tried_bits,
)
from edkm_cli.nn.swap import Swap, decoder_bits_per_weight
from edkm_cli.preflight import plan_run
from helpers import assert_same_run, settings
from processes import stop_after

SPEC = QuantizationSpec(3, "row:1", "float16", 16)


def falling_rises(swaps, sensitivities):
    """Errors that fall by four with each bit, as those of k-means do."""
    return {s.name: {bits: v * 4.0**-bits for bits in (2, 3, 4)} for s, v in zip(swaps, sensitivities, strict=True)}


@pytest.mark.parametrize("average", [2.0, 2.5, 3.0, 3.7])
def test_the_choice_is_close_to_the_best_of_all_in_the_same_room(average):
    torch.manual_seed(0)
    swaps = [Swap(f"l{i}", "linear", (8 * (1 + i % 3), 64)) for i in range(6)]
    rises = falling_rises(swaps, torch.randn(6).mul(2).exp().tolist())
    room = sum(size_bits(swap, SPEC, average) for swap in swaps)

    def total(bits):
        return sum(rises[s.name][b] for s, b in zip(swaps, bits, strict=True))

    fitting = [
        bits
        for bits in itertools.product((2, 3, 4), repeat=6)
        if sum(size_bits(s, SPEC, b) for s, b in zip(swaps, bits, strict=True)) <= room * (1 + 1e-12)
    ]
    chosen = choose(swaps, rises, SPEC, average)
    bits = tuple(chosen[swap.name] for swap in swaps)
    assert bits in fitting
    best, uniform = min(map(total, fitting)), total((int(average),) * 6)
    assert total(bits) - best <= 0.2 * (uniform - best) + 1e-12


def test_equal_sensitivities_get_equal_bits():
    swaps = [Swap(f"l{i}", "linear", (16, 64)) for i in range(5)]
    assert set(choose(swaps, falling_rises(swaps, [1.0] * 5), SPEC, 3).values()) == {3}
    assert spread_evenly(swaps, SPEC, 3) == {}
    assert sorted(spread_evenly(swaps, SPEC, 2.4).values()) == [2, 2, 2, 3, 3]


@pytest.mark.parametrize(("bits", "more"), [(3, 0.0), (3, 500.0), (2.5, 3000.0), (8, 500.0), (3, 1e9)])
def test_the_average_takes_the_room_that_there_is(bits, more):
    swaps = [Swap("a", "linear", (8, 64)), Swap("b", "linear", (24, 32))]
    room = sum(size_bits(swap, SPEC, bits) for swap in swaps) + more
    average = average_in(swaps, SPEC, room)
    assert bits <= average <= 8
    taken = sum(size_bits(swap, SPEC, average) for swap in swaps)
    assert taken <= room * (1 + 1e-9)
    assert taken == pytest.approx(room) or average == 8


def test_what_embeddings_save_counts_stored_ones_only():
    embedding, head = Swap("e", "embedding", (10, 12)), Swap("h", "head", (10, 12))
    assert embedding_bits_saved([embedding, replace(head, tied=True)], 8, 6) == 10 * 8 * (12 - 9)
    assert embedding_bits_saved([embedding, head], 8, 6) == 2 * 10 * 8 * (12 - 9)
    assert embedding_bits_saved([replace(embedding, reason="stays")], 8, 6) == 0


@pytest.mark.parametrize(
    ("bits", "share", "few"), [(2, 0.27, 4), (3, 0.27, 5), (4, 0.27, 6), (3, 0.01, 6), (3, 0.15, 5)]
)
def test_embeddings_get_fewer_bits_the_more_of_them_there_are(bits, share, few):
    swaps = [Swap("e", "embedding", (round(share * 10_000), 100)), Swap("l", "linear", (1000, 1000))]
    swaps += [Swap("h", "head", swaps[0].shape, tied=True), Swap("other", "linear", (9999, 9999), reason="stays")]
    config = CompressConfig(bits=bits, allocation="sensitivity")
    assert choose_embedding_bits(config, swaps) == few
    assert choose_embedding_bits(replace(config, allocation="uniform"), swaps) == 8
    assert choose_embedding_bits(replace(config, embedding_bits=7), swaps) == 7


@pytest.mark.parametrize(("bits", "few"), [(2, "3+"), (3, "4+"), (4, "5+")])
def test_frequent_tokens_of_a_large_vocabulary_get_more_bits(bits, few):
    swaps = [Swap("e", "embedding", (49152, 576)), Swap("l", "linear", (106_000, 1000))]
    config = CompressConfig(bits=bits, allocation="sensitivity")
    assert choose_embedding_bits(config, swaps) == few
    ends, last = bits_by_row(few, 49152)
    resolved = replace(config, embedding_bits=few, lut_dtype="float16")
    spec, average = planned_spec(resolved, swaps, asked=config)
    assert (spec.embedding_rows, spec.embedding_bits, spec.embedding_factors) == (ends, last, True)
    stored = sum(
        8 * math.prod(shape) for name, (_, shape) in spec.embedding_tensors(49152, 576).items() if "ind" in name
    )
    assert embedding_bits_saved(swaps, 8, few) == 8 * 49152 * 576 - stored
    assert bits < average < bits + 2
    assert bits_by_row(few, 4096) == ([], int(few[0]))
    assert choose_embedding_bits(config, [replace(swaps[0], shape=(4096, 576)), swaps[1]]) in (5, 6)


def test_the_number_format_of_tables_is_chosen_for_the_bits_that_linears_will_have():
    plan = plan_run(CompressConfig(model="llama-3.2-1b"), World())
    assert plan.average_bits > 3.8  # 3, and what its embeddings save
    assert plan.config.lut_dtype == "float8_e3m4"  # at 3 bits tables of 16 cost too little


def test_embeddings_get_what_leaves_room_for_the_linears():
    swaps = [Swap("e", "embedding", (100, 100)), Swap("l", "linear", (1000, 1000))]
    config = CompressConfig(target_size="1MB", allocation="sensitivity")

    def average(few):
        if few > least:
            raise UserError("no room")
        return 3.0

    for least in (4, 5):
        assert choose_embedding_bits(config, swaps, average) == least
    least = 3
    with pytest.raises(UserError, match="no room"):
        choose_embedding_bits(config, swaps, average)


def test_the_bits_that_are_tried_stay_in_range():
    assert [list(tried_bits(bits)) for bits in (1, 3, 3.5, 8)] == [[1, 2], [2, 3, 4], [2, 3, 4, 5], [7, 8]]


def test_the_expected_rise_is_half_the_weighted_squared_error():
    weight, importance = torch.randn(3, 8), torch.rand(3, 8)
    table = torch.tensor([[-1.0, 0.0, 0.5, 1.0]]).repeat(3, 1)
    nearest = table[0][(weight[:, :, None] - table[0]).abs().argmin(-1)]
    wanted = 0.5 * float((importance * (weight - nearest).square()).sum())
    assert expected_rise(weight, table, importance, SPEC.granularity) == pytest.approx(wanted, rel=1e-6)


def test_a_sample_of_rows_sees_all_places_of_a_head():
    """Errors differ by the rotary angle of a row: a stride that divides the heads sees the same few in each."""
    torch.manual_seed(0)
    of_angles = torch.linspace(-2, 2, 64).exp().repeat(32)  # 32 heads of 64 rows
    weight = torch.randn(2048, 128) * of_angles[:, None]
    tables = torch.linspace(-3, 3, 8).repeat(2048, 1) * of_angles[:, None]
    exact = expected_rise(weight, tables, torch.ones(2048, 128), SPEC.granularity)
    assert rises_of("q", weight, torch.ones(2048, 128), SPEC, {3: tables})[3] == pytest.approx(exact, rel=0.1)


def test_a_linear_without_squared_gradients_is_named():
    for importance in (None, torch.ones(8)):
        with pytest.raises(UserError, match=r"squared gradients of layer\.0"):
            rises_of("layer.0", torch.randn(4, 8), importance, SPEC, {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bits": 3.5, "allocation": "uniform"}, "3.5 is an average"),
        ({"bits": 3.5, "importance": "none"}, "importance is none"),
        ({"bits": 3.5, "target": "any-precision"}, "one number of bits for all matrices"),
        ({"bits": 4, "palette": "e2m1", "allocation": "sensitivity"}, "palette e2m1 has one number of bits for all"),
        ({"bits": 4, "palette": "affine", "granularity": "block:1x32", "lut_dtype": "int8"}, "int8 is of targets"),
        ({"allocation": "sensitivity", "importance": "activation"}, "importance is activation"),
        ({"target": "w4a16", "embedding_bits": 4}, "stores embeddings uncompressed, got 4 bits"),
        ({"temperature": 1e-4}, "0.0001 is below 0.0005"),
        ({"bits": 8.5, "allocation": "sensitivity"}, "at most 8"),
    ],
)
def test_contradictions_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        CompressConfig(**values)
    assert repr(CompressConfig(bits=4.0).bits) == "4"


def test_a_run_with_bits_by_sensitivity_resumes_and_holds_what_it_reports(model_directory, text_file, tmp_path):
    changes = {"bits": 3.5, "allocation": "sensitivity", "steps": 4, "embedding_bits": 5, "embedding_group": 6}
    report = compress(settings(model_directory, text_file, tmp_path / "whole", **changes))
    spec = json.loads((tmp_path / "whole" / "config.json").read_text())["quantization_config"]
    assert len(set(spec["module_bits"].values()) | {spec["bits"]}) > 1
    model = load(tmp_path / "whole")
    swaps = [Swap(**swap) for swap in report["swapped"]]
    linears = [Swap(swap.name, swap.role, tuple(swap.shape)) for swap in swaps if swap.role == "linear"]
    assert all(model.get_submodule(s.name).bits == spec["module_bits"].get(s.name, spec["bits"]) for s in linears)
    room = sum(size_bits(swap, SPEC, 3.5) for swap in linears) / sum(s.shape[0] * s.shape[1] for s in linears)
    assert room - 0.3 < report["decoder_bits_per_weight"] <= room
    held = QuantizationSpec(**{key: value for key, value in spec.items() if key != "quant_method"})
    assert report["decoder_bits_per_weight"] == decoder_bits_per_weight(linears, held)

    parts = settings(model_directory, text_file, tmp_path / "parts", **changes)
    with pytest.raises(Preempted):
        compress(parts, resume=True, observer=stop_after(2))
    compress(parts, resume=True)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_a_size_that_only_more_embedding_bits_meet_is_met():
    swaps = [Swap("e", "embedding", (100, 100)), Swap("l", "linear", (1000, 1000))]

    def average(few):
        if few < 6:
            raise UserError("too small for this size")
        return 8.0

    assert choose_embedding_bits(CompressConfig(target_size="1MB", allocation="sensitivity"), swaps, average) == 6


@pytest.mark.parametrize("bits", [3, 3.5, 4])
def test_a_target_gets_no_more_bits_than_it_holds(bits):
    swaps = [Swap("e", "embedding", (40_000, 128)), Swap("l", "linear", (640, 640))]
    config = build_config(None, {"target": "mlx:4", "bits": bits, "allocation": "sensitivity"})
    resolved = replace(config, embedding_bits=choose_embedding_bits(config, swaps))
    _, average = planned_spec(resolved, swaps, asked=config)
    assert bits < average
    assert max(tried_bits(average)) <= 6
