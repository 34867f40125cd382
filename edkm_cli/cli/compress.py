"""`edkm compress`."""

from __future__ import annotations

from typing import Annotated

from edkm_cli.allocator import keep_freed_blocks, return_large_blocks
from edkm_cli.cli.options import (
    JsonFile,
    Overwrite,
    Resume,
    check_json_target,
    configured,
    finish,
    first_process,
    option,
    require_model,
    stamped,
)
from edkm_cli.config import CompressConfig, build_config
from edkm_cli.errors import UserError
from edkm_cli.export.ownership import run_paths
from edkm_cli.settings import SCALE


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
    json_file: JsonFile = None,
) -> None:
    """Compress a model while fine-tuning it, and write a checkpoint that transformers loads."""
    require_model(settings.model)
    check_json_target(json_file, run_paths(settings, "--model", settings.model))
    if dry_run:
        from edkm_cli.dryrun import plan
        from edkm_cli.summaries import plan_summary

        result = plan.dry_run(settings, gpu_memory=gpu_memory, gpus=gpus)
        finish(plan_summary(result), stamped(result), json_file)
        return
    if gpu_memory is not None or gpus is not None:
        raise UserError("--gpu-memory and --gpus describe a machine for --dry-run, which is not given; add it")
    from edkm_cli.compress import compress
    from edkm_cli.dryrun.plan import choose_memory
    from edkm_cli.preflight import RunPlan
    from edkm_cli.progress import Progress
    from edkm_cli.summaries import summary

    def use_memory(plan: RunPlan) -> None:
        return_large_blocks() if choose_memory(plan) == "small" else keep_freed_blocks(huge=not plan.by_layer)

    result = compress(settings, overwrite=overwrite, resume=resume, observer=Progress(), planned=use_memory)
    if first_process():
        finish(summary(result), result, json_file)
