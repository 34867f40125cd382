"""Commands that make something, or compare how it is made: `edkm compress`, `finetune`, `distill`, `merge`, `export`,
`compare`, `bench` and `ablate`."""

from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from edkm_cli.allocator import keep_freed_blocks, return_large_blocks
from edkm_cli.cli.options import JsonFile, Overwrite, Resume, check_target, configured, finish, option, progress, tell
from edkm_cli.config import CompressConfig, build_config
from edkm_cli.errors import UserError
from edkm_cli.export.formats import FORMATS
from edkm_cli.export.formats.options import Options
from edkm_cli.export.ownership import run_paths
from edkm_cli.finetune.config import DISTILL, FinetuneConfig, MergeConfig, build_distill_config
from edkm_cli.research.bench.config import Ablation, ClusteringBench, RuntimeBench
from edkm_cli.research.compare.config import CompareConfig, build_compare_config
from edkm_cli.settings import MODEL, OUTPUT, SCALE, from_file

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Directory of a compressed model.", rich_help_panel=MODEL, show_default=False),
]


def require_model(model: str) -> None:
    """Raises UserError where neither a flag nor the file names a model."""
    if not model:
        raise UserError("--model is required: an alias (smollm2-135m, llama-7b), a hub id, a directory or a GGUF file")


@configured(CompressConfig, build_config)
def compress_command(
    settings: CompressConfig,
    overwrite: Overwrite = False,
    resume: Resume = False,
    dry_run: Annotated[
        bool, option(SCALE, "Only print what would be done, and what memory it takes.", "--dry-run")
    ] = False,
    gpu_memory: Annotated[
        str | None, option(SCALE, "With --dry-run: memory of each GPU, such as 24GiB.", metavar="SIZE")
    ] = None,
    gpus: Annotated[int | None, option(SCALE, "With --dry-run: number of GPUs.", metavar="N")] = None,
    timed: Annotated[bool, option(SCALE, "With --dry-run: how long, by a run of one decoder layer.", "--time")] = False,
    json_file: JsonFile = None,
) -> None:
    """Compress a model while fine-tuning it, and write a checkpoint that transformers loads."""
    require_model(settings.model)
    check_target(json_file, run_paths(settings, "--model", settings.model), output=settings.output)
    if dry_run:
        from edkm_cli.dryrun import plan

        return tell("plan", plan.dry_run(settings, gpu_memory=gpu_memory, gpus=gpus, timed=timed), json_file)
    if gpu_memory is not None or gpus is not None or timed:
        raise UserError("--gpu-memory, --gpus and --time are for --dry-run, which is not given; add it")
    from edkm_cli.compress import compress
    from edkm_cli.dryrun.need import choose_memory
    from edkm_cli.preflight import RunPlan

    def use_memory(plan: RunPlan) -> None:
        return_large_blocks() if choose_memory(plan) == "small" else keep_freed_blocks(huge=not plan.by_layer)

    result = compress(settings, overwrite=overwrite, resume=resume, observer=progress(), planned=use_memory)
    return tell("compress", result, json_file)


def _finetune(
    settings: FinetuneConfig,
    directory: Directory,
    overwrite: Overwrite = False,
    resume: Resume = False,
    dry_run: Annotated[bool, option(SCALE, "Only print what would be trained.", "--dry-run")] = False,
    json_file: JsonFile = None,
) -> None:
    """Train on a compressed model, whose weights stay packed: an adapter (LoRA) beside it, or its tables."""
    check_target(json_file, run_paths(settings, "DIR", directory), output=settings.output)
    from edkm_cli.finetune.command import finetune, plan_finetune

    if dry_run:
        return tell("finetune_plan", plan_finetune(directory, settings), json_file)
    result = finetune(directory, settings, overwrite=overwrite, resume=resume, observer=progress())
    return tell("finetune", result, json_file)


finetune_command = configured(FinetuneConfig, partial(from_file, FinetuneConfig))(_finetune)
distill_command = configured(FinetuneConfig, build_distill_config, **DISTILL)(_finetune)


@configured(MergeConfig, partial(from_file, MergeConfig))
def merge_command(
    settings: MergeConfig, directory: Directory, overwrite: Overwrite = False, json_file: JsonFile = None
) -> None:
    """Make an adapter part of the compressed model: as many bits as before, and no adapter to load."""
    check_target(json_file, run_paths(settings, "DIR", directory), output=settings.output)
    from edkm_cli.finetune.merge import merge

    tell("merge", merge(directory, settings, overwrite=overwrite, observer=progress()), json_file)


@configured(Options)
def export_command(
    options: Options,
    directory: Annotated[Path, typer.Argument(help="Directory of a compressed checkpoint.")],
    to: Annotated[
        str, typer.Option("--to", help=f"Format: {', '.join(FORMATS)}; or a target, as mlx:4.", rich_help_panel=OUTPUT)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the export.", rich_help_panel=OUTPUT)],
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
) -> None:
    """Write a compressed checkpoint in the format of another runtime, read it back and compare it."""
    check_target(json_file, run_paths(options, "DIRECTORY", directory), output=output)
    from edkm_cli.export.command import export_model

    result = export_model(directory, to, output, options=options, overwrite=overwrite, track=progress().track)
    tell("export", result, json_file)


@configured(CompareConfig, build_compare_config)
def compare_command(
    settings: CompareConfig,
    overwrite: Annotated[bool, option(OUTPUT, "Measure again what is finished.", "--overwrite")] = False,
    json_file: JsonFile = None,
) -> None:
    """One model, many methods, one evaluator: a table, a JSON file and a figure. Exit status 1 if a method failed."""
    require_model(settings.model)
    check_target(json_file, run_paths(settings, "--model", settings.model), output=settings.output)
    from edkm_cli.research.compare.command import compare
    from edkm_cli.research.compare.table import format_table

    result = compare(settings, overwrite=overwrite, say=progress().say)
    finish(format_table(result), result, json_file)
    if failed := [row["label"] for row in result["rows"] if row["error"]]:
        typer.echo(f"edkm: error: {len(failed)} of {len(result['rows'])} methods failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)


def _measure(module: str, settings: Any, json_file: Path | None, plot_file: Path | None = None) -> None:
    """Run a module of `edkm_cli.research.bench`; print what it makes of the result, and draw it for `--plot`."""
    check_target(json_file)
    if plot_file is not None:
        check_target(plot_file, [("--json", json_file)], "--plot")
        if plot_file.suffix != ".svg":
            raise UserError(f"--plot must name a .svg file, got {plot_file}")
    from edkm_cli.preflight import choose_device

    bench = import_module(f"edkm_cli.research.bench.{module}")
    result = bench.run(replace(settings, device=choose_device(settings.device)), log=progress().say)
    try:
        finish(bench.format_table(result), result, json_file)
    finally:  # also where nobody reads what is printed
        if plot_file is not None:
            bench.plot(result, plot_file)


@configured(ClusteringBench)
def bench_clustering_command(settings: ClusteringBench, json_file: JsonFile = None) -> None:
    """Time and memory of clustering, against its reference, a plain linear layer and, where installed, coremltools."""
    _measure("clustering", settings, json_file)


@configured(RuntimeBench)
def bench_runtime_command(settings: RuntimeBench, json_file: JsonFile = None) -> None:
    """Speed of linear layers on packed weights, against dense ones in bfloat16 and float32."""
    _measure("runtime", settings, json_file)


@configured(Ablation)
def ablate_command(
    settings: Ablation,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Write a figure to this file (.svg).", rich_help_panel=OUTPUT)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """The paper's memory comparison on this machine: marshaling, uniquification, sharding, and what edkm does."""
    _measure("ablate", settings, json_file, plot_file)
