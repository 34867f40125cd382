"""Measurements of the method itself: `edkm bench` and `edkm ablate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edkm_cli.cli.options import Device, JsonFile, check_json_target, finish


def bench_clustering_command(
    width: Annotated[int, typer.Option(min=1, help="The layer is width x width.")] = 4096,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the layer's own linear.")] = 2048,
    bits: Annotated[int, typer.Option(min=1, max=8, help="Bits of an index.")] = 3,
    iterations: Annotated[int, typer.Option(min=1, help="Centroid updates.")] = 3,
    dtype: Annotated[str, typer.Option(help="Of the weight: bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
    granularity: Annotated[
        list[str] | None, typer.Option(help="Geometry of a fused row (repeatable); default: one of each kind.")
    ] = None,
    dense: Annotated[bool, typer.Option("--dense/--no-dense", help="Measure the dense reference, too (slow).")] = True,
    json_file: JsonFile = None,
) -> None:
    """The clustering engine against the dense reference, the layer's own linear and, where installed, coremltools."""
    check_json_target(json_file)
    from edkm_cli.bench.clustering import GRANULARITIES, bench_clustering, format_table
    from edkm_cli.preflight import choose_device
    from edkm_cli.progress import Progress

    result = bench_clustering(
        width=width,
        tokens=tokens,
        bits=bits,
        iterations=iterations,
        dtype=dtype,
        device=choose_device(device),
        granularities=tuple(granularity or GRANULARITIES),
        dense=dense,
        log=Progress().say,
    )
    finish(format_table(result), result, json_file)


def ablate_command(
    width: Annotated[int, typer.Option(help="The projection is width x width; LLaMA-7B's is 4096.")] = 4096,
    learners: Annotated[int, typer.Option(help="Processes to start.")] = 8,
    bits: Annotated[int, typer.Option(help="Bits of an index.")] = 3,
    iterations: Annotated[int, typer.Option(help="Differentiated centroid updates.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    device: Device = "auto",
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a figure to this file (.png, .svg).")] = None,
    json_file: JsonFile = None,
) -> None:
    """The paper's memory ablation on this machine: marshaling, uniquification, sharding, and the closed form."""
    check_json_target(json_file)
    from edkm_cli.bench.ablate import format_table, plot, run
    from edkm_cli.preflight import choose_device
    from edkm_cli.progress import Progress

    result = run(
        width=width,
        learners=learners,
        bits=bits,
        iterations=iterations,
        dtype=dtype,
        device=choose_device(device),
        log=Progress().say,
    )
    if plot_file is not None:
        plot(result, plot_file)
    finish(format_table(result), result, json_file)
