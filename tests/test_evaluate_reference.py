"""The uncompressed model's predictions, remembered: as good as the model itself, small, and gone with the process."""

import pytest
import torch

from edkm_cli.evaluate import reference as module
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.evaluate.reference import Recorder, RememberedPredictions
from families import family
from helpers import logits_of, tiny_llama

TOKENS = torch.randint(0, 257, (48,), generator=torch.Generator().manual_seed(0))


def remembered(model, directory):
    directory.mkdir(exist_ok=True)
    recorder = Recorder(model, directory)
    perplexity(model, TOKENS, context=16, seen=recorder.see)
    assert recorder.failure is None
    return RememberedPredictions(directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_predictions_of_a_llama_are_kept_exactly(tmp_path, dtype, tied):
    model, original = tiny_llama(seed=0), tiny_llama(seed=1, tied=tied).to(dtype)
    kept = remembered(original, tmp_path)
    now = perplexity(model, TOKENS, context=16, reference=logits_of(original))
    with torch.no_grad():
        original.get_output_embeddings().weight.zero_()  # what is remembered is a copy
    for file in tmp_path.iterdir():
        file.unlink()  # and needs no names
    later = perplexity(model, TOKENS, context=16, reference=kept)
    assert later.kl_per_token == pytest.approx(now.kl_per_token, rel=1e-5 if dtype == torch.float32 else 1e-2)
    assert later.top1_agreement == pytest.approx(now.top1_agreement, abs=0.03)


def test_hidden_states_are_kept_not_logits(tmp_path):
    remembered(tiny_llama(), tmp_path)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert sizes.pop("predictions.safetensors") < 257 * 24 * 4 + 200
    (windows,) = sizes.values()  # one file, however many windows there are
    assert 3 * 16 * 24 * 4 < windows < 3 * (16 * 24 * 4 + 200)


@pytest.mark.parametrize("model_type", ["gemma2", "cohere"])
def test_logits_that_are_more_than_a_product_are_kept_themselves(tmp_path, model_type):
    """These cap or scale them."""
    original, model = family(model_type), family(model_type)
    for one in (original, model):
        one.config.final_logit_softcapping = 3.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    kept = remembered(original, tmp_path)
    now = perplexity(model, TOKENS, context=16, reference=logits_of(original))
    later = perplexity(model, TOKENS, context=16, reference=kept)
    assert now.kl_per_token > 1e-3
    assert later.kl_per_token == pytest.approx(now.kl_per_token, rel=0.05)
    same = perplexity(original, TOKENS, context=16, reference=kept)
    assert same.top1_agreement == 1
    assert same.kl_per_token < 1e-6


def test_a_window_that_was_not_seen_is_an_error(tmp_path):
    kept = remembered(tiny_llama(), tmp_path)
    assert kept.knows_text(TOKENS, context=16)
    assert not kept.knows_text(TOKENS, context=17)
    with pytest.raises(KeyError):
        list(kept(torch.zeros(1, 16, dtype=torch.int64)))


def test_a_disk_that_is_full_stops_no_measurement(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_tensors", full)
    model = tiny_llama()
    recorder = Recorder(model, tmp_path)
    found = perplexity(model, TOKENS, context=16, seen=recorder.see)
    assert found.perplexity > 1
    assert "No space left on device" in recorder.failure
