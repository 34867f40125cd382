"""`edkm export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edkm_cli.cli.options import JsonFile, Overwrite, check_json_target, configured, finish
from edkm_cli.export.formats import FORMATS
from edkm_cli.export.formats.options import Options
from edkm_cli.export.ownership import input_paths
from edkm_cli.settings import OUTPUT


@configured(Options)
def export_command(
    options: Options,
    directory: Annotated[Path, typer.Argument(help="Directory of a compressed checkpoint.")],
    to: Annotated[str, typer.Option("--to", help=f"Format: {', '.join(FORMATS)}.", rich_help_panel=OUTPUT)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the export.", rich_help_panel=OUTPUT)],
    overwrite: Overwrite = False,
    json_file: JsonFile = None,
) -> None:
    """Write a compressed checkpoint in the format of another runtime, read it back and compare it."""
    check_json_target(json_file, [*input_paths("DIRECTORY", directory), *input_paths("--data", options.data)])
    from edkm_cli.export.command import export_model
    from edkm_cli.progress import Progress
    from edkm_cli.summaries import export_summary

    result = export_model(directory, to, output, options=options, overwrite=overwrite, track=Progress().track)
    finish(export_summary(result), result, json_file)
