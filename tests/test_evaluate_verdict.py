"""`edkm eval --reference`: figures against a plain computation, and a verdict that finds the one matrix of noise."""

import json
import math
import shutil
from datetime import datetime

import numpy as np
import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.evaluate.layers import _error, compare_layers, record_layers
from edkm_cli.evaluate.perplexity import by_position, distribution, perplexity
from edkm_cli.evaluate.reference import Recorder
from edkm_cli.evaluate.writing import compare_writing, prompts, write
from edkm_cli.report.verdict import verdict_page
from families import family
from helpers import byte_tokenizer, cluster, export, logits_of, refused, run, tiny_llama

NOISY = "model.layers.1.mlp.up_proj"
MEASURE = ("--context", 32, "--max-windows", 3, "--positions", 64, "--device", "cpu")


def other():
    """The tiny model with small errors everywhere."""
    model = tiny_llama()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    return model


def saved(directory, path, change):
    """A copy of a model's directory with its model changed."""
    shutil.copytree(directory, path)
    model = tiny_llama()
    change(model)
    model.save_pretrained(path)
    (path / "tokenizer.json").unlink()  # the reference's is taken
    return path


def noise(model):
    torch.manual_seed(0)
    weight = model.get_submodule(NOISY).weight
    with torch.no_grad():
        weight.copy_(torch.randn_like(weight) * weight.std())


def test_distribution_and_positions_are_those_of_a_plain_computation():
    model, reference = other(), tiny_llama()
    tokens = torch.randint(0, 257, (96,), generator=torch.Generator().manual_seed(0))
    kl, sure, losses = [], [], []
    for window in tokens.view(3, 32):
        ours, theirs = (one(window[None]).logits[0, :-1].double().log_softmax(1) for one in (model, reference))
        kl += (theirs.exp() * (theirs - ours)).sum(1).tolist()
        sure += theirs.exp().amax(1).tolist()
        losses += [[-float(row[token]) for row, token in zip(ours, window[1:], strict=True)]]
    result = perplexity(model, tokens, context=32, reference=logits_of(reference))
    found = distribution(result.predictions)
    assert [found["kl"][key] for key in ("median", "p90", "p99", "largest")] == pytest.approx(
        np.percentile(kl, (50, 90, 99, 100)), rel=1e-3, abs=1e-6
    )
    own = perplexity(reference, tokens, context=32).perplexity
    assert found["reference_perplexity"] == pytest.approx(own, rel=1e-5)
    assert sum(row["share"] for row in found["by_confidence"]) == pytest.approx(1)
    for row in found["by_confidence"]:
        inside = [value for value, high in zip(kl, sure, strict=True) if row["from"] < high <= row["to"]]
        assert row["kl"] == (pytest.approx(sum(inside) / len(inside), rel=1e-3) if inside else None)
    rows = by_position(result.predictions)
    assert (rows[0]["from"], rows[-1]["to"], len(rows)) == (1, 31, 16)
    first = [loss for window in losses for loss in window[: rows[0]["to"]]]
    assert rows[0]["perplexity"] == pytest.approx(math.exp(sum(first) / len(first)), rel=1e-5)


def test_the_matrix_of_noise_has_the_largest_error_and_layers_before_it_none(tmp_path):
    ids, broken = torch.arange(40)[None], tiny_llama()
    noise(broken)
    record_layers(tiny_llama(), ids, tmp_path)
    found = compare_layers(broken, ids, tmp_path)
    errors = {row["name"]: row["error"] for row in found["matrices"]}
    assert len(errors) == 15  # the output head is one
    assert errors.pop(NOISY) > 1
    assert max(errors.values()) == 0  # each gets the reference's inputs
    assert found["layers"][0]["error"] == 0
    assert found["layers"][1]["error"] > 0
    of_another_shape = compare_layers(tiny_llama(hidden=32, inner=64), ids, tmp_path)
    assert of_another_shape == {"layers": [], "matrices": []}


def test_noise_in_the_output_head_is_named(tmp_path):
    ids, broken = torch.arange(40)[None], tiny_llama()
    torch.nn.init.normal_(broken.lm_head.weight)
    record_layers(tiny_llama(), ids, tmp_path)
    found = compare_layers(broken, ids, tmp_path)
    assert {row["name"]: row["error"] > 1 for row in found["matrices"] if row["error"]} == {"lm_head": True}


@pytest.mark.parametrize("model_type", ["llama4_text", "phimoe"])
def test_matrices_are_compared_beside_routers_that_give_more_than_products(model_type, tmp_path):
    model = family(model_type)
    record_layers(model, torch.arange(40)[None], tmp_path)
    rows = compare_layers(model, torch.arange(40)[None], tmp_path)["matrices"]
    assert any(row["name"].endswith("q_proj") for row in rows)
    assert max(row["error"] for row in rows) < 1e-5


def test_rows_without_any_output_have_no_error():
    wanted = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    assert _error(torch.tensor([[3.0, 9.0], [1.0, 0.0]]), wanted) == 1
    assert _error(torch.ones(2, 2), torch.zeros(2, 2)) == 0


def test_prompts_of_a_template_that_names_the_day_are_the_same_on_every_day():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}"
    texts = [tokenizer.decode(prompt.ids) for prompt in prompts(16, tokenizer)]
    assert any(text.startswith("26 Jul 2024") for text in texts)
    assert not any(text.startswith(f"{datetime.now():%d %b %Y}") for text in texts)


def test_a_model_writes_what_it_writes_alone_and_texts_part_where_they_differ():
    model, tokenizer = tiny_llama(), byte_tokenizer()
    asked = prompts(10, tokenizer)
    assert len({prompt.kind for prompt in asked}) == 8
    most = EvalConfig().prompts
    assert len(prompts(most, tokenizer)) == most
    with pytest.raises(UserError, match=f"prompts must be at most {most}"):
        EvalConfig(prompts=most + 1)
    texts = write(model, asked)
    model.generation_config.update(
        repetition_penalty=5.0, num_beams=2, return_dict_in_generate=True, stop_strings=["e"]
    )
    assert write(model, asked) == texts
    assert model.generation_config.num_beams == 2
    for prompt, text in zip(asked[:3], texts, strict=False):
        ids = tokenizer(prompt.text)["input_ids"]
        for token in text:  # one full pass a token
            assert int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)
    changed = [[*text[:5], (text[5] + 1) % 257, *text[6:]] for text in texts[:1]] + texts[1:]
    found = compare_writing(asked, changed, texts, tokenizer, model)
    assert found["identical"] == 0.9
    assert found["examples"][0]["parts_at"] == 5
    assert found["by_kind"][0]["identical"] == 0.5
    same = compare_writing(asked[:1], [[7] * 48], [[7] * 48], tokenizer, model)
    assert same["model"]["repetition"] == pytest.approx(44 / 45)


def test_noise_in_one_matrix_fails_and_is_named_and_the_model_in_bfloat16_passes(model_directory, text_file, tmp_path):
    rounded = saved(model_directory, tmp_path / "rounded", lambda model: model.to(torch.bfloat16))
    broken = saved(model_directory, tmp_path / "broken", noise)
    common = ("--reference", model_directory, "--data", text_file, *MEASURE)
    status, text, err = run(
        "eval", rounded, *common, "--prompts", 8, "--json", tmp_path / "r.json", "--page", tmp_path / "r.html"
    )
    assert status == 0, err
    assert "verdict: pass" in text
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["verdict"]["passed"]
    assert {row["limit"] for row in result["verdict"]["limits"]} == {
        "--max-kl",
        "--min-agreement",
        "--max-matrix-error",
    }
    assert 0 < result["noise_floor"]["kl_per_token"] < 1e-3
    assert result["positions"]["context"] == 64
    assert run("eval", rounded, *common, "--positions", 16, "--prompts", 0, "--json", tmp_path / "p.json")[0] == 0
    assert json.loads((tmp_path / "p.json").read_text())["positions"]["context"] == 16
    page = (tmp_path / "r.html").read_text()
    for heading in ("Limits", "By confidence", "By layer", "By matrix", "By position", "Writing"):
        assert f"<h2>{heading}</h2>" in page
    status, text, line = run("eval", broken, *common, "--prompts", 0, "--json", tmp_path / "b.json")
    assert status == 2
    assert "verdict: FAIL" in text
    assert "verdict is fail" in line
    assert NOISY in line
    result = json.loads((tmp_path / "b.json").read_text())  # the figures are there all the same
    assert not result["verdict"]["passed"]
    assert result["verdict"]["worst"][0]["name"] == NOISY
    assert result["writing"] is None
    assert NOISY in verdict_page(result)
    limits = ("--max-matrix-error", 0, "--max-kl", 0, "--min-agreement", 0)
    status, _, err = run("eval", broken, *common, *limits, "--prompts", 0)
    assert status == 0, err
    status, _, err = run("eval", broken, *common, *limits, "--prompts", 0, "--max-perplexity-ratio", 1e-6)
    assert status == 2
    assert "--max-perplexity-ratio is 1e-06" in err


def test_a_context_beyond_the_model_s_positions_is_warned_of(model_directory, text_file):
    status, _, err = run(
        "eval", model_directory, "--data", text_file, "--context", 4096, "--max-windows", 1, "--device", "cpu"
    )
    assert status == 0, err
    assert "--context 4096 is more than the" in err


def test_a_page_needs_a_reference(model_directory, tmp_path):
    assert "--reference" in refused("eval", model_directory, "--data", "builtin", "--page", tmp_path / "x.html")


def test_limits_and_options_of_tasks_are_refused_where_they_would_say_nothing(model_directory):
    line = refused("eval", model_directory, "--data", "builtin", "--max-kl", 0.1, "--limit", 5)
    assert "max_kl says nothing without --reference" in line
    assert "limit says nothing without --tasks" in line
    line = refused("export", model_directory, "--to", "dense", "-o", "out", "--context", 512)
    assert "context says nothing without --verify perplexity" in line


def test_a_page_is_another_file_than_the_result(model_directory, tmp_path):
    both = ("--page", tmp_path / "x", "--json", tmp_path / "x")
    assert "is --json" in refused("eval", model_directory, "--reference", model_directory, *both)
    assert "is --output" in refused("report", model_directory, "--output", tmp_path / "x", "--json", tmp_path / "x")


def test_experts_that_stayed_dense_are_no_matrices_of_their_own(text_file, tmp_path):
    byte_tokenizer().save_pretrained(tmp_path / "dense")
    family("qwen3_moe").save_pretrained(tmp_path / "dense")
    packed = export(*cluster(family("qwen3_moe"), experts=False), tmp_path / "packed")
    byte_tokenizer().save_pretrained(packed)
    result = tmp_path / "r.json"
    limits = ("--max-matrix-error", 10, "--max-kl", 10, "--min-agreement", 0, "--json", result)
    common = ("--reference", tmp_path / "dense", "--data", text_file, *MEASURE, "--prompts", 0)
    status, _, err = run("eval", packed, *common, *limits)
    assert status == 0, err
    named = [matrix["name"] for matrix in json.loads(result.read_text())["matrices"]]
    assert "model.layers.0.self_attn.q_proj" in named
    assert not any("experts" in name for name in named)


def test_a_template_that_refuses_questions_is_told_before_the_reference_is_measured(
    model_directory, text_file, tmp_path
):
    strict = saved(model_directory, tmp_path / "strict", lambda model: None)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('a system message is needed') }}"
    tokenizer.save_pretrained(strict)
    status, _, err = run("eval", model_directory, "--reference", strict, "--data", text_file, *MEASURE, "--prompts", 8)
    assert status == 2
    assert (
        "chat template cannot render a question (TemplateError: a system message is needed); mend it, or give --prompts 0"
        in err
    )
    assert "reference:" not in err


def test_a_limit_that_nothing_could_be_measured_for_is_not_kept(model_directory, text_file, tmp_path):
    deeper = saved(model_directory, tmp_path / "deeper", lambda model: None)
    tiny_llama(layers=3).save_pretrained(deeper)
    common = ("eval", model_directory, "--reference", deeper, "--data", text_file, *MEASURE, "--prompts", 0)
    limits = ("--max-kl", 0, "--min-agreement", 0)
    shutil.copyfile(model_directory / "tokenizer.json", deeper / "tokenizer.json")
    status, _, line = run(*common, *limits)
    assert status == 2
    assert "--max-matrix-error is 1, but no matrix could be compared (0 leaves this limit out)" in line
    assert run(*common, *limits, "--max-matrix-error", 0)[0] == 0


def test_another_length_in_the_configuration_and_many_windows_stop_no_comparison(model_directory, text_file, tmp_path):
    import resource

    shorter = tmp_path / "shorter"
    shutil.copytree(model_directory, shorter)
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64}))
    shutil.copyfile(shorter / "model.safetensors", shorter / "consolidated.safetensors")  # as some hub models have it
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    try:
        status, _, err = run("eval", shorter, "--reference", model_directory, "--data", text_file, "--context", 8,
                             "--max-windows", 300, "--prompts", 0, "--json", tmp_path / "r.json")  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert status == 0, err
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["texts"][0]["kl_per_token"] == pytest.approx(0, abs=1e-6)
    assert result["decoder_bits_per_weight"] == 32


def test_the_noise_floor_is_that_of_the_model_as_it_is_loaded_in_the_other_format(
    model_directory, text_file, monkeypatch
):
    """Frequencies of rotary embeddings are computed in float32 there."""
    seen = {}

    def spy(model, *arguments, description, **options):
        seen[description] = model.dtype, model.model.rotary_emb.inv_freq.dtype
        return perplexity(model, *arguments, description=description, **options)

    monkeypatch.setattr("edkm_cli.evaluate.verdict.perplexity", spy)
    command = ("eval", model_directory, "--reference", model_directory, "--data", text_file, *MEASURE)
    assert run(*command, "--prompts", 0)[0] == 0
    assert seen["noise floor"] == (torch.bfloat16, torch.float32)


def test_a_disk_that_is_full_is_told_at_the_first_window(model_directory, text_file, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edkm_cli.evaluate.reference.save_tensors", full)
    command = ("eval", model_directory, "--reference", model_directory, "--data", text_file, *MEASURE)
    windows = []
    original = Recorder.see
    monkeypatch.setattr(Recorder, "see", lambda *arguments: (windows.append(1), original(*arguments)))
    status, _, err = run(*command, "--prompts", 0)
    assert status == 2
    assert "predictions could not be kept on disk" in err
    assert len(windows) == 1


def test_a_noise_floor_that_has_no_room_is_left_out(model_directory, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("edkm_cli.evaluate.verdict.physical_bytes", lambda: 1000)
    command = ("eval", model_directory, "--reference", model_directory, "--data", text_file, *MEASURE)
    assert run(*command, "--prompts", 0, "--json", tmp_path / "r.json", "--page", tmp_path / "v.html")[0] == 0
    assert json.loads((tmp_path / "r.json").read_text())["noise_floor"] is None
    assert "not measured" in (tmp_path / "v.html").read_text()


def test_a_page_is_written_where_nobody_reads_what_is_printed(model_directory, text_file, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr("edkm_cli.cli.options.print", broken, raising=False)
    command = ("eval", model_directory, "--reference", model_directory, "--data", text_file, *MEASURE)
    with pytest.raises(BrokenPipeError):
        run(*command, "--prompts", 0, "--page", tmp_path / "v.html")
    assert "edkm eval</title>" in (tmp_path / "v.html").read_text()
