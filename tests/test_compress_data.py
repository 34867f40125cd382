"""Whole runs on data of every kind: masks, packing, weights, measuring on the way, and what the report says of it."""

import json

import pytest

from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.evaluate.command import evaluate_model
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.progress import Observer
from edkm_cli.report.document import build_report
from edkm_cli.summaries import summary
from helpers import assert_same_run, byte_tokenizer, metrics_of, refused, settings, tiny_llama, weights_of

CHATML = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "chat"
    tiny_llama().save_pretrained(directory)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def chat(tmp_path):
    path = tmp_path / "chat.jsonl"
    turns = [
        [{"role": "user", "content": f"Count {i}?"}, {"role": "assistant", "content": f"{i}, {i + 1}." + "!" * (i % 9)}]
        for i in range(60)
    ]
    path.write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in turns))
    return path


@pytest.mark.parametrize(
    "learnt", [{}, {"distill": False}, {"label_weight": 0.0}]
)  # layers stay in the files with the last
def test_conversations_are_packed_and_their_answers_learnt(chat_model, chat, tmp_path, learnt):
    config = settings(chat_model, chat, tmp_path / "out", packing=True, gradient_accumulation=2, **learnt)
    report = compress(config)
    (source,) = report["data"]["sources"]
    assert source["documents"] == 53  # a tenth of the characters is held out
    assert source["trained"] + source["masked"] == source["tokens"]
    assert 0 < source["trained"] < source["masked"]
    assert report["data"]["padded"] > 0
    assert report["data"]["dropped"] == 0
    assert len(metrics_of(tmp_path / "out")) == 4


def test_accumulated_steps_weigh_tokens_not_micro_batches(chat_model, chat, tmp_path):
    """Two micro-batches of one sequence are one of two, although they have different numbers of answer tokens."""
    losses = []
    for batch_size, accumulation in ((1, 4), (4, 1)):
        output = tmp_path / f"{batch_size}"
        config = settings(chat_model, chat, output, batch_size=batch_size, gradient_accumulation=accumulation, steps=2)
        compress(config)
        losses.append(metrics_of(output))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_weighted_sources_are_mixed_and_a_resumed_run_is_the_same(model_directory, text_file, chat, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Something else, line by line.\n" * 50)
    options = {"data": (f"{text_file}=0.7", f"{other}=0.3"), "save_every": 2}
    compress(settings(model_directory, text_file, tmp_path / "whole", **options))
    first = settings(model_directory, text_file, tmp_path / "cut", **options)

    class Stop(Exception):
        pass

    def stop(text):
        if (tmp_path / "cut.partial" / "checkpoints" / "step-000002").exists():
            raise Stop

    with pytest.raises(Stop):
        compress(first, observer=Observer(show=stop))
    report = compress(first, resume=True)
    assert_same_run(tmp_path / "cut", tmp_path / "whole")
    assert [row["weight"] for row in report["data"]["sources"]] == [0.7, 0.3]


def test_shares_of_sources_decide_the_start_too(model_directory, text_file, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("Something else, line by line.\n" * 50)
    starts = []
    for number, (first, second) in enumerate(((0.99, 0.01), (0.01, 0.99))):
        data = (f"{text_file}={first}", f"{other}={second}")
        compress(settings(model_directory, text_file, tmp_path / str(number), data=data, steps=0, start="compensated"))
        starts.append(weights_of(tmp_path / str(number)))
    assert starts[0] != starts[1]


@pytest.mark.parametrize("more", [{}, {"mode": "hard", "granularity": "tensor", "temperature": 0.3}])
def test_measured_on_the_way_the_best_step_is_kept(model_directory, text_file, tmp_path, more):
    options = {"eval_every": 1, "steps": 4, "learning_rate": 3.0, "lut_learning_rate": 3.0, "warmup": 1.0, **more}
    last = compress(settings(model_directory, text_file, tmp_path / "last", **options))
    best = compress(settings(model_directory, text_file, tmp_path / "best", keep_best=True, **options))
    measured = [next(iter(one.values())) for one in metrics_of(tmp_path / "best", "perplexity")]
    assert measured == [next(iter(one.values())) for one in metrics_of(tmp_path / "last", "perplexity")]
    assert min(measured) < measured[-1]  # so large a rate that the last step is not the best
    assert best["perplexity"]["trained"] == pytest.approx(min(measured), rel=1e-6)
    if not more:  # else the tables of the last step go on once more
        assert last["perplexity"]["trained"] == pytest.approx(measured[-1], rel=1e-6)
    assert weights_of(tmp_path / "best") != weights_of(tmp_path / "last")


def test_the_best_step_needs_steps_that_are_measured(model_directory, text_file, tmp_path):
    with pytest.raises(UserError, match="eval_every is 0"):
        settings(model_directory, text_file, tmp_path / "out", keep_best=True)


def test_a_text_that_is_trained_on_is_not_measured(model_directory, text_file, tmp_path):
    arguments = [
        "compress",
        "--model",
        model_directory,
        "--data",
        text_file,
        "--device",
        "cpu",
        "--steps",
        0,
        "--context",
        64,
    ]
    line = refused(*arguments, "--eval-data", text_file, "-o", tmp_path / "out")
    assert "must not be trained on" in line


def test_several_texts_are_measured_and_a_document_that_is_trained_on_is_told_loudly(
    model_directory, text_file, tmp_path
):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    texts = [f"Document {i} says {i * i} and goes on for a while." for i in range(40)]
    train.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    test.write_text("".join(json.dumps({"text": text}) + "\n" for text in [texts[3], "Quite another.", texts[7]]))
    said = []
    names = (str(text_file), str(test))
    config = settings(
        model_directory, train, tmp_path / "out", data=(str(train),), eval_data=names, steps=2, eval_every=1, context=32
    )
    report = compress(config, observer=Observer(say=said.append))
    warnings = [line for line in said if line.startswith("WARNING")]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"WARNING: 2 of 3 documents and lines of {test}")
    first, second = report["texts"]
    assert (first["data"], second["data"]) == names
    assert first["measured_and_trained_on"]["found"] == 0
    assert second["measured_and_trained_on"] == {"found": 2, "of": 3}
    assert report["data"]["measured_and_trained_on"]["found"] == 2
    assert report["perplexity"] == {stage: first[stage] for stage in ("original", "start", "trained", "exported")}
    assert report["evaluation"]["data"] == names[0]
    # The exported model beside the uncompressed one, by the command itself.
    again = evaluate_model(
        str(tmp_path / "out"),
        EvalConfig(data=tuple(names), context=32, max_windows=2, device="cpu", reference=str(model_directory)),
    )
    for row, text in zip(report["texts"], again["texts"], strict=True):
        assert row["exported"] == pytest.approx(text["perplexity"], rel=1e-4)
        assert row["kl_per_token"] == pytest.approx(text["kl_per_token"], rel=1e-3)
        assert row["top1_agreement"] == pytest.approx(text["top1_agreement"], abs=0.02)
        assert row["windows"] == text["windows"]
    assert again["perplexity"] == again["texts"][0]["perplexity"]
    last = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()][-1]
    for figure, stage in (("perplexity", "trained"), ("kl_per_token", None), ("top1_agreement", None)):
        for row in report["texts"]:
            wanted = row[stage] if stage else row["stages"]["trained"][figure]
            assert last[figure][row["data"]] == pytest.approx(wanted, rel=1e-5)
    for page in (summary("compress", report), (tmp_path / "out" / "README.md").read_text()):
        assert "text.txt | test.jsonl" in page
        assert f"{second['exported']:,.3f}" in page
        assert f"{second['kl_per_token']:.4f}" in page
    build_report(tmp_path / "out", weights=False)
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"{second['exported']:,.2f}" in page
    assert "Perplexity by step" in page


def test_a_text_is_measured_once_and_one_name_is_a_list_of_one(model_directory):
    assert CompressConfig(eval_data="a.txt").eval_data == ("a.txt",)
    with pytest.raises(UserError, match=r"eval_data names a.txt twice"):
        CompressConfig(eval_data=("a.txt", "b.txt", "a.txt"))
    line = refused("eval", model_directory, "--data", "builtin", "--eval-data", "builtin", "--device", "cpu")
    assert "each text once" in line


@pytest.mark.parametrize("distill", [False, True])
def test_a_token_beyond_the_embeddings_is_refused_before_the_work(distill, text_file, tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<mark>"], special_tokens=True)
    tiny_llama().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    compress(settings(tmp_path / "model", text_file, tmp_path / "out", steps=0))  # it is in no text
    text = tmp_path / "marked.txt"
    text.write_text(text_file.read_text() + "<mark>" + text_file.read_text())
    with pytest.raises(UserError, match="--data has token 257, the model has 257 embeddings"):
        compress(settings(tmp_path / "model", text, tmp_path / "two", distill=distill))
