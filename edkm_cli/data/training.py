"""The texts of a run: sources to train on, each as a store of tokens, what a report says of them, and what is measured, a
source as one text, tokenized once, as the perplexity protocol asks."""

import filecmp
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edkm_cli.allocator import return_free_blocks
from edkm_cli.config import TextSettings
from edkm_cli.data.blocks import Blocks
from edkm_cli.data.cache import Say, cached_store, memory_store
from edkm_cli.data.encode import Encoder, split_long
from edkm_cli.data.marks import looked_for
from edkm_cli.data.reading import refusing
from edkm_cli.data.records import render
from edkm_cli.data.sources import PROSE, Source, repeated
from edkm_cli.data.splits import ALL, TEST, TRAIN, WHOLE_BYTES, is_whole, read_split, size_of, streams
from edkm_cli.data.store import FORMAT, TokenStore
from edkm_cli.errors import UserError

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
_COMPARED_TOKENS = 20_000_000  # of what is streamed
_REPORT_SECONDS = 20.0  # between two lines on how far tokenizing is


@dataclass(frozen=True)
class TrainingData:
    """Sources as stores of tokens, in the order they were named."""

    sources: Sequence[Source]
    stores: Sequence[TokenStore]
    options: TextSettings

    @property
    def weights(self) -> list[float] | None:
        weights = [source.weight for source in self.sources]
        return [weight for weight in weights if weight is not None] if None not in weights else None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.stores))

    @property
    def sha256(self) -> str:
        """A digest of all tokens, masks and shares, for a run's identity."""
        parts = [store.sha256 for store in self.stores] + [repr(self.weights)]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def with_written(self, written: TokenStore) -> "TrainingData":
        """The same with the text of the sources that the model writes itself."""
        pairs = zip(self.sources, self.stores, strict=True)
        return replace(self, stores=[written if source.needs_model else store for source, store in pairs])

    def blocks(self, sequence_length: int, *, seed: int) -> Blocks:
        """The sequences of training."""
        layout: dict[str, Any] = {"packing": self.options.packing, "long_records": self.options.long_records}
        return Blocks(self.stores, sequence_length, seed=seed, weights=self.weights, **layout)

    def calibration_batches(self, length: int, *, limit: int, seed: int) -> list[Tensor]:
        """The first sequences (1, `length`) of running text, whatever the options say, in an order of the seed: together at
        most `limit` tokens, at least one sequence. Sources with weights have their shares of them, exactly."""
        weights = self.weights
        length = min(length, max(limit, 2), self.tokens if weights is None else min(map(len, self.stores)))
        count = max(1, min(self.tokens // length, limit // length))
        blocks = Blocks(self.stores, length, seed=seed, weights=weights, cycle=count)
        return [blocks.batch(index, 1) for index in range(count)]

    def all_tokens(self) -> Tensor:
        """Every token in memory, (tokens,) int64: for small data only."""
        return torch.cat([torch.from_numpy(store.ids(0, len(store))) for store in self.stores])

    def highest_token(self) -> int:
        """The greatest id of a token; 0 where there is none."""
        parts = ((store, at) for store in self.stores for at in range(0, len(store), 1 << 24))
        return max((int(store.ids(at, min(at + (1 << 24), len(store))).max()) for store, at in parts), default=0)

    def summary(self, blocks: Blocks) -> dict[str, Any]:
        """What became of the data: of each source what was read, learnt, masked and left out, and `Blocks.counts`."""
        rows = []
        for source, store in zip(self.sources, self.stores, strict=True):
            weight = {} if source.weight is None else {"weight": source.weight}
            rows.append({"name": source.name, **asdict(store.counts), **weight})
        return {"sources": rows, **blocks.counts()}

    def overlap(self, documents: list[str]) -> tuple[int, int]:
        """(how many of a measured text's documents and passages are trained on, of how many looked for)."""
        sampled = all(store.sampled for store in self.stores)  # then no other can be found
        wanted = looked_for(documents, sampled=sampled)
        seen = np.zeros(wanted.shape, bool)
        for store in self.stores:
            if len(store.marks) and len(wanted):
                seen |= store.marks[np.minimum(np.searchsorted(store.marks, wanted), len(store.marks) - 1)] == wanted
        return int(seen.any(1).sum()), len(wanted)


def overlaps(trained: TrainingData, measured: Mapping[str, list[str]], *, say: Say) -> dict[str, tuple[int, int]]:
    """Of each measured text, by name, how many of its documents and lines are trained on, too, and of how many; a warning
    is said of each that has some."""
    shared = {name: trained.overlap(documents) for name, documents in measured.items()}
    for name, (trained_on, of) in shared.items():
        if trained_on:
            both = f"{trained_on} of {of} documents and lines of {name}, on which perplexity is measured"
            worse = "the perplexity will look better than it is; take them out of one of the two"
            say(f"WARNING: {both}, are in the training data, too: {worse}")
    return shared


def open_training_data(
    sources: Sequence[Source],
    tokenizer: Any,
    *,
    options: TextSettings = TextSettings(),  # noqa: B008 - frozen
    token_limit: int | None = None,
    written: TokenStore | None = None,
    say: Say = lambda text: None,
) -> TrainingData:
    """Read and tokenize the training part of every source: small ones into memory, large ones into the cache.

    Args:
        token_limit: how many tokens the run needs; a data set of the hub that is streamed is read no further.
        written: what stands for the text that the model writes itself (`Source.needs_model`).

    Raises UserError where a source is missing, damaged, empty or of no known kind, or holds nothing to learn.
    """
    for name, twice in repeated(sources).items():
        say(f"WARNING: {twice} is read more than once, by --data {name}, too; give it once, with a weight")
    stores = []
    total = sum(source.weight or 1.0 for source in sources)
    for source in sources:
        if source.needs_model:
            if written is None:
                raise UserError(f"{source} is text that the model writes, which only `edkm compress` can do")
            stores.append(written)
            continue
        limit = math.ceil(token_limit * source.weight / total) if token_limit and source.weight else token_limit
        store = _open(source, tokenizer, options, limit, say)
        if not len(store) or not store.counts.trained:
            rule = f"{source} has nothing to learn: {store.counts.documents} documents with text, {store.counts.empty}"
            raise UserError(f"{rule} records without text or answer; give another source, or --train-on all")
        stores.append(store)
    return TrainingData(sources, stores, options)


def _open(source: Source, tokenizer: Any, options: TextSettings, token_limit: int | None, say: Say) -> TokenStore:
    whole = is_whole(source)
    sampled = not whole and (source.kind != "files" or size_of(source) > WHOLE_BYTES)
    encoder = Encoder(tokenizer, options, sampled=sampled)
    if whole:
        return memory_store(read_split(source, TRAIN, options), encoder)
    settings: dict[str, Any] = {
        "store": FORMAT,
        "source": source_identity(source),
        "tokenizer": tokenizer_sha256(tokenizer),
        "encoding": {"column": options.data_column, "train_on": options.train_on},
        "reading": {"column": options.data_column, "streaming": options.streaming},
        "sampled": sampled,
        "token_limit": token_limit if streams(source, options) else None,
    }

    def parts() -> Any:
        say(f"tokenizing {source.name}, once")
        reported, read = time.monotonic(), 0
        for part in read_split(source, TRAIN, options):
            yield part
            read += part.size
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                say(f"tokenizing {source.name}: {read / 1e6:,.0f} MB so far")
        _require_same(source, settings["source"])

    return cached_store(settings, parts, encoder, options, say)


@contextmanager
def unchanged(sources: Sequence[Source]) -> Iterator[None]:
    """Inside, sources are read more than once (what is trained on, what is measured). Raises UserError at the end where
    the files of one are not what they were at the beginning."""
    before = [source_identity(source) for source in sources]
    yield
    for source, identity in zip(sources, before, strict=True):
        _require_same(source, identity)


def _require_same(source: Source, identity: dict[str, Any]) -> None:
    if source_identity(source) != identity:
        raise UserError(f"{source} changed while it was read; start again when it is whole")


def source_identity(source: Source) -> dict[str, Any]:
    """What tells one state of a source from another: of files their names, sizes, times and samples of their bytes."""
    folder, files = Path(source.repository or ""), []  # on this machine, it has the hub's layout
    here = sorted(folder.rglob("[!.]*")) if source.repository and folder.is_dir() else []
    for path in source.files or [path for path in here if path.is_file() and "/." not in str(path.relative_to(folder))]:
        samples = hashlib.sha256()
        with refusing(source.option, path), open(path, "rb") as file:
            facts = path.stat()
            for index in range(_SAMPLES):
                file.seek(facts.st_size * index // _SAMPLES)
                samples.update(file.read(_SAMPLE_BYTES))
        files.append([str(path.absolute()), facts.st_size, facts.st_mtime_ns, samples.hexdigest()])
    return {"repository": source.repository, "config": source.config, "split": source.split, "files": files}


def tokenizer_sha256(tokenizer: Any) -> str:
    """A digest of all that decides what a tokenizer makes of a text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = [
        type(tokenizer).__name__,
        backend.to_str() if backend is not None else repr(sorted(tokenizer.get_vocab().items())),
        repr(tokenizer.chat_template),
        repr(sorted((name, str(value)) for name, value in tokenizer.special_tokens_map.items())),
        repr(list(tokenizer("a b")["input_ids"])),
    ]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "replace")).hexdigest()


def training_tokens(sources: Sequence[Source], tokenizer: Any) -> Tensor:
    """The training parts of all sources in memory, one after the other, (tokens,) int64: for comparisons, which read all of
    it, but 20 million tokens of what is streamed. Raises UserError for sources with weights, too."""
    if any(source.weight is not None for source in sources):
        raise UserError("a comparison reads all of its --data, which therefore takes no weights; leave them out")
    return open_training_data(sources, tokenizer, token_limit=_COMPARED_TOKENS).all_tokens()


def characters_of(tokens: int | None) -> int | None:
    """How many characters hold so many tokens of any text; None for all of it."""
    return None if tokens is None else 20 * tokens


def load_documents(
    source: Source,
    split: str | None = None,
    *,
    tokenizer: Any = None,
    options: TextSettings = TextSettings(),  # noqa: B008 - frozen
    characters: int | None = None,
) -> list[str]:
    """The documents (files, pages, records) of a source's `train`, `test` (held out) or `all`; None: what is measured.

    Args:
        tokenizer: its chat template renders conversations; needed for those only.
        characters: read no more of a source that is larger than memory should hold.

    Raises UserError where the source is missing, empty, not UTF-8 or of no known kind, or is measured and has a weight.
    """
    if split is None:
        if source.weight is not None:
            raise UserError(f"{source} is measured, which takes no weight; leave out ={source.weight:g}")
        split = measured_split(source)
    texts: list[str] = []
    for part in read_split(source, split, options):
        for number, record in enumerate(part.load()):
            column = options.data_column if isinstance(record, Mapping) and options.data_column in record else None
            documents = render(record, part.place(number), tokenizer=tokenizer, column=column, whole=True)
            if part.continues and texts:
                texts[-1] += documents[0].text
            else:
                texts += [document.text for document in documents]
        if characters is not None and sum(map(len, texts)) > max(characters, WHOLE_BYTES):
            break
    if not any(text.strip() for text in texts):
        raise UserError(f"{source.option} must hold text, but {source.name} has none; give a source with text")
    return texts


def measured_split(source: Source) -> str:
    """What of an `--eval-data` is measured: local files, `builtin-prose` and splits that it names as a whole, else what a
    data set has for measuring, or what is held out of it."""
    return ALL if source.kind == "files" or source.split is not None or source.name == PROSE else TEST


def require_held_out(trained: Sequence[Source], measured: Source) -> None:
    """Raises UserError where a text to be measured is one that is trained on: the same file, a copy of it under another
    name, or the same split."""
    for source in trained:
        both, by_size = set(), defaultdict(list)
        for other in source.files:
            with refusing(measured.option, other):
                by_size[other.stat().st_size].append(other)
        for mine in measured.files:
            with refusing(measured.option, mine):
                others = by_size[size := mine.stat().st_size]
                if any(mine.samefile(one) or (size > 0 and filecmp.cmp(mine, one, shallow=False)) for one in others):
                    both.add(mine.resolve())
        same_split = source.kind == measured.kind == "hub" and measured.split is not None
        same_split = same_split and (source.repository, source.config) == (measured.repository, measured.config)
        same_prose = source.name == measured.name == PROSE
        if both or same_prose or (same_split and measured.split == (source.split or "train")):
            what = str(min(both)) if both else measured.name
            rule = f"{measured.option} must not be trained on, but {what} is in {source}, too; leave it out (a part of"
            raise UserError(f"{rule} the first --data is held out for it), or name another text")


def tokenize(documents: list[str], tokenizer: Any) -> Tensor:
    """Token ids of the whole text, (tokens,) int64, a blank line between documents: tokenized once, as the perplexity
    protocol asks; a text of more than WHOLE_BYTES characters in pieces. Raises UserError where it has less than two."""
    text = "\n\n".join(documents)
    pieces = [text] if len(text) <= WHOLE_BYTES else split_long(text)
    first = "" if text.startswith(tokenizer.bos_token or "\0") else pieces[0]  # what a template began has its BOS
    rows = [tokenizer(piece, verbose=False, add_special_tokens=piece is first)["input_ids"] for piece in pieces]
    ids = torch.cat([torch.tensor(row, dtype=torch.int64) for row in rows])
    return_free_blocks()
    if len(ids) < 2:
        raise UserError(f"perplexity needs at least 2 tokens of text, got {len(ids)}; give more --data")
    return ids
