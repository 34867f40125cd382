"""edkm finetune and edkm merge: whole runs on tiny packed models, resume, and what is refused before it costs."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM

import edkm_cli
from edkm_cli.distributed import World
from edkm_cli.errors import Preempted, UserError
from edkm_cli.export import run as export_run
from edkm_cli.finetune import command
from edkm_cli.finetune.command import finetune, plan_finetune
from edkm_cli.finetune.config import FinetuneConfig, MergeConfig
from edkm_cli.finetune.merge import merge, require_base, with_data
from edkm_cli.finetune.session import PackedSession
from edkm_cli.integrity import stored_tensors
from edkm_cli.progress import Observer
from edkm_cli.train.loop import Metrics
from helpers import byte_tokenizer, cluster, export, metrics_of, refused, run, tiny_llama

SIZES = {"context": 64, "eval_windows": 2, "sequence_length": 32, "learning_rate": 5e-3, "device": "cpu"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    directory = export(*cluster(tiny_llama(bias=True)), tmp_path_factory.mktemp("packed") / "tiny")
    byte_tokenizer().save_pretrained(directory)
    return directory


def settings(text_file, output, **changes):
    values = {"data": (str(text_file),), "output": str(output), "lora_rank": 4, "steps": 6, **SIZES}
    return FinetuneConfig(**{**values, **changes})


@pytest.fixture(scope="module")
def tuned(packed, text_file, tmp_path_factory):
    """(the adapter's directory, its report) of a run of 50 steps."""
    output = tmp_path_factory.mktemp("tuned") / "adapter"
    return output, finetune(packed, settings(text_file, output, steps=50, eval_every=25, save_every=20))


def test_fifty_steps_lower_loss_and_perplexity_and_peft_loads_what_is_written(packed, tuned, ids):
    adapter, report = tuned
    losses = metrics_of(adapter)
    assert len(losses) == 50
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert report["perplexity"]["adapted"] < 0.8 * report["perplexity"]["compressed"]
    assert json.loads(json.dumps(report)) == json.loads((adapter / "finetune.json").read_text())
    assert sorted(os.listdir(adapter)) == [
        "README.md", "adapter_config.json", "adapter_model.safetensors", "edkm-files.json", "finetune.json", "metrics.jsonl",
    ]  # fmt: skip
    loaded = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32)
    with torch.no_grad(), loaded.disable_adapter():
        assert torch.equal(loaded(ids).logits, edkm_cli.load(packed, dtype=torch.float32)(ids).logits)
    measured = [json.loads(line).get("perplexity") for line in (adapter / "metrics.jsonl").read_text().splitlines()]
    assert list(measured[49].values()) == [pytest.approx(report["perplexity"]["adapted"], rel=1e-6)]


def test_a_run_that_was_stopped_goes_on_to_the_same_adapter(packed, text_file, tmp_path, monkeypatch):
    whole = finetune(packed, settings(text_file, tmp_path / "whole"))
    interrupted = settings(text_file, tmp_path / "resumed", save_every=2)

    write = Metrics.write

    def stop_at_five(self, record):
        write(self, record)
        if record["step"] == 5:
            raise Preempted("stopped")

    monkeypatch.setattr(Metrics, "write", stop_at_five)
    with pytest.raises(Preempted):
        finetune(packed, interrupted)
    monkeypatch.setattr(Metrics, "write", write)
    assert not (tmp_path / "resumed").exists()
    with pytest.raises(UserError, match="--resume"):
        finetune(packed, interrupted)
    with pytest.raises(UserError, match="lora_rank was 4 and is 2"):
        finetune(packed, settings(text_file, tmp_path / "resumed", save_every=2, lora_rank=2), resume=True)
    resumed = finetune(packed, interrupted, resume=True)
    assert resumed["perplexity"] == whole["perplexity"]
    name = "adapter_model.safetensors"
    assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert metrics_of(tmp_path / "resumed") == metrics_of(tmp_path / "whole")
    assert finetune(packed, interrupted, resume=True) == json.loads(json.dumps(resumed))  # finished already


@pytest.mark.parametrize(
    "options", [{"gradient_checkpointing": True}, {"packing": True}, {"dtype": "bfloat16"}, {"offload": "cpu"},
                {"target_modules": ("q_proj", "layers.1.mlp.down_proj")}, {"gradient_accumulation": 2, "keep_best": True,
                                                                          "eval_every": 1}]
)  # fmt: skip
def test_options_of_compress_do_what_they_do_there(packed, text_file, tmp_path, options):
    report = finetune(packed, settings(text_file, tmp_path / "out", steps=2, **options))
    assert report["perplexity"]["adapted"] < report["perplexity"]["compressed"]
    assert report["adapted_layers"] == (3 if "target_modules" in options else 14)


def test_a_dry_run_says_what_would_train_and_writes_nothing(packed, text_file, tmp_path):
    plan = plan_finetune(packed, settings(text_file, tmp_path / "out"))
    rows = {"attention": (24 + 24) * 2 + (24 + 12) * 2, "mlp": (24 + 40) * 3}
    assert plan["trained_parameters"] == 2 * 4 * sum(rows.values())
    assert plan["training_tokens"] == 6 * 32
    status, out, _ = run(
        "finetune", packed, "--data", text_file, "-o", tmp_path / "out", "--dry-run", "--json", tmp_path / "plan.json"
    )
    assert status == 0
    assert "14 layers" in out
    assert json.loads((tmp_path / "plan.json").read_text())["adapted_layers"] == 14
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_text_that_changes_between_measuring_and_training_stops_the_run(packed, text_file, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text(text_file.read_text())
    documents = export_run.evaluation_documents

    def then_changes(*given):
        found = documents(*given)
        text.write_text(text_file.read_text() + "One more line.\n")
        return found

    monkeypatch.setattr(export_run, "evaluation_documents", then_changes)
    with pytest.raises(UserError, match="changed while it was read"):
        finetune(packed, settings(text, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_trained_is_refused_in_one_line(packed, model_directory, text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "--data is required" in refused("finetune", packed)
    assert "use edkm compress" in refused("finetune", model_directory, "--data", text_file)
    assert "no directory" in refused("finetune", "nowhere", "--data", text_file)
    assert "lora_rank must be at least 1" in refused("finetune", packed, "--data", text_file, "--lora-rank", 0)
    short = ("--sequence-length", 64, "--context", 64)  # longer ones than the model's positions are told of
    line = refused("finetune", packed, "--data", text_file, "--target-modules", "queries", *short)
    assert "q_proj" in line
    assert "got 'queries'" in line
    assert "name a text" in refused("finetune", packed, "--data", "self")
    assert "--adapter is required" in refused("merge", packed)
    assert "adapter_config.json" in refused("merge", packed, "--adapter", packed)
    assert os.listdir(tmp_path) == []


@pytest.fixture(scope="module")
def merged(packed, tuned, tmp_path_factory):
    output = tmp_path_factory.mktemp("merged") / "model"
    values = {"adapter": str(tuned[0]), "output": str(output), "start_tokens": 2048, "learning_rate": 1e-3}
    small = {"context": 64, "eval_windows": 2, "device": "cpu", "sequence_length": 64}
    return output, merge(packed, MergeConfig(**values, **small, max_perplexity_ratio=0))


def test_the_merged_model_is_within_three_percent_of_the_adapted_one(packed, tuned, merged):
    output, report = merged
    measured = report["perplexity"]
    assert measured["compressed"] == pytest.approx(tuned[1]["perplexity"]["compressed"], rel=1e-6)
    assert measured["adapted"] == pytest.approx(tuned[1]["perplexity"]["adapted"], rel=1e-6)
    assert measured["merged"] < 1.03 * measured["adapted"]
    assert report["weights_bytes"] == report["original_weights_bytes"]
    assert json.loads(json.dumps(report)) == json.loads((output / "merge.json").read_text())


def test_the_merged_model_is_an_ordinary_checkpoint_with_the_same_embeddings(packed, merged, ids):
    model, before = edkm_cli.load(merged[0]), edkm_cli.load(packed)
    assert torch.isfinite(model(ids).logits).all()
    ends = [before.get_input_embeddings(), model.get_input_embeddings()]
    assert torch.equal(ends[0].indices, ends[1].indices)
    changed = [
        name
        for name, tensor in model.state_dict().items()
        if name.endswith("indices") and "proj" in name and not torch.equal(tensor, before.state_dict()[name])
    ]
    assert len(changed) == 14


def test_what_is_not_compressed_keeps_its_number_format_in_a_merge(text_file, tmp_path):
    model = tiny_llama(bias=True).bfloat16()
    model.model.norm.float()
    packed = export(*cluster(model), tmp_path / "packed")
    byte_tokenizer().save_pretrained(packed)
    finetune(packed, settings(text_file, tmp_path / "adapter", steps=1))
    small = {"start_tokens": 256, "steps": 1, "context": 64, "eval_windows": 1, "sequence_length": 32, "device": "cpu"}
    merge(packed, MergeConfig(str(tmp_path / "adapter"), str(tmp_path / "out"), max_perplexity_ratio=0, **small))
    before, after = stored_tensors(packed), stored_tensors(tmp_path / "out")
    assert after == before
    assert "bfloat16" in before["model.layers.0.input_layernorm.weight"]
    assert "float32" in before["model.norm.weight"]
    assert edkm_cli.load(tmp_path / "out").dtype == torch.bfloat16


def test_too_little_text_is_refused_before_anything_is_clustered(packed, tuned, text_file, tmp_path, monkeypatch):
    (tmp_path / "short.txt").write_text("too\nshort\n")
    texts = {"data": (str(tmp_path / "short.txt"),), "eval_data": (str(text_file),), "sequence_length": 64}
    monkeypatch.setattr("edkm_cli.finetune.merge.cluster_again", None)
    with pytest.raises(UserError, match="at least 64 tokens"):
        merge(packed, MergeConfig(str(tuned[0]), str(tmp_path / "out"), context=64, device="cpu", **texts))


def test_a_merged_model_that_is_worse_than_allowed_is_no_success(packed, tuned, tmp_path):
    small = [
        "--start-tokens",
        256,
        "--start-passes",
        0,
        "--steps",
        0,
        "--context",
        64,
        "--eval-windows",
        2,
        "--device",
        "cpu",
    ]
    line = refused_after_work("merge", packed, "--adapter", tuned[0], "-o", tmp_path / "out", *small,
                              "--max-perplexity-ratio", 0.5)  # fmt: skip
    assert "--max-perplexity-ratio 0.5" in line
    assert not (tmp_path / "out").exists()
    status, out, err = run("merge", packed, "--adapter", tuned[0], "-o", tmp_path / "out", *small, "--overwrite",
                           "--max-perplexity-ratio", 0)  # fmt: skip
    assert status == 0, err
    assert [word in out for word in ("compressed", "with the adapter", "merged")] == [True] * 3


def test_every_key_of_both_reports_is_explained(tuned, merged):
    page = (Path(edkm_cli.__file__).parent.parent / "docs" / "results.md").read_text(encoding="utf-8")
    assert (tuned[1].keys() | merged[1].keys()) - set(re.findall(r"`(\w+)`", page)) == set()


def refused_after_work(*arguments):
    status, _, err = run(*arguments)
    assert status == 2
    return err.strip().splitlines()[-1]


def test_an_adapter_of_another_model_or_of_the_head_is_refused(packed, text_file, tuned, tmp_path):
    other = export(*cluster(tiny_llama(hidden=32)), tmp_path / "other")
    byte_tokenizer().save_pretrained(other)
    assert "does not fit" in refused("merge", other, "--adapter", tuned[0], "-o", tmp_path / "out")
    finetune(packed, settings(text_file, tmp_path / "head", steps=1, target_modules=("lm_head",)))
    small = ("--context", 64, "--eval-windows", 1)
    line = refused_after_work("merge", packed, "--adapter", tmp_path / "head", "-o", tmp_path / "out", *small)
    assert "lm_head" in line


def test_an_adapter_of_another_base_or_one_that_is_merged_already_is_refused(packed, tuned, merged, tmp_path):
    other = export(*cluster(tiny_llama(bias=True, seed=1)), tmp_path / "other")
    byte_tokenizer().save_pretrained(other)
    line = refused("merge", other, "--adapter", tuned[0], "-o", tmp_path / "out")
    assert "does not fit" in line
    assert str(packed) in line
    assert "is part of" in refused("merge", merged[0], "--adapter", tuned[0], "-o", tmp_path / "out")
    plain = tmp_path / "plain"  # as peft writes it: only its configuration names the base
    shutil.copytree(tuned[0], plain, ignore=shutil.ignore_patterns("edkm-files.json"))
    assert str(packed) in refused("merge", other, "--adapter", plain, "-o", tmp_path / "out")
    assert "is part of" in refused("merge", merged[0], "--adapter", plain, "-o", tmp_path / "out")
    require_base(PackedSession(packed, MergeConfig(), World(), Observer(), dtype="float32"), plain)
    moved = tmp_path / "moved"  # the same files elsewhere are the same model
    shutil.copytree(packed, moved)
    require_base(PackedSession(moved, MergeConfig(), World(), Observer(), dtype="float32"), tuned[0])


def test_a_merge_learns_as_the_adapter_did(packed, text_file, tmp_path):
    finetune(packed, settings(text_file, tmp_path / "adapter", steps=1, packing=True, train_on="all"))
    report = json.loads((tmp_path / "adapter" / "finetune.json").read_text())
    report["config"]["streaming"] = False  # a part of a hub set can be had in no other way
    (tmp_path / "adapter" / "finetune.json").write_text(json.dumps(report))
    found = with_data(MergeConfig(adapter=str(tmp_path / "adapter")), tmp_path / "adapter")
    assert (found.packing, found.train_on, found.streaming, found.long_records) == (True, "all", False, "split")
    report["config"]["long_records"] = "drop"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "finetune.json").write_text(json.dumps(report))
    assert with_data(MergeConfig(adapter=str(tmp_path / "other")), tmp_path / "other").long_records == "drop"
    asked = MergeConfig(adapter=str(tmp_path / "adapter"), packing=False, train_on="completions")
    found = with_data(asked, tmp_path / "adapter")
    assert (found.packing, found.train_on) == (False, "completions")
    small = {"start_tokens": 256, "steps": 1, "context": 64, "eval_windows": 1, "sequence_length": 32, "device": "cpu"}
    merge(packed, MergeConfig(str(tmp_path / "adapter"), str(tmp_path / "out"), max_perplexity_ratio=0, **small))
    assert json.loads((tmp_path / "out" / "merge.json").read_text())["config"]["packing"] is True


def test_a_finished_adapter_is_returned_only_for_the_model_and_text_it_was_trained_on(packed, text_file, tmp_path):
    model, text = tmp_path / "model", tmp_path / "text.txt"
    shutil.copytree(packed, model)
    shutil.copyfile(text_file, text)
    asked = settings(text, tmp_path / "out", steps=1)
    report = finetune(model, asked)
    assert finetune(model, asked, resume=True) == json.loads(json.dumps(report))
    text.write_text(text_file.read_text().replace("fox", "owl"))
    with pytest.raises(UserError, match=r"is finished, but .*tokens_sha256"):
        finetune(model, asked, resume=True)
    shutil.copyfile(text_file, text)
    (model / "generation_config.json").write_text('{"temperature": 0.5}')
    with pytest.raises(UserError, match="model_sha256"):
        finetune(model, asked, resume=True)


def test_the_text_of_the_merge_is_by_default_that_of_the_adapter(tuned, text_file, tmp_path):
    found = with_data(MergeConfig(adapter=str(tuned[0])), tuned[0])
    assert found.data == (str(text_file),)
    with pytest.raises(UserError, match="--data is required"):
        with_data(MergeConfig(adapter=str(tmp_path)), tmp_path)


def test_an_adapter_that_reads_back_differently_is_not_put_in_place(packed, text_file, tmp_path, monkeypatch):
    save = command.save_adapter

    def spoilt(model, directory, **options):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.zeros_(parameter)
        save(model, directory, **options)

    monkeypatch.setattr(command, "save_adapter", spoilt)
    with pytest.raises(UserError, match="must give the logits"):
        finetune(packed, settings(text_file, tmp_path / "out", steps=2))
    assert not (tmp_path / "out").exists()


def test_a_run_that_would_learn_no_token_is_refused_before_it_trains(packed, tmp_path):
    """Prompts as long as sequences, with answers of a word behind them."""
    text = tmp_path / "prompts.jsonl"
    records = [{"prompt": f"{number} " + "why? " * 200, "completion": "."} for number in range(40)]
    text.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(UserError, match="must hold a token to learn"):
        finetune(packed, settings(text, tmp_path / "out", steps=2, seed=3))
    assert not list(tmp_path.glob("out*"))  # nothing was measured yet
    report = finetune(packed, settings(text, tmp_path / "out", steps=2, train_on="all"))
    assert report["steps"] == 2


def test_a_stopped_merge_leaves_nothing_in_the_way_of_another(packed, tuned, text_file, tmp_path, monkeypatch):
    settings_of = {"adapter": str(tuned[0]), "output": str(tmp_path / "out"), "data": (str(text_file),), "steps": 3}
    config = MergeConfig(**{**settings_of, **SIZES, "start_tokens": 512, "max_perplexity_ratio": 0})
    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "write", lambda self, record: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Preempted, match="nothing was saved"):
            merge(packed, config)
    assert merge(packed, config)["steps"] == 3
