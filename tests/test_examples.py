"""Each example runs and does what its first lines say, on tiny models."""

import runpy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

import edkm_cli
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name):
    """The names that an example defines; its `main` part does not run."""
    return runpy.run_path(str(EXAMPLES / name))


@pytest.fixture(scope="module")
def checkpoint(model_directory, text_file, tmp_path_factory):
    """A checkpoint that a run without training wrote."""
    output = tmp_path_factory.mktemp("out") / "tiny"
    settings = {"steps": 0, "importance": "none", "start": "kmeans", "context": 64, "eval_windows": 1}
    compress(CompressConfig(model=str(model_directory), output=str(output), data=(str(text_file),), **settings))
    return output


def test_load_and_generate_continues_a_prompt_as_the_model_does(checkpoint):
    text = example("load_and_generate.py")["continue_text"](checkpoint, "One", max_new_tokens=5)
    model, tokenizer = edkm_cli.load(checkpoint, dtype=torch.float32), AutoTokenizer.from_pretrained(checkpoint)
    ids = torch.tensor([tokenizer("One")["input_ids"]])
    for _ in range(5):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert text == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert text.startswith("One")


def test_offloading_moves_less_than_autograd_saves_and_changes_no_loss():
    counted = example("offload_saved_tensors.py")["main"]()  # compares the losses itself
    assert counted["moved_tensors"] > 0
    assert counted["duplicates"] > 0
    assert counted["moved_bytes"] + counted["duplicate_bytes"] + counted["kept_bytes"] >= counted["offered_bytes"]
    assert counted["moved_bytes"] < counted["offered_bytes"]


def test_the_stored_layer_gives_what_was_trained():
    result = example("cluster_your_own_layer.py")["main"]()
    assert result["trained_loss"] < 0.5 * result["first_loss"]
    assert result["stored_loss"] == pytest.approx(result["trained_loss"], rel=1e-5)
    assert result["bits_per_weight"] == 3 + 8 * 16 / 128


def test_finetune_with_peft_trains_an_adapter_that_peft_loads(checkpoint, text_file, tmp_path):
    text = text_file.read_text(encoding="utf-8")[:4000]
    losses = example("finetune_with_peft.py")["train_adapter"](checkpoint, text, tmp_path / "adapter", length=32)
    assert losses[-1] < losses[0]
    model = PeftModel.from_pretrained(edkm_cli.load(checkpoint, dtype=torch.float32), tmp_path / "adapter")
    ids = torch.arange(9)[None]
    with torch.no_grad():
        adapted = model(ids).logits
        with model.disable_adapter():
            assert not torch.equal(model(ids).logits, adapted)
