"""Several texts, each measured by itself at every stage, and compared with what was remembered of the original."""

import pytest
import torch

from edkm_cli.evaluate import reference
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.evaluate.texts import Measurements
from helpers import logits_of, tiny_llama

FIRST, SECOND = (torch.randint(0, 257, (n,), generator=torch.Generator().manual_seed(n)) for n in (70, 20))


def measurements():
    return Measurements({"first": FIRST, "second": SECOND}, context=32, max_windows=8)


def test_each_text_has_its_own_figures():
    original, changed = tiny_llama(seed=0), tiny_llama(seed=1)
    found = measurements()
    assert found.measure_original(original) is None
    found.measure("start", changed)
    found.measure("exported", original)
    rows = found.rows()
    assert [(row["data"], row["context"], row["windows"], row["tokens"]) for row in rows] == [
        ("first", 32, 2, 70),
        ("second", 20, 1, 20),
    ]
    for row, tokens in zip(rows, (FIRST, SECOND), strict=True):
        direct = perplexity(changed, tokens, context=32, reference=logits_of(original))
        assert row["start"] == pytest.approx(direct.perplexity)
        assert row["original"] == row["exported"] == pytest.approx(perplexity(original, tokens, context=32).perplexity)
        assert row["trained"] is None
        assert row["stages"]["start"]["kl_per_token"] == pytest.approx(direct.kl_per_token, rel=1e-4)
        assert row["stages"]["start"]["top1_agreement"] == pytest.approx(direct.top1_agreement)
        assert row["kl_per_token"] == pytest.approx(0, abs=1e-6)  # of the last stage
        assert row["top1_agreement"] == 1
    assert found.perplexity == {stage: rows[0][stage] for stage in ("original", "start", "trained", "exported")}


def test_a_stage_that_is_not_compared_leaves_the_figures_of_the_one_before():
    found = measurements()
    found.measure_original(tiny_llama(seed=0))
    found.measure("trained", tiny_llama(seed=1))
    found.measure("exported", tiny_llama(seed=1), compare=False)
    (row, _) = found.rows()
    assert row["stages"]["exported"] == {"kl_per_token": None, "top1_agreement": None}
    assert row["kl_per_token"] == row["stages"]["trained"]["kl_per_token"] > 0.01


def test_what_an_interrupted_run_found_is_taken_up():
    first, second = measurements(), measurements()
    first.measure_original(tiny_llama(seed=0))
    first.measure("start", tiny_llama(seed=1))
    second.measure_original(tiny_llama(seed=0))
    second.by_stage.update(first.by_stage)
    assert second.rows() == first.rows()


def test_in_training_figures_are_maps_by_text():
    found = measurements()
    found.measure_original(tiny_llama(seed=0))
    figures = found.on_the_way(tiny_llama(seed=1))
    assert list(figures) == ["perplexity", "kl_per_token", "top1_agreement"]
    assert all(list(values) == ["first", "second"] for values in figures.values())


def test_without_room_for_predictions_perplexities_are_measured_and_the_reason_is_told(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reference, "save_tensors", full)
    found = measurements()
    assert "No space left" in found.measure_original(tiny_llama())
    found.measure("start", tiny_llama(seed=1))
    row = found.rows()[0]
    assert row["start"] > 1
    assert row["kl_per_token"] is None
    assert "TMPDIR" in row["not_compared"]
    assert list(found.on_the_way(tiny_llama())) == ["perplexity"]
