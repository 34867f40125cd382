"""Measurements of the method itself: `edkm bench` and `edkm ablate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from edkm_cli.cli.options import JsonFile, check_json_target, configured, finish
from edkm_cli.errors import UserError
from edkm_cli.export.ownership import require_replaceable
from edkm_cli.settings import DEVICE, setting

_WIDTH = "Rows and columns of the weight; LLaMA-7B's have 4096."
_GRANULARITY = "Weights that share a lookup table: tensor, row:G or block:RxC."


def _measured(measure: Callable[..., dict[str, Any]], settings: Any) -> dict[str, Any]:
    """The result of a measurement, whose own defaults stand for lists that nobody gave."""
    from edkm_cli.preflight import choose_device
    from edkm_cli.progress import Progress

    given = {name: value for name, value in asdict(settings).items() if value != ()}
    return measure(**given | {"device": choose_device(settings.device)}, log=Progress().say)


@dataclass(frozen=True)
class _Clustering:
    width: int = setting(4096, _WIDTH, "", minimum=1)
    tokens: int = setting(2048, "Tokens that pass through the plain linear layer it is compared with.", "", minimum=1)
    bits: int = setting(3, "Bits per weight.", "", minimum=1, maximum=8)
    iterations: int = setting(3, "Clustering updates of the lookup tables.", "", minimum=1)
    dtype: str = setting("bfloat16", "Number format of the weight: bfloat16, float16 or float32.", "")
    device: str = setting("auto", DEVICE, "")
    granularity: tuple[str, ...] = setting((), f"{_GRANULARITY} Default: one of each.", "")
    dense: bool = setting(True, "Also measure the reference with an attention map (slow).", "")


@configured(_Clustering)
def bench_clustering_command(settings: _Clustering, json_file: JsonFile = None) -> None:
    """Time and memory of clustering, against its reference, a plain linear layer and, where installed, coremltools."""
    check_json_target(json_file)
    from edkm_cli.research.bench.clustering import bench_clustering, format_table

    result = _measured(bench_clustering, settings)
    finish(format_table(result), result, json_file)


@dataclass(frozen=True)
class _Runtime:
    shape: tuple[str, ...] = setting((), "Rows and columns of a weight, such as 4096x4096.", "")
    tokens: tuple[int, ...] = setting((), "Tokens that are multiplied at once.", "", minimum=1)
    bits: tuple[int, ...] = setting((), "Bits per weight.", "", minimum=1, maximum=8)
    granularity: tuple[str, ...] = setting((), _GRANULARITY, "")
    dtype: tuple[str, ...] = setting((), "Number format of activations: bfloat16, float16, float32.", "")
    device: str = setting("auto", DEVICE, "")
    cold: bool = setting(False, "Go through many matrices that no cache holds, or stay with one.", "", "--cold/--warm")


@configured(_Runtime)
def bench_runtime_command(settings: _Runtime, json_file: JsonFile = None) -> None:
    """Speed of linear layers on packed weights, against dense ones in bfloat16 and float32."""
    check_json_target(json_file)
    from edkm_cli.research.bench.runtime import bench_runtime, format_table

    result = _measured(bench_runtime, settings)
    finish(format_table(result), result, json_file)


@dataclass(frozen=True)
class _Ablation:
    width: int = setting(4096, _WIDTH, "")
    learners: int = setting(8, "Number of processes, the paper's learners.", "")
    bits: int = setting(3, "Bits per weight.", "")
    iterations: int = setting(1, "Clustering updates that gradients pass through.", "")
    dtype: str = setting("bfloat16", "Number format of the weight: bfloat16 or float16.", "")
    device: str = setting("auto", DEVICE, "")


@configured(_Ablation)
def ablate_command(
    settings: _Ablation,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a figure to this file (.svg).")] = None,
    json_file: JsonFile = None,
) -> None:
    """The paper's memory comparison on this machine: marshaling, uniquification, sharding, and what edkm does."""
    check_json_target(json_file)
    if plot_file is not None:
        require_replaceable("--plot", plot_file)
        if plot_file.suffix != ".svg":
            raise UserError(f"--plot must name a .svg file, got {plot_file}")
    from edkm_cli.research.bench.ablate import format_table, plot, run

    result = _measured(run, settings)
    if plot_file is not None:
        plot(result, plot_file)
    finish(format_table(result), result, json_file)
