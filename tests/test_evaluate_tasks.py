"""Benchmark tasks from local files, on a plain and a compressed model, against log-likelihoods computed by hand."""

import json
import math
import shutil

import pytest
import torch

from edkm_cli.errors import UserError
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.evaluate.tasks import _manager, load_tasks, run_tasks
from edkm_cli.hf import load
from helpers import byte_tokenizer, cluster, export, refused, run, tiny_llama

lm_eval = pytest.importorskip("lm_eval")

_CHOICE = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: questions.jsonl
output_type: multiple_choice
test_split: test
doc_to_text: "Q: {{{{question}}}}\\nA:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
metric_list:
  - metric: acc
  - metric: acc_norm
metadata:
  version: 2.5
"""
_WRITE = """\
task: little_answers
dataset_path: json
dataset_kwargs:
  data_files:
    validation: answers.jsonl
output_type: generate_until
validation_split: validation
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 3
  do_sample: false
metric_list:
  - metric: exact_match
"""
QUESTIONS = [
    {"question": f"{7 * i} or {i}?", "choices": ["yes", f"no, {i}", "it depends"], "label": i % 3} for i in range(12)
]


@torch.no_grad()
def continuation_logprob(model, tokenizer, context, continuation):
    """Sum of log p(token) over the continuation's tokens, one plain forward pass."""
    start, whole = len(tokenizer(context)["input_ids"]), tokenizer(context + continuation)["input_ids"]
    logprobs = model(input_ids=torch.tensor([whole])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[position - 1, whole[position]]) for position in range(start, len(whole)))


def answered(model):
    """Whether each of QUESTIONS is answered right, by log-likelihood."""
    return [scores.index(max(scores)) == document["label"] for document, scores in scored(model)]


def scored(model):
    """Each of QUESTIONS with the log-likelihoods of its choices."""
    tokenizer = byte_tokenizer()
    for document in QUESTIONS:
        scores = [
            continuation_logprob(model, tokenizer, f"Q: {document['question']}\nA:", f" {choice}")
            for choice in document["choices"]
        ]
        yield document, scores


def accuracies(model):
    """(acc, acc_norm) of QUESTIONS: the likeliest answer, by log-likelihood and by log-likelihood a character."""
    hits_norm = 0
    for document, scores in scored(model):
        norms = [score / len(choice) for score, choice in zip(scores, document["choices"], strict=True)]
        hits_norm += norms.index(max(norms)) == document["label"]
    return sum(answered(model)) / len(QUESTIONS), hits_norm / len(QUESTIONS)


def written(model, prompt, tokens=3):
    """Greedy continuation, one full forward pass a token, cut at a newline."""
    tokenizer = byte_tokenizer()
    ids = tokenizer(prompt)["input_ids"]
    start = len(ids)
    while len(ids) < start + tokens and ids[-1] != tokenizer.eos_token_id:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return tokenizer.decode(ids[start:], skip_special_tokens=True).split("\n")[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Task files with their data beside them, named relative to the directory."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    directory = tmp_path / "tasks"
    directory.mkdir()
    (directory / "choice.yaml").write_text(_CHOICE.format(name="little_choices"))
    (directory / "write.yaml").write_text(_WRITE)
    (directory / "questions.jsonl").write_text("".join(json.dumps(document) + "\n" for document in QUESTIONS))
    model = tiny_llama()
    prompts = [f"{i} and {i * i} make " for i in range(10)]
    answers = [written(model, prompt) if i % 2 else "nothing like it" for i, prompt in enumerate(prompts)]
    lines = [json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(prompts, answers, strict=True)]
    (directory / "answers.jsonl").write_text("".join(lines))
    return directory


@pytest.fixture(scope="module")
def compressed_directory(tmp_path_factory):
    """The tiny model at 2 bits, so that it answers differently, with its tokenizer."""
    model, spec = cluster(tiny_llama(), bits=2)
    directory = export(model, spec, tmp_path_factory.mktemp("models") / "compressed")
    byte_tokenizer().save_pretrained(directory)
    return directory


def test_plain_and_compressed_models_get_the_accuracy_of_plain_torch(
    folder, model_directory, compressed_directory, tmp_path
):
    plain, compressed = tiny_llama(), load(compressed_directory)
    prompts = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    found = []
    for directory, reference in ((model_directory, plain), (compressed_directory, compressed)):
        status, text, err = run(
            "eval", directory, "--tasks", "little_choices,little_answers", "--task-path", folder, "--device", "cpu",
            "--json", tmp_path / "e.json",
        )  # fmt: skip
        assert status == 0, err
        result = json.loads((tmp_path / "e.json").read_text())
        choices, answers = result["tasks"]["little_choices"], result["tasks"]["little_answers"]
        assert (choices["acc"], choices["acc_norm"]) == pytest.approx(accuracies(reference))
        right = [written(reference, document["question"]) == document["answer"] for document in prompts]
        assert answers["exact_match"] == pytest.approx(sum(right) / len(right))
        # the sample standard deviation of the twelve hits over the root of their number
        deviation = math.sqrt(choices["acc"] * (1 - choices["acc"]) / (len(QUESTIONS) - 1))
        assert choices["acc_stderr"] == pytest.approx(deviation)
        assert (choices["samples"], choices["num_fewshot"], choices["version"]) == (12, 0, 2.5)
        assert result["lm_eval_version"] == lm_eval.__version__
        assert result["perplexity"] is None
        assert result["data"] is None
        assert result["weights_bytes"] > 0
        assert "perplexity" not in text
        assert "little_choices" in text
        assert f"{choices['acc']:.4f} +- {choices['acc_stderr']:.4f}" in text
        found.append((choices["acc_norm"], answers["exact_match"]))
    assert found[0][1] == 0.5  # half of the answers are what the plain model writes
    assert found[0] != found[1]  # the compressed model was measured, not the plain one again


def test_beside_a_reference_there_are_recovery_and_the_answers_that_changed(
    folder, model_directory, compressed_directory, tmp_path
):
    status, text, err = run(
        "eval", compressed_directory, "--reference", model_directory, "--tasks", "little_choices", "--task-path", folder,
        "--context", 32, "--max-windows", 2, "--prompts", 0, "--max-kl", 0, "--min-agreement", 0,
        "--device", "cpu", "--json", tmp_path / "e.json", "--page", tmp_path / "e.html",
    )  # fmt: skip
    assert status == 0, err
    result = json.loads((tmp_path / "e.json").read_text())
    right = [answered(model) for model in (tiny_llama(), load(compressed_directory))]
    row = result["recovery"]["little_choices"]["acc"]
    assert row["reference"] == pytest.approx(sum(right[0]) / 12)
    assert row["model"] == result["tasks"]["little_choices"]["acc"] == pytest.approx(sum(right[1]) / 12)
    assert row["recovery"] == pytest.approx(sum(right[1]) / sum(right[0]))
    pairs = list(zip(*right, strict=True))
    assert (row["lost"], row["won"]) == (pairs.count((True, False)) / 12, pairs.count((False, True)) / 12)
    norm = result["recovery"]["little_choices"]["acc_norm"]
    assert norm["lost"] + norm["won"] > 0
    assert norm["won"] - norm["lost"] == pytest.approx(norm["model"] - norm["reference"])
    assert "recovery" in text
    assert "<h2>Tasks</h2>" in (tmp_path / "e.html").read_text()


def test_limit_batches_and_examples_in_the_prompt(folder):
    model, tokenizer = tiny_llama(), byte_tokenizer()
    loaded = load_tasks(EvalConfig(tasks="little_choices", task_path=str(folder)))
    whole = run_tasks(model, tokenizer, loaded)
    assert run_tasks(model, tokenizer, loaded, batch_size=5) == whole
    first = run_tasks(model, tokenizer, loaded, limit=5)[0]["little_choices"]
    assert first["samples"] == 5
    shots = run_tasks(
        model, tokenizer, load_tasks(EvalConfig(tasks="little_choices", task_path=str(folder), num_fewshot=2)), limit=5
    )
    assert shots[0]["little_choices"]["num_fewshot"] == 2
    again = run_tasks(
        model, tokenizer, load_tasks(EvalConfig(tasks="little_choices", task_path=str(folder), num_fewshot=2)), limit=5
    )
    assert again == shots  # the same examples are drawn
    loaded = load_tasks(EvalConfig(tasks="little_choices", task_path=str(folder), num_fewshot=2))
    assert [run_tasks(model, tokenizer, loaded, limit=5) for _ in range(2)] == [shots] * 2  # for a reference, too


def test_tasks_that_run_code_are_refused_before_anything_is_measured(folder):
    (folder / "coded.yaml").write_text(_WRITE.replace("little_answers", "coded") + "unsafe_code: true\n")
    with pytest.raises(UserError, match="--tasks coded runs code that a model writes"):
        load_tasks(EvalConfig(tasks="coded", task_path=str(folder)))


def test_a_local_file_comes_before_the_harness_s_own_task(folder):
    (folder / "choice.yaml").write_text(_CHOICE.format(name="piqa"))
    tasks = load_tasks(EvalConfig(tasks="piqa", task_path=str(folder)))["piqa"]["tasks"]
    assert len(tasks["piqa"].eval_docs) == len(QUESTIONS)


def test_perplexity_and_tasks_together(folder, compressed_directory, text_file, tmp_path):
    arguments = ["eval", compressed_directory, "--data", text_file, "--context", 32, "--max-windows", 2]
    status, _, err = run(*arguments, "--json", tmp_path / "without.json")
    assert status == 0, err
    status, _, err = run(
        *arguments, "--tasks", "little_choices", "--limit", 2, "--task-path", folder, "--json", tmp_path / "with.json"
    )
    assert status == 0, err
    without, with_ = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("without", "with"))
    assert "tasks" not in without
    for key in ("perplexity", "windows", "weights_bytes", "decoder_bits_per_weight", "model_bits_per_weight"):
        assert with_[key] == without[key]


class TestErrors:
    def test_without_the_harness(self, model_directory, monkeypatch):
        import edkm_cli.evaluate.tasks

        monkeypatch.setattr(edkm_cli.evaluate.tasks, "find_spec", lambda name: None)
        line = refused("eval", model_directory, "--tasks", "piqa")
        assert "pip install 'edkm-cli[eval]'" in line

    @pytest.mark.parametrize(("names", "message"), [("", "at least one task"), (" , ", "at least one task")])
    def test_no_names(self, model_directory, names, message):
        assert message in refused("eval", model_directory, "--tasks", names)

    @pytest.mark.slow
    def test_unknown_task_and_unreachable_hub(self, model_directory, folder, monkeypatch):
        everything = _manager(["piqa"], folder)  # once: it reads the harness's own 15,000, too
        monkeypatch.setattr("edkm_cli.evaluate.tasks._manager", lambda names, folder: everything)
        line = refused("eval", model_directory, "--tasks", "little_choises", "--task-path", folder)
        assert "did you mean 'little_choices'" in line
        line = refused("eval", model_directory, "--tasks", "piqa")
        assert "hub" in line
        assert "--task-path" in line

    @pytest.mark.parametrize(
        ("file", "content", "message"),
        [
            ("choice.yaml", "task: [", "choice.yaml is not YAML"),
            ("choice.yaml", "- 1\n", "must hold a mapping"),
            ("choice.yaml", "task: little_choices\noutput_type: guess\n", "choice.yaml cannot be used"),
            ("choice.yaml", _CHOICE.format(name="little_choices").replace("questions.", "none."), "cannot be used"),
            ("questions.jsonl", None, "cannot be used"),
            ("questions.jsonl", "{broken\n", "cannot be used"),
            ("questions.jsonl", '{"other": 1}\n', "cannot be used"),
        ],
    )
    def test_broken_task_files(self, model_directory, folder, file, content, message):
        if content is None:
            (folder / file).unlink()
        else:
            (folder / file).write_text(content)
        line = refused("eval", model_directory, "--tasks", "little_choices", "--task-path", folder)
        assert message in line

    @pytest.mark.parametrize("label", [7, -1, "maybe", None])
    def test_an_answer_that_is_no_choice_is_not_counted_as_wrong(self, folder, label):
        """The harness would: a misspelt field then looks like a bad model."""
        records = [{**document, "label": str(document["label"])} for document in QUESTIONS[:3]]
        records.append({**records[0], "label": label if label is None else str(label)})
        (folder / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        text = _CHOICE.format(name="little_choices").replace("doc_to_target: label", 'doc_to_target: "{{label}}"')
        (folder / "choice.yaml").write_text(text)
        with pytest.raises(UserError, match="document 3"):  # before any model is read
            load_tasks(EvalConfig(tasks="little_choices", task_path=str(folder)))
        loaded = load_tasks(EvalConfig(tasks="little_choices", task_path=str(folder), limit=3))
        assert run_tasks(tiny_llama(), byte_tokenizer(), loaded, limit=3)[0]["little_choices"]["samples"] == 3

    def test_a_task_that_does_not_fit_the_model(self, folder):
        (folder / "write.yaml").write_text(_WRITE.replace("max_gen_toks: 3", "max_gen_toks: 300"))
        with pytest.raises(UserError, match=r"little_answers does not fit .*maximum sequence length"):
            run_tasks(
                tiny_llama(), byte_tokenizer(), load_tasks(EvalConfig(tasks="little_answers", task_path=str(folder)))
            )

    def test_task_path_that_is_none(self, model_directory, tmp_path):
        assert "must be a directory" in refused("eval", model_directory, "--tasks", "a", "--task-path", tmp_path / "no")
        assert "holds none" in refused("eval", model_directory, "--tasks", "a", "--task-path", tmp_path)

    def test_speed_needs_a_text(self, model_directory, folder):
        line = refused("eval", model_directory, "--tasks", "little_choices", "--task-path", folder, "--speed")
        assert "--data" in line

    def test_a_metric_that_is_code_is_not_fetched(self, folder, tmp_path, monkeypatch):
        """The harness takes a metric it does not know for a script: here one on disk, which would leave a trace."""
        trace = tmp_path / "was-run"
        (tmp_path / "spy").mkdir()
        (tmp_path / "spy" / "spy.py").write_text(f"open({str(trace)!r}, 'w')\n")
        text = _CHOICE.format(name="little_choices").replace("metric: acc_norm", f"metric: {tmp_path / 'spy'}")
        (folder / "choice.yaml").write_text(text)
        with pytest.raises(UserError, match="--trust-remote-code"):
            load_tasks(EvalConfig(tasks="little_choices", task_path=str(folder)))
        assert not trace.exists()
        with pytest.raises(UserError):  # allowed, but the script is no metric
            load_tasks(EvalConfig(tasks="little_choices", task_path=str(folder), trust_remote_code=True))
        assert trace.exists()


def test_logits_that_are_no_numbers_are_no_answers(folder, model_directory, tmp_path):
    shutil.copytree(model_directory, tmp_path / "model")
    model = tiny_llama()
    with torch.no_grad():
        model.model.norm.weight.fill_(3e38)
    model.save_pretrained(tmp_path / "model")
    command = ("eval", tmp_path / "model", "--tasks", "little_choices", "--task-path", folder, "--device", "cpu")
    status, _, err = run(*command)
    assert status == 2
    assert err.rstrip().endswith(
        "--tasks need logits that are numbers, but some are NaN; use --dtype float32 or bfloat16"
    )
