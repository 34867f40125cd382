"""Measurements of the method itself: `edkm bench` and `edkm ablate`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from edkm_cli.cli.options import Device, JsonFile, check_json_target, finish
from edkm_cli.errors import UserError
from edkm_cli.export.ownership import require_replaceable


def _measures(module: str, function: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a command whose options are the arguments of `function` of a module of `edkm_cli.research.bench`. Those not
    given keep its defaults. What the module makes of the result is printed, and drawn for `--plot`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*, device: str, json_file: Path | None, plot_file: Path | None = None, **options: Any) -> None:
            check_json_target(json_file)
            if plot_file is not None:
                require_replaceable("--plot", plot_file)
                if plot_file.suffix != ".svg":
                    raise UserError(f"--plot must name a .svg file, got {plot_file}")
            from edkm_cli.preflight import choose_device
            from edkm_cli.progress import Progress

            bench = import_module(f"edkm_cli.research.bench.{module}")
            given = {name: value for name, value in options.items() if value not in (None, [])}
            result = getattr(bench, function)(**given, device=choose_device(device), log=Progress().say)
            if plot_file is not None:
                bench.plot(result, plot_file)
            finish(bench.format_table(result), result, json_file)

        return run

    return decorate


@_measures("clustering", "bench_clustering")
def bench_clustering_command(
    width: Annotated[int, typer.Option(min=1, help="Rows and columns of the weight.")] = 4096,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that pass through the plain linear layer it is compared with.")
    ] = 2048,
    bits: Annotated[int, typer.Option(min=1, max=8, help="Bits per weight.")] = 3,
    iterations: Annotated[int, typer.Option(min=1, help="Clustering updates of the lookup tables.")] = 3,
    dtype: Annotated[str, typer.Option(help="Number format of the weight: bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
    granularity: Annotated[
        list[str] | None,
        typer.Option(
            help="Weights that share a lookup table: tensor, row:G or block:RxC. Repeatable; default: one of each."
        ),
    ] = None,
    dense: Annotated[
        bool, typer.Option("--dense/--no-dense", help="Also measure the reference with an attention map (slow).")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """Time and memory of clustering, against its reference, a plain linear layer and, where installed, coremltools."""


@_measures("runtime", "bench_runtime")
def bench_runtime_command(
    shape: Annotated[
        list[str] | None, typer.Option(help="Rows and columns of a weight, such as 4096x4096. Repeatable.")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens that are multiplied at once. Repeatable.")
    ] = None,
    bits: Annotated[list[int] | None, typer.Option(min=1, max=8, help="Bits per weight. Repeatable.")] = None,
    granularity: Annotated[
        list[str] | None,
        typer.Option(help="Weights that share a lookup table: tensor, row:G or block:RxC. Repeatable."),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Number format of activations: bfloat16, float16, float32. Repeatable.")
    ] = None,
    device: Device = "auto",
    cold: Annotated[
        bool, typer.Option("--cold/--warm", help="Go through many matrices that no cache holds, or stay with one.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Speed of linear layers on packed weights, against dense ones in bfloat16 and float32."""


@_measures("ablate", "run")
def ablate_command(
    width: Annotated[int, typer.Option(help="Rows and columns of the weight; LLaMA-7B's have 4096.")] = 4096,
    learners: Annotated[int, typer.Option(help="Number of processes, the paper's learners.")] = 8,
    bits: Annotated[int, typer.Option(help="Bits per weight.")] = 3,
    iterations: Annotated[int, typer.Option(help="Clustering updates that gradients pass through.")] = 1,
    dtype: Annotated[str, typer.Option(help="Number format of the weight: bfloat16 or float16.")] = "bfloat16",
    device: Device = "auto",
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a figure to this file (.svg).")] = None,
    json_file: JsonFile = None,
) -> None:
    """The paper's memory comparison on this machine: marshaling, uniquification, sharding, and what edkm does."""
