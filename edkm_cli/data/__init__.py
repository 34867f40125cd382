"""Texts and data sets -> batches of tokens.

`sources` says what a name stands for, `splits` what of it is trained on and what is measured, `reading` and `hub` read
records, `records` and `chat` make text of them and find the answers in it, `encode` makes tokens, `marks` tell where the
same text is elsewhere, `store` and `cache` keep all of it, `layout` and `blocks` make sequences and batches, `training`
puts it together; `text` has the texts that are measured.
"""

from edkm_cli.data.blocks import Batch, Blocks
from edkm_cli.data.reading import wikitext_rows
from edkm_cli.data.sources import ALPACA, BUILTIN, SELF, WIKITEXT2, DataOptions, Source, parse_source, parse_sources
from edkm_cli.data.store import TokenStore
from edkm_cli.data.text import Documents, load_documents, measured_split, require_apart, tokenize
from edkm_cli.data.training import (
    TrainingData,
    open_training_data,
    overlaps,
    training_tokens,
    unchanged,
)

__all__ = [
    "ALPACA",
    "BUILTIN",
    "SELF",
    "WIKITEXT2",
    "Batch",
    "Blocks",
    "DataOptions",
    "Documents",
    "Source",
    "TokenStore",
    "TrainingData",
    "load_documents",
    "measured_split",
    "open_training_data",
    "overlaps",
    "parse_source",
    "parse_sources",
    "require_apart",
    "tokenize",
    "training_tokens",
    "unchanged",
    "wikitext_rows",
]
