"""`edkm report`: read a run, measure its weights, write the page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.export.ownership import replace_file, require_replaceable
from edkm_cli.progress import Track, no_progress
from edkm_cli.report.document import page
from edkm_cli.report.layers import measure_weights
from edkm_cli.report.read import RunFiles, read_run


def build_report(
    directory: str | Path,
    *,
    output: str | Path | None = None,
    weights: bool = True,
    trust_remote_code: bool = False,
    track: Track = no_progress,
) -> dict[str, Any]:
    """Write the page about a run and return what it shows, for --json.

    Args:
        directory: what `edkm compress` wrote, or is writing: `DIR` stands for `DIR.partial` until the run is finished.
        output: the file; default `DIR/report.html`, or `DIR.partial.html` beside an unfinished run's directory.
        weights: read the checkpoint and, where it is on this machine, the original (a finished run only).

    Raises UserError for a directory that is none, broken files, or a place that cannot be written to.
    """
    run = read_run(directory)
    target = _target(run, output)
    measured = None
    if weights and run.finished:
        measured = measure_weights(
            run.directory,
            run.report["model"],
            original_bytes=run.report["original_weights_bytes"],
            trust_remote_code=trust_remote_code,
            track=track,
        )
    replace_file(target, page(run, measured))
    result = {"directory": str(run.directory), "page": str(target), "finished": run.finished}
    result |= {"steps_done": len(run.metrics), "perplexity": run.perplexity}
    if measured is not None:
        errors = [{"name": name, "relative_squared_error": error} for name, error in measured.errors.items()]
        result |= {"bytes": measured.stored_bytes, "original_bytes": measured.original_bytes, "layers": errors}
        result |= {"missing": measured.missing} if measured.missing else {}
    return result


def _target(run: RunFiles, output: str | Path | None) -> Path:
    """Where the page goes, checked before the work."""
    if output is None:
        inside, beside = run.directory / "report.html", run.directory.with_name(run.directory.name + ".html")
        target = inside if run.finished else beside
    else:
        target = Path(output).expanduser().absolute()
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise UserError(
            f"--output must name a file in a directory that can be written to, got {target}; choose another"
        )
    require_replaceable("--output", target)
    return target
