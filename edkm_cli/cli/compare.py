"""`edkm compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from edkm_cli.cli.options import JsonFile, check_json_target, configured, finish, option, require_model
from edkm_cli.export.ownership import run_paths
from edkm_cli.research.compare.config import CompareConfig, build_compare_config
from edkm_cli.settings import OUTPUT


@configured(CompareConfig, build_compare_config)
def compare_command(
    settings: CompareConfig,
    overwrite: Annotated[bool, option(OUTPUT, "Measure again what is finished.", "--overwrite")] = False,
    json_file: JsonFile = None,
) -> None:
    """One model, many methods, one evaluator: a table, a JSON file and a figure. Exit status 1 if a method failed."""
    require_model(settings.model)
    check_json_target(json_file, run_paths(settings, "--model", settings.model))
    from edkm_cli.progress import Progress
    from edkm_cli.research.compare.command import compare
    from edkm_cli.research.compare.table import format_table

    result = compare(settings, overwrite=overwrite, say=Progress().say)
    finish(format_table(result), result, json_file)
    if failed := [row["label"] for row in result["rows"] if row["error"]]:
        typer.echo(f"edkm: error: {len(failed)} of {len(result['rows'])} methods failed: {', '.join(failed)}", err=True)
        raise typer.Exit(1)
