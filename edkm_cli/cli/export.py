"""`edkm export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edkm_cli.cli.options import JsonFile, RemoteCode, check_json_target, finish
from edkm_cli.export.ownership import input_paths


def export_command(
    directory: Annotated[Path, typer.Argument(help="Directory of a compressed checkpoint.")],
    to: Annotated[
        str,
        typer.Option("--to", help="dense, squeezellm, any-precision, lut-b, coreml, mlx, gguf or compressed-tensors."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the export.")],
    dtype: Annotated[
        str,
        typer.Option(
            help="Number format of weights without lookup tables: float16, bfloat16 or float32; auto: the format's own."
        ),
    ] = "auto",
    verify: Annotated[
        str, typer.Option(help="weights: compare all weights with the source; perplexity: measure both models as well.")
    ] = "weights",
    data: Annotated[
        str, typer.Option(help="Text for --verify perplexity: builtin, wikitext2, ... or a file.")
    ] = "builtin",
    context: Annotated[int, typer.Option(min=2, help="Tokens in a window on which perplexity is measured.")] = 1024,
    max_windows: Annotated[int, typer.Option(min=1, help="Number of windows, from the first.")] = 4,
    sequence_length: Annotated[
        str, typer.Option(metavar="N|A-B", help="coreml: tokens of a call, a number or a range.")
    ] = "1-1024",
    cache: Annotated[
        bool, typer.Option("--cache", help="coreml: keep keys and values of earlier tokens in the model's state.")
    ] = False,
    base_gguf: Annotated[
        Path | None,
        typer.Option(
            help="gguf: a file of the same model whose metadata and tokenizer are taken over, tensors replaced."
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what --output holds, once the export is whole.")
    ] = False,
    trust_remote_code: RemoteCode = False,
    json_file: JsonFile = None,
) -> None:
    """Write a compressed checkpoint in the format of another runtime, read it back and compare it."""
    check_json_target(json_file, [*input_paths("DIRECTORY", directory), *input_paths("--data", data)])
    from edkm_cli.export.command import export_model
    from edkm_cli.export.formats.options import Options
    from edkm_cli.progress import Progress
    from edkm_cli.summaries import export_summary

    result = export_model(
        directory,
        to,
        output,
        options=Options(
            dtype=dtype,
            sequence_length=sequence_length,
            cache=cache,
            base_gguf=base_gguf,
            trust_remote_code=trust_remote_code,
        ),
        verify=verify,
        data=data,
        context=context,
        max_windows=max_windows,
        overwrite=overwrite,
        track=Progress().track,
    )
    finish(export_summary(result), result, json_file)
