"""`edkm finetune`, `edkm distill` and `edkm merge`: training on a compressed model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edkm_cli.cli.options import (
    JsonFile,
    Overwrite,
    Resume,
    check_json_target,
    configured,
    finish,
    first_process,
    option,
    stamped,
)
from edkm_cli.export.ownership import run_paths
from edkm_cli.finetune.config import (
    FinetuneConfig,
    MergeConfig,
    build_distill_config,
    build_finetune_config,
    build_merge_config,
)
from edkm_cli.settings import MODEL, SCALE

Directory = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Directory of a compressed model.", rich_help_panel=MODEL, show_default=False),
]


def _finetune(
    settings: FinetuneConfig,
    directory: Directory,
    overwrite: Overwrite = False,
    resume: Resume = False,
    dry_run: Annotated[bool, option(SCALE, "Only print what would be trained.", "--dry-run")] = False,
    json_file: JsonFile = None,
) -> None:
    """Train on a compressed model, whose weights stay packed: an adapter (LoRA) beside it, or its tables."""
    check_json_target(json_file, run_paths(settings, "DIR", directory))
    from edkm_cli.finetune.command import finetune, plan_finetune
    from edkm_cli.progress import Progress
    from edkm_cli.summaries import finetune_plan_summary, finetune_summary

    if dry_run:
        plan = plan_finetune(directory, settings)
        finish(finetune_plan_summary(plan), stamped(plan), json_file)
        return
    result = finetune(directory, settings, overwrite=overwrite, resume=resume, observer=Progress())
    if first_process():
        finish(finetune_summary(result), result, json_file)


finetune_command = configured(FinetuneConfig, build_finetune_config)(_finetune)
distill_command = configured(FinetuneConfig, build_distill_config)(_finetune)


@configured(MergeConfig, build_merge_config)
def merge_command(
    settings: MergeConfig, directory: Directory, overwrite: Overwrite = False, json_file: JsonFile = None
) -> None:
    """Make an adapter part of the compressed model: as many bits as before, and no adapter to load."""
    check_json_target(json_file, run_paths(settings, "DIR", directory))
    from edkm_cli.finetune.merge import merge
    from edkm_cli.progress import Progress
    from edkm_cli.summaries import merge_summary

    result = merge(directory, settings, overwrite=overwrite, observer=Progress())
    finish(merge_summary(result), result, json_file)
