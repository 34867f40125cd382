"""Whole runs: an export that is another model fails, a changed evaluation text is noticed, bfloat16 learns like float32."""

import os
import shutil

import pytest
import torch

import edkm_cli
from edkm_cli import compress as module
from edkm_cli.compress import Run, compress
from edkm_cli.config import CompressConfig
from edkm_cli.data import load_documents, parse_source, tokenize
from edkm_cli.distributed import ALONE, World
from edkm_cli.errors import UserError
from edkm_cli.evaluate.limits import require_same_perplexity
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.export import run
from edkm_cli.models import load_tokenizer, resolve
from edkm_cli.train.loop import require_launch

SHORT = {
    "steps": 2,
    "sequence_length": 32,
    "context": 32,
    "eval_windows": 2,
    "calibration_tokens": 64,
    "start_tokens": 64,
}


def config_of(model, text, output, **more):
    return CompressConfig(**{**SHORT, "model": str(model), "data": (str(text),), "output": str(output), **more})


def test_an_export_that_is_another_model_fails_the_run_with_both_figures(
    model_directory, text_file, tmp_path, monkeypatch
):
    def another(*arguments, **options):
        model = load(*arguments, **options)
        model.model.norm.weight.data.mul_(-1)
        return model

    load = run.load
    monkeypatch.setattr(run, "load", another)
    with pytest.raises(UserError, match=r"trained is [\d.]+ and exported [\d.]+"):
        compress(config_of(model_directory, text_file, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("exported", "dtype", "same"),
    [(10.005, "float32", True), (10.2, "float32", False), (10.1, "bfloat16", True), (9.0, "bfloat16", False)],
)
def test_the_tolerance_is_that_of_the_dtype(exported, dtype, same):
    figures = {"original": 9.0, "start": 20.0, "trained": 10.0, "exported": exported}
    if same:
        require_same_perplexity(figures, dtype)
    else:
        with pytest.raises(UserError):
            require_same_perplexity(figures, dtype)


def test_a_changed_evaluation_text_is_another_run(model_directory, text_file, tmp_path, monkeypatch):
    text = tmp_path / "eval.txt"
    text.write_text(text_file.read_text()[:2000])
    config = config_of(model_directory, text_file, tmp_path / "out", eval_data=str(text), save_every=1)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_checkpoint", stop)
    with pytest.raises(KeyboardInterrupt):
        compress(config)
    text.write_text(text_file.read_text()[1000:4000])
    with pytest.raises(UserError, match="evaluation_sha256"):
        compress(config, resume=True)
    with pytest.raises(UserError, match="--resume"):
        compress(config)  # and without --resume nothing is thrown away
    assert list((tmp_path / "out.partial" / "checkpoints").glob("step-*"))


def test_accumulation_that_the_launcher_was_told_is_not_applied_twice(monkeypatch):
    monkeypatch.setitem(os.environ, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(UserError, match="give both the same number"):
        require_launch(CompressConfig(gradient_accumulation=2), ALONE)
    require_launch(CompressConfig(gradient_accumulation=4), ALONE)

    def refuse(*_, **__):
        raise NotImplementedError("Using RTX 4000 series")

    monkeypatch.setattr("accelerate.PartialState", refuse)
    with pytest.raises(UserError, match="accelerate does not take this machine"):
        require_launch(CompressConfig(gradient_accumulation=4), World(device="cuda"))


@pytest.mark.slow
@pytest.mark.parametrize("distill", [False, True])
def test_bfloat16_learns_like_float32(model_directory, text_file, tmp_path, distill):
    """60 steps at a rate at which plain bfloat16 steps lose most updates; both results are measured in float32, since what
    bfloat16 products cost this random model, there and in a fitted start, has nothing to do with updates."""
    more = {"steps": 60, "learning_rate": 5e-5, "save_every": 0, "distill": distill, "start": "kmeans"}
    found = {}
    for dtype in ("float32", "bfloat16"):
        compress(config_of(model_directory, text_file, tmp_path / dtype, dtype=dtype, **more))
        exported = edkm_cli.load(tmp_path / dtype, dtype=torch.float32)
        tokens = tokenize(
            load_documents(parse_source(str(text_file)), "train"), load_tokenizer(resolve(str(tmp_path / dtype)))
        )
        found[dtype] = perplexity(exported, tokens, context=32, max_windows=60).perplexity
    assert found["bfloat16"] == pytest.approx(found["float32"], rel=0.02)


def test_a_result_beyond_the_ratio_is_no_success(model_directory, text_file, tmp_path):
    with pytest.raises(UserError, match=r"max-perplexity-ratio 0\.1 times"):
        compress(config_of(model_directory, text_file, tmp_path / "out", steps=0, max_perplexity_ratio=0.1))
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / "report.json").is_file()


def test_collapsed_and_unused_tables_are_reported_with_their_layer():
    from edkm_cli.evaluate.size import layer_use, table_warnings
    from edkm_cli.format import QuantizationSpec
    from edkm_cli.packing import pack
    from edkm_cli.runtime.palettized import PalettizedLinear

    layer = PalettizedLinear(
        torch.nn.Linear(16, 4, bias=False), QuantizationSpec(3, "row:2", "float16", 8), name="layer"
    )
    indices = (torch.arange(64).view(4, 16) % 8).to(torch.uint8)
    indices[2:] = indices[2:] % 2  # the second table's last six entries
    layer.indices = pack(indices, 3)
    layer.lut = torch.stack([torch.arange(8.0), torch.ones(8)]).half()
    use = layer_use(layer)
    assert use == {"tables": 2, "collapsed": 1, "entries": 16, "unused_entries": 6}
    assert table_warnings([{"name": "a.layer", **use}])[0].startswith("a.layer: 1 of 2 tables have collapsed")


@pytest.mark.slow
def test_fifty_save_and_load_cycles_need_no_more_memory(tmp_path):
    """Growth after the first cycles is none of the model's: a leak of one tiny model a cycle would show."""
    import gc
    import resource

    from edkm_cli import hf
    from helpers import cluster, export, tiny_llama

    model, spec = cluster(tiny_llama(hidden=64, inner=512, layers=1))
    peaks = []
    for _ in range(50):
        hf.load(export(model, spec, tmp_path / "cycle"))
        gc.collect()
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[-1] - peaks[9] < 8 * 1024  # kilobytes


@pytest.mark.slow
def test_three_hundred_steps_need_no_more_memory_than_thirty(model_directory, text_file, tmp_path):
    import resource

    peaks = []
    for steps in (30, 300):
        compress(config_of(model_directory, text_file, tmp_path / str(steps), steps=steps, save_every=0))
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert peaks[1] - peaks[0] < 16 * 1024


def test_a_model_that_changes_while_it_is_read_is_no_result(model_directory, text_file, tmp_path, monkeypatch):
    model = shutil.copytree(model_directory, tmp_path / "model")

    def start(self, *arguments):
        started = original(self, *arguments)
        os.utime(model / "model.safetensors", ns=(1, 1))
        return started

    original = Run._start
    monkeypatch.setattr(Run, "_start", start)
    with pytest.raises(UserError, match="changed while it was read"):
        compress(config_of(model, text_file, tmp_path / "out"))
    assert not (tmp_path / "out").exists()
