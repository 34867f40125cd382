"""Scripts and configurations run from top to bottom: on a CPU, with a tiny model, by the code that GPU nodes run."""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import edkm_cli
from edkm_cli.config import build_config
from edkm_cli.research.compare.config import build_compare_config
from edkm_cli.settings import configs_directory
from processes import PATIENCE_SECONDS, wait_for_steps

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
CONFIGS = sorted(path for path in configs_directory().glob("*.yaml") if path.name != "models.yaml")
# What makes a run of minutes out of a run of days.
TINY = ["--sequence-length", "48", "--context", "64", "--eval-windows", "2", "--calibration-tokens", "256"]
TINY += ["--start-tokens", "256"]


def environment(python, **more):
    """Variables of a script; torchrun starts PYTHON_EXEC."""
    always = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHON": python, "PYTHON_EXEC": python, "DEVICE": "cpu"}
    return {**os.environ, **{name: str(value) for name, value in {**always, **more}.items()}}


@pytest.fixture
def run(python):
    """Runs a script with its arguments and variables; gives its finished process."""

    def run_script(script, *arguments, expected=0, **variables):
        done = subprocess.run(
            [str(ROOT / "scripts" / script), *map(str, arguments)],
            env=environment(python, **variables),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == expected, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run_script


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_configuration_is_accepted_and_says_how_to_launch_it(path):
    build = build_compare_config if path.name.startswith("compare") else build_config
    build(path, {})
    header = path.read_text().split("\nmodel:")[0]
    assert all(line.startswith("#") for line in header.splitlines())
    assert f"--config configs/{path.name}" in header


def test_the_papers_recipe_is_what_the_paper_says():
    config = build_config(configs_directory() / "paper_llama7b_3bit.yaml", {})
    said = {"model": "llama-7b", "data": ("alpaca",), "bits": 3, "embedding_bits": 8, "granularity": "tensor"}
    said |= {"mode": "soft", "learning_rate": 5e-5, "sharding": "full", "dtype": "bfloat16"}
    assert {name: getattr(config, name) for name in said} == said


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_is_sound(path):
    subprocess.run(["bash", "-n", str(path)], check=True)
    assert os.access(path, os.X_OK)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(path)], check=True)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_one_gpu_plans_compresses_and_evaluates(run, model_directory, text_file, tmp_path):
    output = tmp_path / "out"
    variables = {"MODEL": model_directory, "OUTPUT": output, "EVAL_DATA": text_file, "CONTEXT": 64}
    arguments = ["--data", text_file, "--steps", 2, "--gradient-accumulation", 2, *TINY]
    done = run("llama_7b_one_gpu.sh", *arguments, **variables)
    report = json.loads((output / "report.json").read_text())
    assert report["resolved"]["assignments"] == "held"
    assert report["resolved"]["gradient_checkpointing"] is True
    assert json.loads(Path(f"{output}-eval.json").read_text())["perplexity"] > 1
    assert "peak" in done.stdout
    assert (output / "report.html").is_file()
    edkm_cli.load(output)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_one_node_trains_the_papers_recipe_sharded_over_its_processes(run, model_directory, text_file, tmp_path):
    output = tmp_path / "out"
    run(
        "llama_7b_node.sh",
        *("--data", text_file, "--steps", 2, "--batch-size", 1, *TINY),
        CONFIG="configs/paper_llama7b_3bit.yaml",
        MODEL=model_directory,
        OUTPUT=output,
        PROCESSES=2,
        EVAL_DATA=text_file,
        CONTEXT=64,
    )
    report = json.loads((output / "report.json").read_text())
    assert (report["processes"], report["sharded"], report["config"]["mode"]) == (2, True, "soft")
    assert json.loads(Path(f"{output}-eval.json").read_text())["perplexity"] > 1


def fake_slurm(directory):
    """A directory for PATH with a SLURM of one node: srun runs its command here, scontrol notes what goes back."""
    programs = {
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
        "scontrol": 'if [ "$1" = show ]; then echo localhost; else echo "$@" >>"$REQUEUED"; fi\n',
    }
    directory.mkdir()
    for name, body in programs.items():
        (directory / name).write_text("#!/usr/bin/env bash\n" + body)
        (directory / name).chmod(0o755)
    return directory


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_preempted_slurm_job_goes_back_into_the_queue_and_then_on(python, model_directory, text_file, tmp_path):
    output, requeued = tmp_path / "out", tmp_path / "requeued"
    job = {"SLURM_JOB_ID": 4711, "SLURM_JOB_NUM_NODES": 1, "SLURM_JOB_NODELIST": "localhost", "REQUEUED": requeued}
    variables = environment(
        python,
        **job,
        SLURM_SUBMIT_DIR=ROOT,
        PATH=f"{fake_slurm(tmp_path / 'bin')}:{os.environ['PATH']}",
        MODEL=model_directory,
        OUTPUT=output,
        PROCESSES=2,
        BATCH_SIZE=1,
        EVAL_DATA=text_file,
        CONTEXT=64,
    )
    arguments = ["--data", str(text_file), "--steps", "20", "--save-every", "1000", *TINY]
    command = [str(ROOT / "scripts" / "llama_7b_slurm.sh"), *arguments]
    log = (tmp_path / "log").open("w")
    job = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_for_steps(tmp_path / "out.partial", 3, lambda: job.poll() is None)
        job.send_signal(signal.SIGTERM)  # to the script alone, as SLURM does
        assert job.wait(timeout=PATIENCE_SECONDS) != 0
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert requeued.read_text() == "requeue 4711\n", (tmp_path / "log").read_text()[-3000:]
    saved = [path.name for path in (tmp_path / "out.partial" / "checkpoints").glob("step-*")]
    assert len(saved) == 1
    assert not output.exists()
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    steps = [json.loads(line)["step"] for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 21))
    assert requeued.read_text() == "requeue 4711\n"
    report = json.loads((output / "report.json").read_text())  # of configs/llama_7b_8gpu.yaml
    assert (report["processes"], report["sharded"], report["resolved"]["assignments"]) == (2, False, "held")
    assert json.loads(Path(f"{output}-eval.json").read_text())["perplexity"] > 1


def test_a_memory_limit_needs_a_gpu(monkeypatch, capsys):
    script = str(ROOT / "scripts" / "bench_training.py")
    monkeypatch.setattr(sys, "argv", [script, "--device", "cpu", "--memory-limit", "24GiB"])
    assert runpy.run_path(script)["main"]() == 2
    line = capsys.readouterr().err.strip()
    assert line == "bench_training.py: --memory-limit needs a GPU, but the device is cpu; leave it out"


def test_the_start_of_a_layer_is_timed_by_part(monkeypatch, tmp_path):
    script, found = str(ROOT / "scripts" / "bench_start.py"), tmp_path / "start.json"
    shape = ["--hidden", "64", "--intermediate", "96", "--heads", "2", "--tokens", "48"]
    monkeypatch.setattr(sys, "argv", [script, *shape, "--json", str(found)])
    timed = runpy.run_path(script)
    timed["main"]()
    parts = {row["part"]: row for row in json.loads(found.read_text())["parts"]}
    assert parts.keys() == {*timed["TIMED"], "other"}
    assert all(row["seconds"] >= 0 for row in parts.values())


def assert_training_was_measured(result, *, assignments):
    plain, clustered = result["rows"]
    assert (plain["variant"], clustered["variant"]) == ("plain", "clustered")
    for row in result["rows"]:
        assert len(row["all_step_seconds"]) == 2
        assert row["tokens_per_second"] == pytest.approx(64 / row["step_seconds"])
        assert row["peak_memory_bytes"] > 100e6
        assert 0 <= row["kernel_share"] <= 1
        assert row["step_cpu_seconds"] > 0
    assert result["tokens_per_second_ratio"] == clustered["tokens_per_second"] / plain["tokens_per_second"]
    assert result["step_seconds_ratio"] == clustered["step_seconds"] / plain["step_seconds"]
    assert result["peak_memory_bytes_ratio"] == clustered["peak_memory_bytes"] / plain["peak_memory_bytes"]
    assert result["planned_over_measured"] == pytest.approx(1, abs=0.5)
    assert result["config"]["assignments"] == assignments


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_the_gpu_check_runs_from_top_to_bottom(run, tmp_path):
    """Without its part `kernels`, which is tests/test_gpu.py."""
    parts = "held full compress processes clustering ablation offload"
    run("gpu_check.sh", tmp_path, PARTS=parts)
    (summary,) = tmp_path.glob("gpu_check_cpu_*.json")
    result = json.loads(summary.read_text())
    assert [part["name"] for part in result["parts"]] == parts.replace("compress", "compress compress").split()
    assert {part["status"] for part in result["parts"]} == {0}
    assert result["runs"].keys() == {"compress-full", "compress-held", "compress-sharded"}
    assert result["runs"]["compress-sharded"]["processes"] == 2
    assert len(list(tmp_path.iterdir())) == 6
    for file in tmp_path.iterdir():
        assert {"command", "versions", "hardware"} <= json.loads(file.read_text()).keys(), file.name
    for name, assignments in (("full", "free"), ("held", "held")):
        (file,) = tmp_path.glob(f"training_tiny-{name}_cpu_*.json")
        assert_training_was_measured(json.loads(file.read_text()), assignments=assignments)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_a_part_that_fails_stops_nothing_and_is_named(run, tmp_path):
    done = run("gpu_check.sh", tmp_path, PARTS="clustering ablation", LIMIT="0.01", expected=1)
    (summary,) = tmp_path.glob("gpu_check_cpu_*.json")
    assert [part["status"] for part in json.loads(summary.read_text())["parts"]] == [124, 124]
    assert "failed: clustering, ablation" in done.stdout
    assert "clustering took longer than 0.01 seconds" in done.stderr
