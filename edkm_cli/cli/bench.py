"""Measurements of the method itself: `edkm bench` and `edkm ablate`."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from edkm_cli.cli.options import JsonFile, check_json_target, configured, finish
from edkm_cli.errors import UserError
from edkm_cli.export.ownership import require_replaceable
from edkm_cli.research.bench.config import Ablation, ClusteringBench, RuntimeBench
from edkm_cli.settings import OUTPUT


def _measure(module: str, settings: Any, json_file: Path | None, plot_file: Path | None = None) -> None:
    """Run a module of `edkm_cli.research.bench`; print what it makes of the result, and draw it for `--plot`."""
    check_json_target(json_file)
    if plot_file is not None:
        require_replaceable("--plot", plot_file)
        if plot_file.suffix != ".svg":
            raise UserError(f"--plot must name a .svg file, got {plot_file}")
    from edkm_cli.preflight import choose_device
    from edkm_cli.progress import Progress

    bench = import_module(f"edkm_cli.research.bench.{module}")
    result = bench.run(replace(settings, device=choose_device(settings.device)), log=Progress().say)
    if plot_file is not None:
        bench.plot(result, plot_file)
    finish(bench.format_table(result), result, json_file)


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
