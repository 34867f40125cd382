"""The formats of `edkm export`, one module each, found by name.

A format is a module with these functions; `source` is the compressed checkpoint (`edkm_cli.export.source.Compressed`) and
`options` what the command was given (`edkm_cli.export.formats.options.Options`):

    check(source, options)            raises UserError, before any work, for what the format cannot hold, with the options
                                      of `edkm compress` that would fit; limits of its target have been checked. Called
                                      before that compresses, too: with what will be there (`Described`), and no options
    needed_bytes(source, options)     disk that the export takes, about
    write(source, folder, options, track)
                                      write the export into an empty folder, one tensor after another
    read(folder, options)             yield (name in the dense model, float32 tensor) of an export, by the format's own
                                      rules: nothing of the writer is used
    stated(source, name, options)     (the tensor that `read` must give, the same before the format's rounding)
    load(folder, options)             a float32 causal LM with what the export holds, to measure its perplexity; a format
                                      without this function has the dense model filled with what `read` gives
    facts(source, options)            what export.json says of the format, a map

A format that is a Hugging Face directory has a few of them, or `entries` and `settings`, of which
`edkm_cli.export.formats.folder.FolderFormat` makes the rest.
"""

from importlib import import_module
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.targets import TARGETS

FORMATS = ("dense", *dict.fromkeys(target.form or name for name, target in TARGETS.items()))


def find(name: str) -> Any:
    """The module of a format, by its name or that of one of its targets. Raises UserError for any other name."""
    form = (TARGETS[name].form or name) if name in TARGETS else name
    if form not in FORMATS:
        raise UserError(f"--to must be one of {', '.join(dict.fromkeys((*FORMATS, *TARGETS)))}, got {name!r}")
    if hasattr(module := import_module(f"{__name__}.{form.replace('-', '_')}"), "needed_bytes"):
        return module
    from edkm_cli.export.formats.folder import FolderFormat

    return FolderFormat(form, module)
