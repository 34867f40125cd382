"""Texts and data sets -> batches of tokens.

    sources    a name                    -> what it stands for: files, a set of the hub, a text that is on every machine
    reading    files                     -> parts: some records, or lines of a running text; `hub`: likewise of a set
    splits     parts                     -> what is trained on, what is measured
    records    a record                  -> documents, with the answers in them
    encode     documents                 -> tokens, and which of them are learnt; `marks`: where the same text is elsewhere
    store      tokens                    -> flat files; `cache`: made once by several processes
    blocks     stores of tokens          -> sequences -> batches

`training` is the door to what is trained on and what is measured.
"""

from edkm_cli.data.blocks import Batch, Blocks
from edkm_cli.data.sources import BUILTIN, Source, parse_source, parse_sources
from edkm_cli.data.store import TokenStore, store_of
from edkm_cli.data.training import TrainingData, characters_of, load_documents, open_training_data, tokenize
