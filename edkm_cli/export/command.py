"""`edkm export`: a compressed checkpoint in the format of another runtime, read back and compared before it appears."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import data as texts
from edkm_cli import models
from edkm_cli.environment import versions
from edkm_cli.errors import UserError
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.export.formats import find
from edkm_cli.export.formats.folder import read_model
from edkm_cli.export.formats.options import Options
from edkm_cli.export.formats.rows import require_fit
from edkm_cli.export.ownership import input_paths
from edkm_cli.export.parity import Parity, require_parity, require_same_perplexity
from edkm_cli.export.source import Compressed
from edkm_cli.format import write_json
from edkm_cli.hf import load
from edkm_cli.progress import Track, no_progress
from edkm_cli.targets import TARGETS

RECORD = "export.json"
_SPARE_BYTES = 50_000_000


def export_model(
    directory: str | Path,
    to: str,
    output: str | Path,
    *,
    options: Options,
    overwrite: bool = False,
    track: Track = no_progress,
) -> dict[str, Any]:
    """Write a checkpoint in another format and return the result (its keys: docs/results.md).

    The export is written beside its place, read back, compared with the source weight by weight, and moved into place if
    it is the same. With `options.verify` `perplexity` both are measured as well.

    Raises UserError for what the format cannot hold, before any work, and for an export that differs from its source; then
    nothing is left behind.
    """
    form = find(to)
    begin = time.perf_counter()
    source = Compressed(directory, trust_remote_code=options.trust_remote_code)
    if to != "dense" and (source.spec.split_experts or source.spec.module_granularity):
        what = "packed experts" if source.spec.split_experts else "matrices that differ in granularity"
        raise UserError(f"--to {to} holds no {what}, but {directory} has some; use --to dense")
    if to in TARGETS:
        require_fit(to, source)
    form.check(source, options)
    tokens = _tokens(source, options.data) if options.verify == "perplexity" else None
    inputs = [*input_paths("DIRECTORY", directory), *input_paths("--data", options.data)]
    with OutputDirectory(output, inputs=inputs, overwrite=overwrite) as place:
        place.rehearse(form.needed_bytes(source, options) + _SPARE_BYTES)
        folder = place.begin()
        try:
            place.mark({"format": to, "source": str(source.directory)})
            form.write(source, folder, options, track)
            parity = require_parity(source, folder, form, options, track=track)
            measured = None
            if tokens is not None:
                measured = _perplexities(source, folder, form, options, parity, tokens, track)
            facts = {"format": to, **form.facts(source, options), **asdict(parity), "versions": versions()}
            write_json(folder / RECORD, facts)
            place.commit()
        except BaseException:
            place.discard()
            raise
    return {
        "source": str(source.directory),
        "output": str(place.path),
        **facts,
        **({"perplexity": measured, "data": options.data} if measured else {}),
        "weights_bytes": sum(
            file.stat().st_size for file in place.path.rglob("*") if file.suffix in (".safetensors", ".bin", ".gguf")
        ),
        "seconds": round(time.perf_counter() - begin, 3),
    }


def _tokens(source: Compressed, data: str) -> Tensor:
    """The text that perplexities are measured on, read before the work."""
    late = models.LateTokenizer(models.resolve(str(source.directory)), trust_remote_code=source.trust_remote_code)
    return texts.tokenize(texts.load_documents(texts.parse_source(data), tokenizer=late), late.tokenizer)


def _perplexities(
    source: Compressed, folder: Path, form: Any, options: Options, parity: Parity, tokens: Tensor, track: Track
) -> dict[str, float]:
    """Of the source and of the export read back, both in float32; one of them in memory at a time."""
    trust = options.trust_remote_code
    windows: dict[str, Any] = {"context": options.context, "max_windows": options.max_windows, "track": track}

    def measure(name: str, model: Any) -> float:
        return perplexity(model, tokens, description=f"perplexity, {name}", **windows).perplexity

    figures = {"source": measure("source", load(source.directory, dtype=torch.float32, trust_remote_code=trust))}
    if hasattr(form, "load"):
        exported = form.load(folder, source, options)
    else:
        exported = read_model(folder, form.read(folder, options), trust_remote_code=trust)
    figures["export"] = measure("export", exported)
    require_same_perplexity(figures["source"], figures["export"], exact=not parity.rounded)
    return figures
