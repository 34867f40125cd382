"""`edkm report`: the page says what the files say, draws it to scale, loads nothing, and escapes everything."""

import json
import os
import shutil
import threading
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from markupsafe import Markup
from safetensors.torch import load_file, save_file

from edkm_cli.hf import load
from edkm_cli.report.charts import bars
from edkm_cli.report.document import build_report
from edkm_cli.report.layers import measure_weights, place
from edkm_cli.report.read import RunFiles
from families import family
from helpers import cluster, compress_arguments, export, refused, run, tiny_llama

HOSTILE = "<script>alert('x')</script>\x00\"&"


@pytest.fixture(scope="module")
def finished(model_directory, text_file, tmp_path_factory):
    """A run of 40 steps in soft mode, so that there are a soft and a hard loss, and enough steps for a mean."""
    out = tmp_path_factory.mktemp("runs") / "out"
    status, _, err = run(*compress_arguments(model_directory, text_file, out, "--steps", 40, "--mode", "soft"))
    assert status == 0, err
    return out


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "out")


def _run(directory, model, original_weights_bytes):
    """A finished run of a checkpoint, as far as its weights are looked at."""
    report = {"model": model, "original_weights_bytes": original_weights_bytes}
    return RunFiles(directory, model, report, settings={}, texts=[])


def parsed(path):
    """The page as a tree: it is well-formed XML, and a browser's parser finds nothing unclosed either."""
    content = path.read_text(encoding="utf-8")
    assert content.startswith("<!DOCTYPE html>")

    class Balance(HTMLParser):
        open_tags: list[str] = []  # noqa: RUF012

        def handle_starttag(self, name, attributes):
            self.open_tags.append(name)

        def handle_startendtag(self, name, attributes):
            assert name in ("meta", "br", "line", "rect", "circle", "path")  # a browser closes no others

        def handle_endtag(self, name):
            assert self.open_tags.pop() == name

    balance = Balance()
    balance.open_tags = []
    balance.feed(content)
    assert balance.open_tags == []
    return ElementTree.fromstring(content.removeprefix("<!DOCTYPE html>"))


def words(tree):
    return " ".join("".join(tree.itertext()).split())


def edit_report(directory, **changes):
    """Other facts in a report, of a run that says nothing of its model's files."""
    (directory / "edkm-files.json").unlink(missing_ok=True)
    path = directory / "report.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a__run(copied, tmp_path):
    status, text, err = run("report", copied, "--json", tmp_path / "r.json")
    assert status == 0, err
    page = copied / "report.html"
    assert text.strip() == str(page)
    tree, report = parsed(page), json.loads((copied / "report.json").read_text())
    content = words(tree)
    for stage in ("original", "start", "trained", "exported"):
        assert f"{report['perplexity'][stage]:,.2f}" in content
    assert f"{report['original_weights_bytes'] / report['weights_bytes']:.2f}x" in content
    assert f"{report['decoder_bits_per_weight']:.3f}" in content
    assert report["versions"]["torch"] in content
    assert report["hardware"]["cpu"] in content
    assert [heading.text for heading in tree.iter("h2")] == [
        "Perplexity", "Training", "Size", "Error by layer", "Weights and their lookup tables",
        "Settings, versions and hardware",
    ]  # fmt: skip
    charts = list(tree.iter("svg"))
    # perplexity, loss, learning rate, gradient norm, temperature, size, errors; two layers of seven projections
    assert len(charts) == 7 + 14
    assert all(chart.get("role") == "img" and chart.get("aria-label") for chart in charts)
    assert "hard loss" in content
    tables = [caption.text for caption in tree.iter("caption")]
    for name in ("Perplexity by stage", "Bytes by part", "Relative squared error", "Table entries"):
        assert name in tables  # every figure has its table
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["finished"]
    assert len(result["layers"]) == 14
    assert load(copied)  # the page in the directory does not disturb the checkpoint


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"label_weight": 0.0}, "Trained on the KL divergence from the original's predictions;"),
        (
            {"label_weight": 0.5},
            "Trained on the KL divergence from the original's predictions plus 0.5 times the next-token loss;",
        ),
        ({"distill": False, "label_weight": 1.0}, "Trained on the next-token loss;"),
    ],
)
def test_the_page_says_what_was_trained_on(copied, settings, sentence):
    report = json.loads((copied / "report.json").read_text())
    edit_report(copied, resolved={**report["resolved"], **settings})
    build_report(copied, weights=False)
    assert sentence in words(parsed(copied / "report.html"))


def test_the_page_loads_nothing_and_runs_nothing(finished, tmp_path):
    build_report(finished, output=tmp_path / "p.html")
    tree = parsed(tmp_path / "p.html")
    names = {element.tag for element in tree.iter()}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "use", "image", "form", "base"}
    for element in tree.iter():
        for key, value in element.attrib.items():
            assert key not in ("src", "href", "srcset", "xlink:href")
            assert not key.startswith("on")
            assert "http:" not in value
            assert "https:" not in value
            assert "url(" not in value
    assert "url(" not in next(tree.iter("style")).text
    assert "@import" not in next(tree.iter("style")).text
    policy = next(meta for meta in tree.iter("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy.get("content").startswith("default-src 'none'")


def test_errors_and_histograms_are_those_of_the_weights(tmp_path):
    dense = tiny_llama()
    dense.save_pretrained(tmp_path / "dense")
    model, spec = cluster(tiny_llama(), bits=2, granularity="tensor")
    directory = export(model, spec, tmp_path / "out")
    measured = measure_weights(_run(directory, str(tmp_path / "dense"), 123_456))
    assert measured.missing == ""
    reloaded = load(directory)
    assert len(measured.errors) == 14
    for name, error in measured.errors.items():
        original = dense.get_submodule(name).weight.detach().double()
        restored = reloaded.get_submodule(name).dequantize().double()
        expected = float((original - restored).norm() ** 2 / original.norm() ** 2)
        assert error == pytest.approx(expected, rel=1e-5)
        assert 0.01 < error < 0.5
    tensors = load_file(directory / "model.safetensors")
    assert len(measured.histograms) == 14  # two layers: each is first, middle or last
    for entry in measured.histograms:
        weight = dense.get_submodule(entry.name).weight.detach().numpy()
        counts, _ = np.histogram(weight, bins=len(entry.counts), range=(entry.low, entry.high))
        assert np.abs(np.array(entry.counts) - counts).sum() <= 4  # a value on an edge may fall to either side
        lut = tensors[f"{entry.name}.lut"].float()[0]
        assert entry.luts == 1
        assert [middle for _, middle, _ in entry.entries] == pytest.approx(lut.tolist())
        assert all(low == middle == high for low, middle, high in entry.entries)


def test_bytes_by_part_add_up(tmp_path):
    model, spec = cluster(tiny_llama(), bits=3, granularity="row:1")
    directory = export(model, spec, tmp_path / "out")
    measured = measure_weights(_run(directory, "./nowhere", 100_000))
    tensors = load_file(directory / "model.safetensors")
    size = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    embeddings = {name for name in size if "embed_tokens" in name}
    assert measured.stored_bytes["indices"] == sum(
        size[name] for name in size if name.endswith(".indices") and name not in embeddings
    )
    assert measured.stored_bytes["LUTs"] == sum(size[name] for name in size if name.endswith(".lut"))
    assert measured.stored_bytes["embeddings"] == sum(size[name] for name in embeddings)
    assert sum(measured.stored_bytes.values()) == (directory / "model.safetensors").stat().st_size
    assert sum(measured.original_bytes.values()) == 100_000
    assert measured.original_bytes["embeddings"] == 2 * 257 * 24
    assert "nowhere" in measured.missing
    assert not measured.errors


def test_without_the_original_the_page_says_so(copied):
    edit_report(copied, model="nobody/no-model")
    result = build_report(copied)
    content = words(parsed(copied / "report.html"))
    assert "not on this machine" in result["missing"]
    assert "not on this machine" in content
    assert "Bytes by part" in content
    assert "Relative squared error" not in content


def test_an_original_that_cannot_be_read_tensor_by_tensor(copied, tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    edit_report(copied, model=str(tmp_path / "model.gguf"))
    assert "GGUF" in build_report(copied)["missing"]
    (tmp_path / "config.json").write_text("{}")
    edit_report(copied, model=str(tmp_path))
    assert "holds no safetensors" in build_report(copied)["missing"]


def test_another_original_is_not_compared(copied, tmp_path):
    tiny_llama(hidden=32).save_pretrained(tmp_path / "other")
    edit_report(copied, model=str(tmp_path / "other"))
    assert "another model" in build_report(copied)["missing"]


def test_an_original_in_eight_bits_is_not_read_as_numbers(copied, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    tensors = {name: t.to(torch.float8_e4m3fn) if "proj" in name else t for name, t in tensors.items()}
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    edit_report(copied, model=str(tmp_path / "fp8"))
    assert "float8_e4m3fn before: another model, or quantized?" in build_report(copied)["missing"]


def test_a_run_without_training(model_directory, text_file, tmp_path):
    out = tmp_path / "out"
    assert run(*compress_arguments(model_directory, text_file, out, "--steps", 0))[0] == 0
    build_report(out)
    tree = parsed(out / "report.html")
    assert "Training" not in [heading.text for heading in tree.iter("h2")]
    assert "without training" in words(tree)


class TestUnfinished:
    @pytest.fixture
    def partial(self, finished, tmp_path):
        directory = tmp_path / "run.partial"
        directory.mkdir()
        lines = (finished / "metrics.jsonl").read_text().splitlines()[:7]
        (directory / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 8, "lo')
        measured = {stage: {"a text": {"perplexity": value}} for stage, value in (("original", 20.0), ("start", 90.0))}
        mark = {"fingerprint": {"bits": 3, "steps": 40, "distill": True}, "measured": measured}
        (directory / "edkm-run.json").write_text(json.dumps(mark))
        return directory

    @pytest.mark.parametrize("given", ["run", "run.partial"])
    def test_it_is_shown_so_far(self, partial, given):
        result = build_report(partial.with_name(given))
        assert (result["finished"], result["steps_done"]) == (False, 7)
        page = partial.with_name("run.partial.html")
        assert result["page"] == str(page)
        assert sorted(file.name for file in partial.iterdir()) == ["edkm-run.json", "metrics.jsonl"]
        content = words(parsed(page))
        assert "not finished" in content
        assert "7 of 40 steps" in content
        assert "90.00" in content

    def test_before_the_first_step(self, partial):
        (partial / "metrics.jsonl").unlink()
        assert build_report(partial)["steps_done"] == 0
        assert "0 of 40 steps" in words(parsed(partial.with_name("run.partial.html")))

    def test_with_metrics_only(self, partial):
        (partial / "edkm-run.json").unlink()
        assert build_report(partial)["steps_done"] == 7
        parsed(partial.with_name("run.partial.html"))


def test_hostile_text_stays_text(copied):
    report = json.loads((copied / "report.json").read_text())
    hostile = dict.fromkeys(report["config"], HOSTILE)
    edit_report(
        copied, model=HOSTILE, config=hostile, versions={HOSTILE: HOSTILE}, hardware={HOSTILE: [HOSTILE]},
        skipped=[{"name": HOSTILE, "reason": HOSTILE}], evaluation={"data": HOSTILE, "windows": HOSTILE, "context": None},
        seconds={HOSTILE: 1.0},
    )  # fmt: skip
    build_report(copied)
    page = copied / "report.html"
    tree = parsed(page)
    assert "<script" not in page.read_text()
    assert tree.find(".//h1").text == HOSTILE.replace("\x00", "\ufffd")


class TestErrors:
    @pytest.mark.parametrize("command", ["finetune", "merge"])
    def test_a_run_of_another_command(self, tmp_path, command):
        (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        (tmp_path / f"{command}.json").write_text("{}")
        assert f"is what edkm {command} made; read its README.md" in refused("report", tmp_path)

    def test_no_run(self, tmp_path):
        assert "holds neither" in refused("report", tmp_path)
        assert "is not a directory" in refused("report", tmp_path / "nowhere")

    @pytest.mark.parametrize(
        ("content", "message"),
        [("{", "cannot be read"), ("[]", "must be a JSON file with an object"), ("{}", "perplexity must be a dict")],
    )
    def test_broken_report(self, copied, content, message):
        (copied / "report.json").write_text(content)
        assert message in refused("report", copied)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"weights_bytes": 0}, "weights_bytes must be positive"),
            ({"weights_bytes": "many", "steps": None}, "steps must be a number"),
            ({"decoder_bits_per_weight": float("nan")}, "decoder_bits_per_weight"),
            ({"skipped": ["a"]}, "skipped must list objects"),
        ],
    )
    def test_wrong_values(self, copied, change, message):
        edit_report(copied, **change)
        assert message in refused("report", copied)

    def test_missing_and_damaged_weights(self, copied):
        file = copied / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        assert "truncated" in refused("report", copied)
        file.unlink()
        assert "model.safetensors is missing" in refused("report", copied)
        assert run("report", copied, "--no-weights")[0] == 0

    def test_broken_metrics(self, copied):
        path = copied / "metrics.jsonl"
        path.write_text("oops\n" + path.read_text())
        assert "line 1" in refused("report", copied)

    def test_metrics_without_usable_figures(self, copied):
        lines = ['{"step": 1}', '{"step": 2, "loss": NaN}', '{"step": 3, "loss": 1' + "0" * 400 + ', "tokens": "x"}']
        (copied / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        assert build_report(copied, weights=False)["steps_done"] == 3
        assert "Training" not in [heading.text for heading in parsed(copied / "report.html").iter("h2")]

    def test_place_that_cannot_be_written(self, copied, tmp_path):
        assert "--output" in refused("report", copied, "--output", tmp_path / "no" / "page.html")
        assert "--output" in refused("report", copied, "--output", tmp_path)


def test_charts_escape_all_but_themselves():
    drawn = bars([("a < b & c", [("", 1.0, "c1")], "<i>")], title='"x"')
    assert "a &lt; b &amp; c" in drawn
    assert "&lt;i&gt;" in drawn
    tree = ElementTree.fromstring(drawn)
    assert tree.get("aria-label") == '"x"'
    assert next(tree.iter("text")).text == "a < b & c"
    assert isinstance(drawn, Markup)


def test_places_in_the_model():
    assert place("model.layers.3.mlp.up_proj") == ("up_proj", "3")
    assert place("projector") == ("projector", "-")


def test_a_model_of_the_same_shapes_is_not_taken_for_the_original(copied, model_directory, tmp_path):
    other = shutil.copytree(model_directory, tmp_path / "model")
    tensors = {name: tensor + 1 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    report = copied / "report.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), "model": str(other)}))
    result = build_report(copied)
    assert "is not the model that was compressed" in result["missing"]
    assert result["layers"] == []


def test_a_page_of_a_result_that_missed_its_limit_is_not_among_its_files(copied):
    partial = copied.rename(copied.with_name("failed.partial"))
    assert build_report(copied.with_name("failed"), weights=False)["page"] == str(partial) + ".html"


def test_a_page_is_written_to_a_stream(copied, tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    assert build_report(copied, output=str(pipe), weights=False)["page"] == str(pipe)
    reader.join(60)
    assert "</html>" in found[0]


def test_experts_are_compared_with_the_original_and_named_by_their_kind(tmp_path):
    model = family("mixtral", num_local_experts=3)
    model.save_pretrained(tmp_path / "model")
    directory = export(*cluster(model), tmp_path / "out")
    measured = measure_weights(_run(directory, str(tmp_path / "model"), original_weights_bytes=10**6))
    assert not measured.missing
    experts = [error for name, error in measured.errors.items() if "experts" in name]
    assert len(experts) == 2 * 3 * 2
    assert 0 < max(experts) < 0.2
    assert place("model.layers.1.mlp.experts.down_proj.17") == ("down_proj", "1")
