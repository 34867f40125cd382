"""Perplexity against an independent computation, and sizes against arithmetic."""

import json
import math
import os
import shutil
import subprocess
import sys

import pytest
import torch

import edkm_cli
from edkm_cli.data import tokenize
from edkm_cli.errors import UserError
from edkm_cli.evaluate.command import decode_speed, resident_bytes
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.evaluate.size import footprint
from helpers import byte_tokenizer, cluster, export, logits_of, refused, tiny_llama


def test_perplexity_is_that_of_the_protocol():
    model = tiny_llama()
    tokens = torch.randint(0, 257, (103,), generator=torch.Generator().manual_seed(0))
    nll, count = 0.0, 0
    for window in range(3):  # 103 tokens: six windows of 16, the first three of them
        ids = tokens[16 * window : 16 * window + 16]
        logits = model(ids[None]).logits[0].double()
        for position in range(15):
            nll -= float(logits[position].log_softmax(0)[ids[position + 1]])
            count += 1
    result = perplexity(model, tokens, context=16, max_windows=3)
    assert result.perplexity == pytest.approx(math.exp(nll / count), rel=1e-6)
    assert (result.windows, result.context, result.tokens) == (3, 16, 103)
    assert perplexity(model, tokens, context=16).windows == 6


def test_a_reference_is_compared_prediction_by_prediction():
    model, reference = tiny_llama(seed=0), tiny_llama(seed=1)
    tokens = torch.randint(0, 257, (40,), generator=torch.Generator().manual_seed(0))
    kl, same = 0.0, 0
    for window in tokens[:32].view(2, 16):
        ours, theirs = (m(window[None]).logits[0, :-1].double().log_softmax(1) for m in (model, reference))
        kl += float((theirs.exp() * (theirs - ours)).sum())
        same += int((ours.argmax(1) == theirs.argmax(1)).sum())
    result = perplexity(model, tokens, context=16, reference=logits_of(reference))
    assert result.kl_per_token == pytest.approx(kl / 30, rel=1e-5)
    assert result.top1_agreement == same / 30
    assert perplexity(model, tokens, context=16).kl_per_token is None


def test_a_model_does_not_differ_from_itself():
    model, tokens = tiny_llama(), torch.arange(32)
    result = perplexity(model, tokens, context=16, reference=logits_of(model))
    assert result.kl_per_token == pytest.approx(0, abs=1e-7)
    assert result.top1_agreement == 1


def test_a_reference_of_another_vocabulary_is_refused():
    with pytest.raises(UserError, match="vocabulary, 257 tokens, got 64"):
        perplexity(tiny_llama(), torch.arange(32), context=16, reference=lambda ids: [torch.zeros(16, 64)])


def test_a_short_text_is_one_short_window_and_no_text_is_refused():
    model = tiny_llama()
    assert perplexity(model, torch.arange(9), context=2048).context == 9
    with pytest.raises(UserError, match="at least 2 tokens"):
        perplexity(model, torch.arange(1), context=16)
    with pytest.raises(UserError, match="at least 2 tokens"):  # before anything is measured
        tokenize(["a"], byte_tokenizer())


def test_a_token_behind_the_last_embedding_is_refused():
    with pytest.raises(UserError, match="has token 257, the model has 257 embeddings"):
        perplexity(tiny_llama(), torch.arange(200, 258))


def test_training_mode_is_given_back():
    model = tiny_llama().train()
    perplexity(model, torch.arange(9), context=8)
    assert model.training


@pytest.mark.parametrize("tied", [True, False])
def test_footprint_of_a_dense_model(tied):
    model = tiny_llama(tied=tied)
    size = footprint(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert size.parameters == parameters
    assert size.weights_bytes == 4 * parameters
    assert size.decoder_bits_per_weight == size.model_bits_per_weight == 32


def test_footprint_of_a_compressed_model_counts_tables_and_scales(tmp_path):
    from edkm_cli.hf import load

    model = tiny_llama()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    clustered, spec = cluster(model, granularity="row:1")
    size = footprint(load(export(clustered, spec, tmp_path)))
    # (24 + 12 + 12 + 24 + 40 + 40) rows of 24 and 24 rows of 40, 3 bits, 8 fp16 entries a row
    weights, rows = 152 * 24 + 24 * 40, 176
    assert size.decoder_bits_per_weight == pytest.approx(3 + 8 * 16 * rows / weights)
    assert size.parameters == parameters


def test_a_dense_head_is_no_part_of_the_decoders_bits(tmp_path):
    models = {tied: cluster(tiny_llama(tied=tied), embedding_bits=16) for tied in (True, False)}
    sizes = [footprint(edkm_cli.load(export(*model, tmp_path / str(tied)))) for tied, model in models.items()]
    assert sizes[0].decoder_bits_per_weight == sizes[1].decoder_bits_per_weight


def test_decode_speed_is_a_rate_whatever_the_model_s_own_settings():
    model = tiny_llama()
    model.generation_config.update(stop_strings=["e"], num_beams=2, num_return_sequences=2)
    assert decode_speed(model, torch.arange(8), new_tokens=4) > 0
    assert model.generation_config.num_beams == 2


def test_decode_speed_leaves_the_prompt_out(monkeypatch):
    def seconds(run, device, runs):
        return 100 + run.keywords["max_new_tokens"] / 8

    monkeypatch.setattr("edkm_cli.evaluate.command.least_seconds", seconds)
    assert decode_speed(tiny_llama(), torch.arange(8), new_tokens=4) == 8


def test_resident_bytes_are_those_of_tables_that_were_made_too(tmp_path):
    model = edkm_cli.load(export(*cluster(tiny_llama(), lut_dtype="float8_e4m3fn"), tmp_path))
    before = resident_bytes(model)
    model(torch.arange(8)[None])
    made = [module._table for module in model.modules() if getattr(module, "_table", None) is not None]
    assert made
    assert resident_bytes(model) == before + sum(table.nbytes for table in made)


def test_a_model_of_the_hub_weighs_what_its_files_do(model_directory, text_file, tmp_path):
    repository = tmp_path / "home" / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(model_directory, snapshot)
    tiny_llama().bfloat16().save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    command = [sys.executable, "-m", "edkm_cli", "eval", "owner/name", "--data", str(text_file), "--max-windows", "1"]
    command += ["--context", "32", "--device", "cpu", "--json", str(tmp_path / "e.json")]
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    result = json.loads((tmp_path / "e.json").read_text())
    assert result["model_bits_per_weight"] == result["decoder_bits_per_weight"] == 16
    assert result["weights_bytes"] == (snapshot / "model.safetensors").stat().st_size


def test_a_damaged_checkpoint_is_refused_before_the_reference_is_read(
    model_directory, text_file, tmp_path, monkeypatch
):
    directory = export(*cluster(tiny_llama()), tmp_path / "one")
    byte_tokenizer().save_pretrained(directory)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    monkeypatch.setattr("edkm_cli.evaluate.command.load_any", lambda *_, **__: pytest.fail("a model was loaded"))
    assert "truncated" in refused("eval", directory, "--reference", model_directory, "--data", text_file)
