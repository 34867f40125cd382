"""What is replaced and removed: files of ours, by their list. Every command that writes is run over files that are not."""

import json
import os
from pathlib import Path

import pytest

from edkm_cli.export import ownership
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.export.formats.options import Options
from helpers import (
    byte_tokenizer,
    cluster,
    compress_arguments,
    export,
    refused,
    run,
    tiny_llama,
    workers_in_this_process,
)

# Names of our own among them: what a file is called does not make it ours.
FOREIGN = ("thesis.tex", "notes/mine.txt", "model.safetensors", "config.json", "README.md", "report.json", "compare.json",
           "fp16.json", "compare.svg", "report.html", "finetune.json", "metrics.jsonl", "edkm/events", ".hidden",
           "checkpoints/step-000001/state.json", "result.json", "result.json.tmp", "figure.svg")  # fmt: skip
SHORT = ["--sequence-length", 32, "--context", 32]  # what the tiny model has positions for
SMALL = ["--steps", 1, "--sequence-length", 32, "--context", 32, "--eval-windows", 1, "--device", "cpu"]


def tree(directory):
    """A directory of foreign files."""
    for name in FOREIGN:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(f"mine: {name}")
    return directory


def contents(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    directory = export(*cluster(tiny_llama()), tmp_path_factory.mktemp("packed") / "tiny")
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def adapter(packed, text_file, tmp_path_factory):
    output = tmp_path_factory.mktemp("tuned") / "adapter"
    assert run("finetune", packed, "--data", text_file, "-o", output, *SMALL)[0] == 0
    return output


@pytest.fixture
def commands(packed, adapter, model_directory, text_file):
    """Name -> arguments of a run that writes to a directory (given), or to the file `result` in it."""
    text = ["--data", text_file]

    def named(place):
        file = place / "result.json"
        return {
            "compress": compress_arguments(model_directory, text_file, place),
            "finetune": ["finetune", packed, *text, "-o", place, *SMALL],
            "merge": ["merge", packed, "--adapter", adapter, *text, "-o", place, *SMALL, "--start-tokens", 64],
            "export": ["export", packed, "--to", "dense", "-o", place],
            "compare": ["compare", "--model", model_directory, *text, "--methods", "fp16", "-o", place,
                        "--eval-windows", 1, "--context", 32, "--device", "cpu"],
            "compress --json": [*compress_arguments(model_directory, text_file, place / "new"), "--json", file],
            "compress --dry-run": [*compress_arguments(model_directory, text_file, place / "new"), "--dry-run",
                                   "--json", file],
            "finetune --dry-run": ["finetune", packed, *text, "-o", place / "new", *SMALL, "--dry-run", "--json", file],
            "eval": ["eval", packed, *text, "--context", 32, "--max-windows", 1, "--json", file],
            "inspect": ["inspect", packed, "--json", file],
            "report": ["report", adapter.parent / "run", "-o", place / "report.html"],
            "generate": ["generate", packed, "ab", "--max-new-tokens", 1, "--json", file],
            "ablate": ["ablate", "--width", 8, "--learners", 1, "--plot", place / "figure.svg"],
            "bench clustering": ["bench", "clustering", "--width", 8, "--json", file],
            "bench runtime": ["bench", "runtime", "--shape", "8x8", "--tokens", 1, "--json", file],
        }  # fmt: skip

    return named


OVERWRITES = ("compress", "finetune", "merge", "export", "compare")


def test_no_command_changes_a_byte_that_is_not_ours(commands, model_directory, text_file, adapter, tmp_path):
    assert run(*compress_arguments(model_directory, text_file, adapter.parent / "run"), "--steps", 0)[0] == 0
    place = tree(tmp_path / "home")
    before = contents(place)
    for name, arguments in commands(place).items():
        line = refused(*arguments, *(["--overwrite"] if name in OVERWRITES else []))
        assert str(place) in line, name
        assert contents(place) == before, name
        assert os.listdir(tmp_path) == ["home"], name


@pytest.mark.parametrize("name", OVERWRITES)
def test_what_stands_in_the_place_of_the_unfinished_result_stays(commands, tmp_path, name):
    before = contents(tree(tmp_path / "out.partial"))
    if name != "compare":
        assert "something else" in refused(*commands(tmp_path / "out")[name], "--overwrite")
    assert contents(tmp_path / "out.partial") == before


@pytest.mark.parametrize("name", OVERWRITES)
def test_every_command_replaces_its_own_result_and_stops_at_a_file_put_into_it(commands, tmp_path, name):
    arguments = [*commands(tmp_path / "out")[name]]
    with workers_in_this_process():
        assert run(*arguments)[0] == 0
        assert run(*arguments, "--overwrite")[0] == 0
    assert os.listdir(tmp_path) == ["out"]
    if name == "compare":  # which shares its directory
        return
    for file, text in (("thesis.tex", "mine"), ("README.md", "rewritten")):
        former = (tmp_path / "out" / file).read_bytes() if (tmp_path / "out" / file).exists() else None
        (tmp_path / "out" / file).write_text(text)
        before = contents(tmp_path)
        assert file in refused(*arguments, "--overwrite")
        assert contents(tmp_path) == before
        (tmp_path / "out" / file).unlink() if former is None else (tmp_path / "out" / file).write_bytes(former)
    (tmp_path / "out" / ownership.FILES).unlink()  # as version 0.1 left it: what is ours cannot be told from the rest
    before = contents(tmp_path)
    assert "something else" in refused(*arguments, "--overwrite")
    assert contents(tmp_path) == before


def test_an_output_that_holds_is_or_lies_inside_an_input_is_refused(
    packed, adapter, model_directory, text_file, tmp_path, monkeypatch
):
    import shutil

    home = tmp_path / "home"
    model, directory = home / "models" / "base", home / "packed"
    shutil.copytree(model_directory, model)
    shutil.copytree(packed, directory)
    shutil.copytree(adapter, home / "adapter")
    (home / "texts").mkdir()
    text = home / "texts" / "my.txt"
    shutil.copyfile(text_file, text)
    (home / "run.yaml").write_text("steps: 1\n")
    (home / "link").symlink_to(model)
    (home / "to-home").symlink_to(home)
    monkeypatch.chdir(home)
    before = contents(home)
    compress = ["compress", *SHORT, "--model", model, "--data", text, "--steps", 1, "--overwrite", "-o"]
    places = [
        home,
        ".",
        "..",
        model,
        model / "out",
        "link",
        "link/../base",
        "models",
        "to-home",
        "packed/../models/base",
    ]
    for place in places:
        assert "must be apart" in refused(*compress, place), place
    glob = ["compress", *SHORT, "--model", model_directory, "--data", f"{home}/texts/*.txt=2", "--overwrite", "-o"]
    assert "must be apart" in refused(*glob, "texts")
    assert "must be apart" in refused(
        "compress", *SHORT, "--model", model_directory, "--data", "texts", "-o", "texts/out"
    )
    evaluation = [
        "compress",
        *SHORT,
        "--model",
        model_directory,
        "--data",
        text_file,
        "--eval-data",
        text,
        "-o",
        "texts",
    ]
    assert "--eval-data" in refused(*evaluation)
    configured = [
        "compress",
        *SHORT,
        "--config",
        "run.yaml",
        "--model",
        model_directory,
        "--data",
        text_file,
        "-o",
        ".",
    ]
    assert "--config" in refused(*configured)
    for place in ("packed", "packed/adapter", "."):
        assert "must be apart" in refused("finetune", "packed", *SHORT, "--data", text_file, "--overwrite", "-o", place)
        assert "must be apart" in refused("export", "packed", "--to", "dense", "--overwrite", "-o", place)
    for place in ("packed", "adapter", "adapter/merged", "."):
        assert "must be apart" in refused("merge", "packed", *SHORT, "--adapter", "adapter", "--overwrite", "-o", place)
    assert "must be apart" in refused("compare", "--model", model, "--data", text, "--methods", "fp16", "-o", model)
    for file in (text, model / "config.json", model / "new.json"):
        assert "--json" in refused("eval", model, "--data", text, "--json", file)
        assert "--json" in refused("eval", packed, "--reference", model, "--data", text, "--json", file)
    shutil.copytree(model, home / "out.partial")  # what a run leaves, say, and the next one starts from
    assert "must be apart" in refused("compress", *SHORT, "--model", "out.partial", "--data", text_file, "-o", "out")
    shutil.rmtree(home / "out.partial")
    monkeypatch.setenv("EDKM_CACHE", str(home / "cache"))
    assert "the cache" in refused(
        "compress", *SHORT, "--model", model_directory, "--data", text_file, "-o", "cache/out"
    )
    assert contents(home) == before


def test_an_alias_and_the_base_of_an_export_are_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.gguf").touch()
    wanted = [("DIRECTORY", Path("smollm2-135m")), ("--base-gguf", Path("base.gguf"))]
    assert ownership.run_paths(Options(base_gguf="base.gguf"), "DIRECTORY", "smollm2-135m") == wanted


def test_what_a_killed_run_had_begun_to_write_is_its_own(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / ownership.MARKER).write_text("{}")
    for name in ("self-text.safetensors.7327.tmp", "self-text.safetensors", "step-000001.tmp", ".tmpjJfzxI"):
        (tmp_path / "checkpoints" / name).write_text("begun")
    (tmp_path / ".DS_Store").write_text("Finder's")
    assert ownership.foreign(tmp_path) == ["checkpoints/.tmpjJfzxI"]  # safetensors' own: we let it write nothing


def test_after_a_killed_commit_what_is_written_is_the_runs_own(tmp_path):
    output = OutputDirectory(tmp_path / "out")
    output.begin()
    (output.partial / ownership.FILES).write_text('{"files": {"config.json": {}}}')
    OutputDirectory(tmp_path / "out", resume=True).begin(keep=True)
    (output.partial / "report.json").write_text("{}")
    assert ownership.foreign(output.partial) == []


def test_a_link_is_nobodys_and_a_listed_result_takes_nothing_more(tmp_path):
    for name in ("config.json", "README.md", ownership.MARKER):
        (tmp_path / name).write_text("{}")
    (tmp_path / "model.safetensors").symlink_to("config.json")
    assert ownership.foreign(tmp_path) == ["model.safetensors"]
    files = {"config.json": ownership.entry_of(tmp_path / "config.json")}
    (tmp_path / ownership.FILES).write_text(json.dumps({"files": files}))
    assert ownership.foreign(tmp_path) == ["README.md", "model.safetensors"]


def test_what_tells_whose_files_these_are_is_removed_last(tmp_path, monkeypatch):
    names = [ownership.MARKER, ownership.FILES, "config.json"]
    for name in names:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(ownership, "entries", lambda directory: iter(names))
    gone, unlink = [], Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path, **how: (gone.append(path.name), unlink(path, **how)))
    ownership.remove(tmp_path)
    assert gone == ["config.json", ownership.MARKER, ownership.FILES]
    assert not tmp_path.exists()


def test_a_link_stays_and_what_it_leads_to_is_replaced(commands, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "result")
    arguments = commands(tmp_path / "out")["export"]
    for more in ([], ["--overwrite"]):
        assert run(*arguments, *more)[0] == 0
    assert (tmp_path / "out").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["result"]


def test_what_comes_into_the_output_during_the_run_stops_its_end_and_is_kept(tmp_path):
    for text in ("old", "new"):
        output = OutputDirectory(tmp_path / "out", overwrite=True)
        (output.begin() / "report.json").write_text(text)
        output.mark({})
        if text == "old":
            output.commit()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    (output.partial / "notes.txt").write_text("mine, too")
    with pytest.raises(ownership.UserError, match=r"thesis\.tex"):
        output.commit()
    (tmp_path / "out" / "thesis.tex").rename(tmp_path / "thesis.tex")
    output.commit()
    assert (tmp_path / "out" / "report.json").read_text() == "new"
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine, too"
    with pytest.raises(ownership.UserError, match=r"notes\.txt"):
        OutputDirectory(tmp_path / "out", overwrite=True)


def test_a_page_and_a_result_within_a_finished_run_belong_to_it(commands, tmp_path):
    arguments = commands(tmp_path / "out")["compress"]
    assert run(*arguments)[0] == 0
    for _ in range(2):
        assert run("report", tmp_path / "out", "--no-weights")[0] == 0
    listed = json.loads((tmp_path / "out" / ownership.FILES).read_text())["files"]
    assert "report.html" in listed
    assert run(*arguments, "--overwrite")[0] == 0
    assert not (tmp_path / "out" / "report.html").exists()


def test_files_beside_the_output_that_runs_need_for_a_moment_are_not_taken(commands, tmp_path):
    (tmp_path / ".out.rehearsal").mkdir()
    (tmp_path / ".out.rehearsal" / "probe").write_text("mine")
    (tmp_path / ".other.lock").write_text("mine")
    for place in ("out", "other"):
        assert "something else" in refused(*commands(tmp_path / place)["export"])
    assert (tmp_path / ".out.rehearsal" / "probe").read_text() == "mine"
    assert (tmp_path / ".other.lock").read_text() == "mine"


@pytest.mark.parametrize(
    "text", ["", "{}", '{"versions": {"edkm-cli": "0.1.0"}}', '{"settings": {"edkm_version": "0"}}']
)
def test_results_of_ours_and_empty_files_are_replaced(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    ownership.require_replaceable("--json", tmp_path / "result.json")
    (tmp_path / "result.json").write_text(f"[{text}]")
    with pytest.raises(ownership.UserError, match="is no page, figure or --json result"):
        ownership.require_replaceable("--json", tmp_path / "result.json")


def test_a_result_takes_the_place_of_no_part_of_a_checkpoint(packed, model_directory, text_file, tmp_path):
    out = tmp_path / "out"
    assert run(*compress_arguments(model_directory, text_file, out), "--steps", 0)[0] == 0
    before = contents(out)
    for name in ("model.safetensors", "config.json", "report.json", "README.md"):
        assert "no page, figure" in refused("inspect", packed, "--json", out / name)
        assert "no page, figure" in refused("report", out, "--no-weights", "-o", out / name)
        assert contents(out) == before
    for _ in range(2):  # and a page or a result of ours that is put there is written again
        assert run("inspect", packed, "--json", out / "found.json")[0] == 0


def test_a_page_goes_where_a_link_leads(model_directory, text_file, tmp_path):
    run_of = ["report", tmp_path / "out", "--no-weights", "-o"]
    assert run(*compress_arguments(model_directory, text_file, tmp_path / "out"), "--steps", 0)[0] == 0
    (tmp_path / "page.html").touch()
    (tmp_path / "link").symlink_to("page.html")
    assert run(*run_of, tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_an_output_that_leads_nowhere_or_is_the_result_file_is_refused_before_the_work(
    model_directory, text_file, tmp_path
):
    (tmp_path / "loop").symlink_to("loop")
    assert "must be a directory" in refused(*compress_arguments(model_directory, text_file, tmp_path / "loop"))
    for name in ("out", "out.partial"):
        arguments = compress_arguments(model_directory, text_file, tmp_path / "out")
        assert "another file than --output" in refused(*arguments, "--json", tmp_path / name)
    assert os.listdir(tmp_path) == ["loop"]
