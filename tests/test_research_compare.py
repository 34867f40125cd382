"""`edkm compare` on a tiny model: rows that agree with the methods themselves, reuse, failures, table and figure."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from xml.etree import ElementTree

import pytest
import torch

import edkm_cli
from edkm_cli import data, model_files, models
from edkm_cli.config import build_config
from edkm_cli.errors import UserError
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.report.charts import save
from edkm_cli.research.baselines import rtn
from edkm_cli.research.baselines.outcome import decoder_linears
from edkm_cli.research.compare.command import compare, settings_of
from edkm_cli.research.compare.config import CompareConfig, Entry, build_compare_config
from edkm_cli.research.compare.table import draw, format_table
from edkm_cli.settings import command_line, configs_directory
from helpers import quantized, refused, run, workers_in_this_process
from processes import PATIENCE_SECONDS

SVG = "{http://www.w3.org/2000/svg}"
KEYS = {"method", "training", "bits", "granularity", "decoder_bits_per_weight", "weights_bytes", "perplexity",
        "kl_per_token", "top1_agreement", "texts", "seconds", "peak_memory_bytes", "label", "options", "windows", "context",
        "calibration_tokens", "training_tokens", "evaluation_seconds", "note", "error"}  # fmt: skip


def settings(model_directory, text_file, output, **changes):
    values = {
        "model": str(model_directory),
        "methods": ("rtn", "edkm"),
        "output": str(output),
        "group_size": 8,
        "data": (str(text_file),),
        "context": 64,
        "eval_windows": 2,
        "calibration_samples": 4,
        "sequence_length": 48,
        "steps": 2,
        "device": "cpu",
    }
    return CompareConfig(**{**values, **changes})


@pytest.fixture
def one_process():
    with workers_in_this_process():
        yield


@pytest.fixture(scope="module")
def finished(model_directory, text_file, tmp_path_factory):
    """One comparison with all kinds of rows, for tests that read it: (configuration, result, directory)."""
    directory = tmp_path_factory.mktemp("compare") / "out"
    methods = ("fp16", "rtn", "rtn:group_size=7", "smoothquant", "edkm:granularity=tensor:embedding_bits=16")
    config = settings(model_directory, text_file, directory, methods=methods)
    with workers_in_this_process():
        return config, compare(config), directory


def test_the_result_has_the_keys_and_is_written_where_promised(finished):
    _, result, directory = finished
    assert [row["label"] for row in result["rows"]] == [
        "fp16",
        "rtn",
        "rtn:group_size=7",
        "smoothquant",
        "edkm:embedding_bits=16:granularity=tensor",
    ]
    for row in result["rows"]:
        assert set(row) - {"directory"} == KEYS
    assert json.loads((directory / "compare.json").read_text()) == json.loads(json.dumps(result))
    assert {"command", "setting", "versions", "hardware"} <= set(result)
    for file in ("fp16.json", "rtn.json", "rtn_group_size=7.json", "smoothquant.json"):
        assert set(json.loads((directory / file).read_text())) == {"settings", "error" if "7" in file else "row"}


def test_a_baselines_row_is_what_the_method_and_the_evaluator_give(finished, model_directory, text_file):
    rows = {row["label"]: row for row in finished[1]["rows"]}
    model = models.load_dense(models.resolve(str(model_directory)), dtype="float32")
    tokenizer = models.load_tokenizer(models.resolve(str(model_directory)))
    text = data.tokenize(data.load_documents(data.parse_source(str(text_file)), "test"), tokenizer)
    uncompressed = perplexity(model, text, context=64, max_windows=2).perplexity
    parameters = sum(parameter.numel() for parameter in model.parameters())
    packed = sum(layer.weight.numel() for layer in decoder_linears(model).values())
    outcome = quantized(rtn, model, [], bits=3, group_size=8)
    assert rows["fp16"]["perplexity"] == pytest.approx(uncompressed)
    assert rows["fp16"]["weights_bytes"] == 2 * parameters
    assert rows["rtn"]["perplexity"] == pytest.approx(perplexity(model, text, context=64, max_windows=2).perplexity)
    assert rows["rtn"]["decoder_bits_per_weight"] == outcome.bits_per_weight
    assert rows["rtn"]["weights_bytes"] == outcome.stored_bytes + 2 * (parameters - packed)
    assert (rows["rtn"]["bits"], rows["rtn"]["granularity"]) == (3, "group:8")
    assert rows["smoothquant"]["calibration_tokens"] == 4 * 48
    assert all(rows[name]["peak_memory_bytes"] > 10**7 for name in ("fp16", "rtn", "smoothquant"))


def test_our_row_is_the_exported_models(finished, model_directory, text_file):
    row = finished[1]["rows"][-1]
    model = edkm_cli.load(row["directory"])
    tokenizer = models.load_tokenizer(models.resolve(str(model_directory)))
    text = data.tokenize(data.load_documents(data.parse_source(str(text_file)), "test"), tokenizer)
    assert row["perplexity"] == pytest.approx(perplexity(model, text, context=64, max_windows=2).perplexity)
    assert row["weights_bytes"] == model_files.weight_files_bytes(row["directory"])
    assert (row["bits"], row["granularity"], row["training_tokens"]) == (3, "tensor", 2 * 48)
    assert row["calibration_tokens"] > 0
    assert row["note"] == "embeddings as they came"
    assert [row["training"] for row in finished[1]["rows"]] == ["none", "none", None, "none", "end to end"]


def test_a_failing_method_is_in_the_table_and_costs_no_other_row(finished):
    _, result, _ = finished
    failed = result["rows"][2]
    assert "group_size must divide" in failed["error"]
    assert failed["perplexity"] is None
    assert all(row["perplexity"] for row in result["rows"] if row is not failed)
    lines = format_table(result).splitlines()
    assert next(line for line in lines if "failed" in line).split() == ["rtn", "failed"]
    assert any("group_size must divide" in line for line in lines)
    assert any("activations at 8 bits per token" in line for line in lines)


def test_finished_methods_are_reused_failed_ones_tried_again(one_process, finished):
    config, result, directory = finished
    before = {path.name: path.stat().st_mtime_ns for path in directory.glob("*.json")}
    said = []
    again = compare(config, say=said.append)
    assert again["rows"] == result["rows"]
    assert sum("measured before" in line for line in said) == 4
    changed = {path.name for path in directory.glob("*.json") if path.stat().st_mtime_ns != before[path.name]}
    assert changed == {"compare.json", "rtn_group_size=7.json"}


def test_changed_settings_are_measured_again_and_others_are_not(one_process, model_directory, text_file, tmp_path):
    first = compare(settings(model_directory, text_file, tmp_path / "out"))
    said = []
    second = compare(settings(model_directory, text_file, tmp_path / "out", steps=0), say=said.append)
    assert second["rows"][0] == first["rows"][0]  # rounding takes no steps
    assert second["rows"][1]["training_tokens"] == 0
    assert second["rows"][1]["perplexity"] != first["rows"][1]["perplexity"]
    third = compare(settings(model_directory, text_file, tmp_path / "out", steps=0, methods=("rtn",), bits=5))
    assert third["rows"][0]["bits"] == 5
    assert (
        third["rows"][0]["perplexity"] != first["rows"][0]["perplexity"]
    )  # of random weights: neither is the better one
    text_file_2 = tmp_path / "other.txt"
    text_file_2.write_text(text_file.read_text().replace("fox", "owl"))
    other = compare(settings(model_directory, text_file_2, tmp_path / "out", methods=("rtn",), bits=5))
    assert other["rows"][0]["perplexity"] != third["rows"][0]["perplexity"]


def test_overwrite_measures_again_and_foreign_files_are_kept(one_process, model_directory, text_file, tmp_path):
    config = settings(model_directory, text_file, tmp_path / "out", methods=("fp16",))
    compare(config)
    stored = json.loads((tmp_path / "out" / "fp16.json").read_text())
    stored["row"]["perplexity"] = 1.0
    (tmp_path / "out" / "fp16.json").write_text(json.dumps(stored))
    assert compare(config)["rows"][0]["perplexity"] == 1.0
    assert compare(config, overwrite=True)["rows"][0]["perplexity"] > 1.0
    (tmp_path / "out" / "rtn.json").write_text("my notes")
    with pytest.raises(UserError, match="move it away"):
        compare(settings(model_directory, text_file, tmp_path / "out", methods=("rtn",)))
    assert (tmp_path / "out" / "rtn.json").read_text() == "my notes"


def test_a_worker_that_is_killed_is_a_failed_row(model_directory, text_file, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the worker: this process has started
    with pytest.raises(UserError, match=r"no method succeeded.*signal 9 \(9 is often lack of memory\)"):
        compare(settings(model_directory, text_file, tmp_path / "out", methods=("rtn",)))


@pytest.mark.slow
def test_sigterm_ends_the_worker_and_the_same_command_goes_on(
    python, one_process, model_directory, text_file, tmp_path
):
    out = tmp_path / "out"
    arguments = ["compare", "--model", model_directory, "--methods", "fp16,edkm:save_every=1", "--data", text_file,
                 "--context", 64, "--eval-windows", 2, "--sequence-length", 48, "--device", "cpu", "-o", out]  # fmt: skip
    process = subprocess.Popen(
        [python, "-m", "edkm_cli", *map(str, arguments), "--steps", "100000"],
        env={**os.environ, "PYTHON_EXEC": str(python)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not [*(out / "edkm_save_every=1.partial" / "checkpoints").glob("step-*")]:  # the first is soon replaced
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 143
    assert "finished methods are kept" in error
    assert set(json.loads((out / "edkm_save_every=1.json").read_text())) == {"settings"}
    status, text, error = run(*arguments, "--steps", 1)
    assert status == 0, error
    assert "measured before" in error
    assert "edkm save_every=1" in text


def test_the_command_prints_the_table_and_writes_json_and_figures(one_process, model_directory, text_file, tmp_path):
    status, text, error = run("compare", "--model", model_directory, "--methods", "fp16,rtn:group-size=0", "--data",
                              text_file, "--context", 32, "--eval-windows", 3, "--device",
                              "cpu", "-o", tmp_path / "out", "--json", tmp_path / "c.json")  # fmt: skip
    assert status == 0, error
    result = json.loads((tmp_path / "c.json").read_text())
    assert text.strip() == format_table(result)
    assert "perplexity of 3 windows of 32 tokens" in text
    assert result["rows"][1]["granularity"] == "row:1"
    assert ElementTree.parse(tmp_path / "out" / "compare.svg").getroot().tag == f"{SVG}svg"


def test_a_method_that_fails_is_named_and_gives_status_1_while_the_others_are_kept(
    one_process, model_directory, text_file, tmp_path
):
    status, text, error = run("compare", "--model", model_directory, "--methods", "rtn:group-size=7,fp16", "--data",
                              text_file, "--context", 32, "--eval-windows", 1, "--device", "cpu", "-o", tmp_path / "out",
                              "--json", tmp_path / "c.json")  # fmt: skip
    assert status == 1
    assert error.strip().splitlines()[-1] == "edkm: error: 1 of 2 methods failed: rtn:group_size=7"
    assert "group_size must divide" in text
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [row["perplexity"] is None for row in rows] == [True, False]


def test_the_recorded_command_asks_for_the_same_comparison(finished):
    import shlex

    config, result, _ = finished
    words = shlex.split(result["command"])
    assert words[:2] == ["edkm", "compare"]
    flags: dict = {"data": [], "eval_data": [], "methods": []}
    for name, value in zip(words[2::2], words[3::2], strict=True):
        name = name.removeprefix("--").replace("-", "_")
        if name in flags and isinstance(flags[name], list):
            flags[name].append(value)
        else:
            flags[name] = value if name in ("model", "output", "device") else int(value)
    found = build_compare_config(None, flags)
    assert [entry.label for entry in found.entries()] == [entry.label for entry in config.entries()]
    assert {**vars(found), "methods": ()} == {**vars(config), "methods": ()}
    assert command_line("edkm compare", found, "model", "bits") == result["command"]


class TestFigure:
    def row(self, method, bpw, value, trained=0, **options):
        return {"method": method, "bits": 3, "granularity": options.get("granularity", "group:64"), "options": options,
                "texts": [{"data": "d"}],
                "decoder_bits_per_weight": bpw, "perplexity": value, "training_tokens": trained}  # fmt: skip

    def crowd(self):
        rows = [self.row("fp16", 16.0, 29.2)]
        rows += [self.row(name, 3.25, 40 * 1.04**i) for i, name in enumerate(("rtn", "gptq", "awq", "smoothquant"))]
        rows += [self.row("edkm", 3.19, 37.0, 102400, granularity="row:1"), self.row("llm_qat", 3.25, 41.0, 51200)]
        rows += [self.row("rtn", 3.02, 15012.0, granularity="row:1"), self.row("rtn", 4.25, 36.4, bits=4)]
        return {"rows": rows, "setting": {"model": "m", "context": 1024, "data": ["d"], "eval_data": None}}

    def test_each_method_has_its_bar_the_lowest_perplexity_first(self, tmp_path):
        save(draw(self.crowd()), tmp_path / "figure.svg")
        tree = ElementTree.parse(tmp_path / "figure.svg").getroot()
        labels = [e.text for e in tree.iter(f"{SVG}text") if e.get("class") == "bar-label end"]
        assert labels[:3] == ["fp16 group:64", "rtn group:64", "edkm row:1"]
        assert len(labels) == 9
        lengths = [float(bar.get("width")) for bar in tree.iter(f"{SVG}rect")]
        assert lengths == sorted(lengths)
        assert len([line for line in tree.iter(f"{SVG}line") if line.get("class") == "reference"]) == 1

    def test_a_bar_names_the_options_that_tell_it_from_others(self, tmp_path):
        result, scale = self.crowd(), {"lut_scale": 0.5}
        result["rows"] += [self.row("edkm", 3.2, 30.0 + i, start=start, **scale) for i, start in enumerate("ab")]
        save(draw(result), tmp_path / "figure.svg")
        labels = [e.text for e in ElementTree.parse(tmp_path / "figure.svg").getroot().iter(f"{SVG}text")]
        assert [label for label in labels if label and "edkm" in label][:2] == [
            "edkm start=a group:64",
            "edkm start=b group:64",
        ]

    def test_failed_rows_are_left_out_and_one_row_is_enough(self):
        result = self.crowd()
        result["rows"] = [result["rows"][0], self.row("rtn", None, None)]
        assert draw(result).count("<rect") == 1


class TestSettings:
    @pytest.mark.parametrize(
        ("text", "options"),
        [
            ("rtn", {}),
            ("rtn:bits=4", {"bits": 4}),
            ("edkm:granularity=block:8x64:steps=5", {"granularity": "block:8x64", "steps": 5}),
            ("edkm:learning-rate=3e-4:distill=false", {"learning_rate": "3e-4", "distill": False}),
        ],
    )
    def test_methods_carry_options_and_their_text_comes_back(self, text, options):
        entry = Entry.parse(text)
        assert dict(entry.options) == options
        assert Entry.parse(entry.label) == entry
        assert Entry.parse("gguf:a/b.gguf").slug != Entry.parse("gguf:a-b.gguf").slug
        assert set(entry.slug) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.=")

    def test_yaml_takes_mappings_and_flags_override_it(self, tmp_path):
        file = tmp_path / "c.yaml"
        file.write_text("methods: [rtn, {method: edkm, steps: 7, granularity: 'row:1'}]\nbits: 4\n")
        config = build_compare_config(file, {"bits": 2})
        assert [entry.label for entry in config.entries()] == ["rtn", "edkm:granularity=row:1:steps=7"]
        assert config.bits == 2
        assert build_compare_config(file, {"methods": "gptq, awq"}).methods == ("gptq", "awq")

    def test_the_shipped_configurations_are_valid(self):
        for file in configs_directory().glob("compare*.yaml"):
            config = build_compare_config(file, {"model": "smollm2-360m"})  # an alias without files
            for entry in config.entries():
                settings_of(entry, config)

    def test_learning_rates_reach_the_method_as_numbers(self):
        found = settings_of(Entry.parse("llm_qat:learning_rate=3e-4"), CompareConfig(model="smollm2-360m", steps=7))
        assert found["arguments"]["learning_rate"] == 3e-4
        assert found["arguments"]["steps"] == 7

    def test_a_row_takes_what_compress_takes(self):
        config = CompareConfig(model="smollm2-360m")
        target = settings_of(Entry.parse("edkm:target=mlx:4:embedding_bits=16"), config)["arguments"]
        assert (target["bits"], target["embedding_bits"], target["embedding_group"]) == (4, 16, 0)
        sized = settings_of(Entry.parse("edkm:target_size=400MB:max_grad_norm=inf:mixed_precision=no"), config)[
            "arguments"
        ]
        assert (sized["max_grad_norm"], sized["mixed_precision"]) == ("inf", "no")
        assert (
            build_config(None, {name: value for name, value in sized.items() if name != "bits"}).max_grad_norm
            == math.inf
        )

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--methods", "rtn,magic"), "a method must be one of fp16, rtn"),
            (("--methods", "rtn,rtn"), "names rtn twice"),
            (("--methods", "rtn:speed=9"), "rtn has the options bits, group_size"),
            (("--methods", "rtn:bits=x"), "bits must be a whole number, got 'x'"),
            (("--methods", "edkm:bits=77"), "bits must be at most 8"),
            (("--methods", "edkm:output=here"), "output is the same for all methods"),
            (("--methods", "fp16:bits=3"), "fp16 has no options"),
            (("--bits", 9, "--steps", -1), "bits must be at most 8, got 9; steps must be at least 0, got -1"),
            (("--data", "nothing.txt"), "does not exist"),
            (("--device", "cuda:99"), "not available"),
            (("--model", "./none"), "none of these"),
        ],
    )
    def test_bad_settings_are_one_line_before_the_work(self, model_directory, text_file, tmp_path, flags, message):
        given = {"--model": model_directory, "--data": text_file, "--output": tmp_path / "out"}
        given.update(zip(flags[::2], flags[1::2], strict=True))
        assert message in refused("compare", *(word for pair in given.items() for word in pair))
        assert not list(tmp_path.glob("out/*"))

    def test_a_model_is_required_and_faults_of_a_file_come_at_once(self, tmp_path):
        assert "--model is required" in refused("compare")
        file = tmp_path / "c.yaml"
        file.write_text("bitz: 3\nmethods: [magic]\ncontext: 1\n")
        line = refused("compare", "--config", file)
        assert "bitz" in line
        assert "magic" in line
        assert "context must be at least 2" in line
        file.write_text("methods: [{bits: 3}]\n")
        assert "must have the key 'method'" in refused("compare", "--config", file)


@pytest.mark.skipif("auto_round" in sys.modules, reason="needs a Python without auto-round")
def test_autoround_without_its_package_says_so(one_process, model_directory, text_file, tmp_path):
    import importlib.util

    if importlib.util.find_spec("auto_round"):
        pytest.skip("auto-round is installed")
    config = settings(model_directory, text_file, tmp_path / "out", methods=("fp16", "autoround"))
    assert "pip install 'edkm-cli[autoround]'" in compare(config)["rows"][1]["error"]


def test_importing_the_settings_imports_no_torch():
    code = "import sys, edkm_cli.research.compare.config; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], env=dict(os.environ), timeout=PATIENCE_SECONDS).returncode == 0


def test_seeds_choose_the_calibration_text(one_process, model_directory, text_file, tmp_path):
    perplexities = set()
    for seed in (0, 1):
        config = settings(
            model_directory, text_file, tmp_path / "out", methods=("smoothquant:activation_bits=16",), seed=seed,
            calibration_samples=1,
        )  # fmt: skip
        perplexities.add(compare(config)["rows"][0]["perplexity"])
    assert len(perplexities) == 2
    assert torch.isfinite(torch.tensor(list(perplexities))).all()
