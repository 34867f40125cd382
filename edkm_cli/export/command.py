"""`edkm export`: a compressed checkpoint in the format of another runtime, read back and compared before it appears.

An export that loads and is silently wrong is worse than none: read back by its own rules, it must be the source, tensor by
tensor. A format's `read` knows nothing of its `write`, so a wrong order of rows, tiles or bits, a lost bias or a damaged
table shows as a tensor that differs.
"""

import time
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
from edkm_cli.export.formats.folder import read_model, require_fit
from edkm_cli.export.formats.options import Options
from edkm_cli.export.ownership import remove, run_paths
from edkm_cli.export.source import Compressed
from edkm_cli.files import write_json
from edkm_cli.hf import LateTokenizer, load
from edkm_cli.progress import Track, no_progress
from edkm_cli.runtime.experts import apart

RECORD = "export.json"
_ONLY_OF = {"sequence_length": "coreml", "cache": "coreml", "base_gguf": "gguf"}


def export_model(
    directory: Path, to: str, output: Path, *, options: Options, overwrite: bool = False, track: Track = no_progress
) -> dict[str, Any]:
    """Write a checkpoint in another format and return the result (its keys: docs/results.md).

    The export is written beside its place, read back, compared with the source weight by weight, and moved into place if
    it is the same. With `options.verify` `perplexity` both are measured as well.

    Raises UserError for what the format cannot hold, before any work, and for an export that differs from its source; then
    nothing is left behind.
    """
    form = find(to)
    for name, of in _ONLY_OF.items():
        if to.partition(":")[0] != of and getattr(options, name) != getattr(Options, name):
            raise UserError(f"{name} is for --to {of}, but not for --to {to}; leave it out")
    begin = time.perf_counter()
    source = Compressed(directory, trust_remote_code=options.trust_remote_code)
    if to != "dense":
        require_fit(to, source)
    form.check(source, options)
    written = form.facts(source, options).get("dtype", "number formats of its own")
    if options.dtype not in ("auto", written):
        raise UserError(f"--to {to} writes {written}, whatever --dtype {options.dtype} says; leave it out")
    tokens = None
    if options.verify == "perplexity":  # the text is read before the work
        late = LateTokenizer(models.resolve(str(source.directory), trust_remote_code=source.trust_remote_code))
        tokens = texts.tokenize(texts.load_documents(texts.parse_source(options.data), tokenizer=late), late.tokenizer)
    with OutputDirectory(output, inputs=run_paths(options, "DIRECTORY", directory), overwrite=overwrite) as place:
        place.rehearse(form.needed_bytes(source, options))
        folder = place.begin()
        try:
            place.mark({"format": to, "source": str(source.directory)})
            form.write(source, folder, options, track)
            parity = require_parity(source, folder, form, options, track=track)
            measured = {}
            if tokens is not None:
                figures = _perplexities(source, folder, form, options, tokens, track)
                require_same_perplexity(figures["source"], figures["export"], exact=not parity["rounded"])
                measured = {"perplexity": figures, "data": options.data}
            facts = {"format": to, **form.facts(source, options), **parity, "versions": versions()}
            write_json(folder / RECORD, facts)
        except BaseException:
            remove(place.partial)
            raise
        place.commit()
    files = (file for file in place.path.rglob("*") if file.suffix in (".safetensors", ".bin", ".gguf"))
    return {
        "source": str(source.directory),
        "output": str(place.path),
        **facts,
        **measured,
        "weights_bytes": sum(file.stat().st_size for file in files),
        "seconds": round(time.perf_counter() - begin, 3),
    }


def _perplexities(
    source: Compressed, folder: Path, form: Any, options: Options, tokens: Tensor, track: Track
) -> dict[str, float]:
    """Of the source and of the export read back, both in float32; one of them in memory at a time."""
    trust = options.trust_remote_code
    windows: dict[str, Any] = {"context": options.context, "max_windows": options.max_windows, "track": track}

    def measure(name: str, model: Any) -> float:
        return perplexity(model, tokens, description=f"perplexity, {name}", **windows).perplexity

    figures = {"source": measure("source", load(source.directory, dtype=torch.float32, trust_remote_code=trust))}
    if hasattr(form, "load"):
        exported = form.load(folder, options)
    else:
        described = folder if (folder / "config.json").is_file() else source.directory
        exported = read_model(described, form.read(folder, options), trust_remote_code=trust)
    return {**figures, "export": measure("export", exported)}


def require_parity(
    source: Compressed, folder: Path, form: Any, options: Options, *, track: Track = no_progress
) -> dict[str, Any]:
    """Compare an export with its source: the number of `tensors`, those of them `rounded` as the format states, and the
    `largest_difference` of any number from the source's.

    Raises UserError naming the first tensor that differs, lacks or is too many.
    """
    missing, changed, largest = dict(source.tensors), 0, 0.0
    tensors = apart(source.model, form.read(folder, options))
    for name, read_back in track(tensors, "comparing with the source", len(missing)):
        if name not in missing:
            raise _drift(name, "is in the export and not in the source, or twice")
        del missing[name]
        wanted, exact = form.stated(source, name, options)
        if read_back.shape != wanted.shape:
            raise _drift(name, f"is {tuple(read_back.shape)} in the export, and {tuple(wanted.shape)} in the source")
        if not torch.equal(read_back, wanted):
            wrong = read_back != wanted
            place = tuple(int(index) for index in wrong.nonzero()[0])
            numbers = f"{float(read_back[place]):g} instead of {float(wanted[place]):g}"
            what = f"differs from the source in {int(wrong.sum())} of {wrong.numel()} numbers"
            raise _drift(name, f"{what}, first at {place}: {numbers}")
        difference = float((read_back - exact).abs().max()) if read_back.numel() else 0.0
        changed, largest = changed + (difference > 0), max(largest, difference)
    if missing:
        raise _drift(next(iter(missing)), "is in the source, but not in the export")
    return {"tensors": len(source.tensors), "rounded": changed, "largest_difference": largest}


def _drift(name: str, what: str) -> UserError:
    return UserError(f"the export must read back as its source, but {name} {what}; nothing was kept, please report it")


# Both models multiply the same numbers; where the format rounds some, the perplexity may move in its third digit.
_EXACT, _ROUNDED = 1e-4, 1e-2


def require_same_perplexity(source: float, export: float, *, exact: bool) -> None:
    """Raises UserError where an export's perplexity is not its source's, to four digits if nothing was rounded."""
    limit = _EXACT if exact else _ROUNDED
    if not abs(export - source) <= limit * source:
        rule = f"the export must have its source's perplexity within {limit:.2%}, but has {export:.5f} and the source"
        raise UserError(f"{rule} {source:.5f}; nothing was put in place, please report it")
