"""The commands as users run them: exit statuses, one-line errors, JSON, and instant help."""

import json
import os
import subprocess
import sys

import pytest

from helpers import byte_tokenizer, cluster, compress_arguments, export, refused, run, tiny_llama
from processes import PATIENCE_SECONDS


@pytest.mark.parametrize(
    "arguments", [["--help"], ["compress", "--help"], ["finetune", "--help"], ["eval", "--help"], ["--version"]]
)
def test_help_imports_no_torch(arguments):
    code = (
        "import sys\nfrom edkm_cli.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 0, done.stderr


def test_compress_then_eval_inspect_and_generate(model_directory, text_file, tmp_path):
    out = tmp_path / "out"
    status, text, err = run(*compress_arguments(model_directory, text_file, out, "--json", tmp_path / "c.json"))
    assert status == 0, err
    for word in (
        "uncompressed",
        "compressed, not trained",
        "compressed and trained",
        "read back from disk",
        "ratio",
        "time",
    ):
        assert word in text
    report = json.loads((tmp_path / "c.json").read_text())
    for key in ("perplexity", "weights_bytes", "original_weights_bytes", "decoder_bits_per_weight", "seconds", "steps",
                "swapped", "skipped", "config", "versions"):  # fmt: skip
        assert key in report

    status, text, err = run("eval", out, "--data", text_file, "--context", 32, "--max-windows", 2, "--device", "cpu",
                            "--speed", "--json", tmp_path / "e.json")  # fmt: skip
    assert status == 0, err
    result = json.loads((tmp_path / "e.json").read_text())
    for key in ("model", "data", "context", "windows", "tokens", "perplexity", "weights_bytes",
                "decoder_bits_per_weight", "model_bits_per_weight", "seconds", "peak_memory_bytes",
                "prefill_tokens_per_second", "decode_tokens_per_second"):  # fmt: skip
        assert key in result
    assert {"python", "torch", "transformers", "edkm-cli"} <= result["versions"].keys() == report["versions"].keys()

    status, text, _ = run("inspect", out, "--json", tmp_path / "i.json")
    assert status == 0
    assert "model.layers.0.self_attn.q_proj" in text
    assert json.loads((tmp_path / "i.json").read_text())["quantization_config"]["bits"] == 3

    for storage in ("--packed", "--dequantize"):
        status, text, err = run("generate", out, "Line 1:", "--max-new-tokens", 3, "--device", "cpu", storage)
        assert status == 0, err
        assert text.startswith("Line 1:")


def test_eval_takes_an_uncompressed_model(model_directory, text_file):
    status, text, err = run("eval", model_directory, "--data", text_file, "--context", 32, "--max-windows", 1)
    assert status == 0, err
    assert "32.000 bits" in text


def test_a_config_file_is_overridden_by_flags(model_directory, text_file, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(f"model: {model_directory}\ndata: [{text_file}]\nbits: 5\nsteps: 0\ncalibration_tokens: 64\n"
                    "sequence_length: 32\ncontext: 32\neval_windows: 1\n")  # fmt: skip
    assert run("compress", "--config", file, "-o", tmp_path / "out", "--bits", 2)[0] == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["config"]["bits"] == 2
    assert report["config"]["steps"] == 0


def test_dry_run_writes_json_and_nothing_else(model_directory, tmp_path):
    status, _, err = run("compress", "--model", model_directory, "--dry-run", "--json", tmp_path / "p.json")
    assert status == 0, err
    plan = json.loads((tmp_path / "p.json").read_text())
    assert plan["peak_memory_bytes"]["total"] > 0
    assert isinstance(plan["fits"], bool)
    assert os.listdir(tmp_path) == ["p.json"]


class TestErrors:
    def test_no_model(self):
        assert "--model is required" in refused("compress")

    @pytest.mark.parametrize("name", ["gpt-9", "./nowhere", "a/b/c", "file.gguf"])
    def test_unknown_model(self, name, tmp_path):
        refused("compress", "--model", name, "-o", tmp_path / "out")
        refused("eval", name)
        assert not os.listdir(tmp_path)

    def test_unreachable_hub(self, tmp_path):
        line = refused("compress", "--model", "nobody/no-model", "-o", tmp_path / "out")
        assert "hub" in line
        assert "local directory" in line
        assert not os.listdir(tmp_path)

    def test_unreachable_data(self, model_directory, tmp_path):
        line = refused(*compress_arguments(model_directory, "wikitext2", tmp_path / "out"))
        assert "hub" in line
        assert not os.listdir(tmp_path)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (("--bits", 9), "bits must be at most 8, got 9"),
            (("--bits", 0), "bits must be at least 1, got 0"),
            (("--granularity", "row:5"), "does not divide model.layers.0"),
            (("--granularity", "rows"), "granularity must be"),
            (("--lut-dtype", "int4"), "lut_dtype must be one of"),
            (("--method", "kmeans"), "method must be one of"),
            (("--steps", -1), "steps must be at least 0"),
            (("--device", "cuda:7"), "not available"),
            (("--skip", "nothing"), "match none"),
        ],
    )
    def test_bad_settings(self, model_directory, text_file, tmp_path, flags, message):
        assert message in refused(*compress_arguments(model_directory, text_file, tmp_path / "out", *flags))
        assert not os.listdir(tmp_path)

    def test_too_little_data(self, model_directory, tmp_path):
        (tmp_path / "text.txt").write_text("a line\n" * 10)
        more = ("--sequence-length", 100)
        line = refused(*compress_arguments(model_directory, tmp_path / "text.txt", tmp_path / "out", *more))
        assert "training data must have at least 100 tokens" in line
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), (b"", "empty"), (b"\xff\xfe", "UTF-8")])
    def test_bad_data(self, model_directory, tmp_path, content, message):
        file = tmp_path / "text.txt"
        if content is not None:
            file.write_bytes(content)
        assert message in refused(*compress_arguments(model_directory, file, tmp_path / "out"))
        assert message in refused("eval", model_directory, "--data", file)
        assert not (tmp_path / "out").exists()

    def test_output_that_is_not_empty_or_a_file(self, model_directory, text_file, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.txt").write_text("precious")
        assert "not empty" in refused(*compress_arguments(model_directory, text_file, tmp_path / "out"))
        assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"
        assert "is a file" in refused(*compress_arguments(model_directory, text_file, tmp_path / "out" / "thesis.txt"))

    def test_config_faults_come_at_once(self, tmp_path):
        file = tmp_path / "c.yaml"
        file.write_text("bitz: 3\nbits: 99\nmode: magic\n")
        line = refused("compress", "--config", file)
        assert "bitz" in line
        assert "99" in line
        assert "magic" in line

    def test_damaged_checkpoints(self, tmp_path):
        model, spec = cluster(tiny_llama())
        directory = export(model, spec, tmp_path / "one")
        byte_tokenizer().save_pretrained(directory)
        file = directory / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        for command in ("inspect", "eval", "generate"):
            more = ("hello",) if command == "generate" else ("--data", "builtin") if command == "eval" else ()
            assert "truncated" in refused(command, directory, *more)

    def test_json_into_no_directory(self, model_directory, tmp_path):
        assert "--json" in refused("eval", model_directory, "--json", tmp_path / "no" / "x.json")

    def test_json_in_a_directory_that_takes_no_file(self, model_directory, tmp_path, monkeypatch):
        (tmp_path / "x.json").write_text("{}")
        access = os.access
        monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path and access(path, mode))
        assert "can be written" in refused("eval", model_directory, "--json", tmp_path / "x.json")

    @pytest.mark.parametrize("command", ["eval", "export", "merge", "generate", "compare"])
    def test_a_command_of_one_process_under_a_launcher(self, command, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert f"edkm {command} is for one process, not 2" in refused(command, "out")
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert "is for one process" not in run(command, "out")[2]

    def test_wrong_usage_exits_with_2_as_well(self):
        assert run("compress", "--no-such-flag")[0] == 2
        assert run("no-such-command")[0] == 2
