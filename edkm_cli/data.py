"""Text -> token blocks: the hub's data sets, local files, or the English text that every Python carries."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.allocator import return_small_blocks
from edkm_cli.config import UserError

BUILTIN, WIKITEXT2, ALPACA = "builtin", "wikitext2", "alpaca"
HELD_OUT_FRACTION = 0.1
_SUFFIXES = (".txt", ".raw", ".jsonl", ".json", ".parquet")
_ALPACA_PROMPT = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}{input}\n\n### Response:\n{output}"
)


@dataclass(frozen=True)
class Documents:
    """A text as its documents (pages, records) and what joins them when it is tokenized as a whole."""

    documents: list[str]
    separator: str

    def text(self) -> str:
        return self.separator.join(self.documents)


def alpaca_text(record: dict[str, Any]) -> str:
    """An Alpaca record with the prompt of its authors.

    >>> print(alpaca_text({"instruction": "Name a colour.", "output": "Blue."}))
    Below is an instruction that describes a task. Write a response that appropriately completes the request.
    <BLANKLINE>
    ### Instruction:
    Name a colour.
    <BLANKLINE>
    ### Response:
    Blue.
    """
    given = record.get("input") or ""
    return _ALPACA_PROMPT.format(
        with_input=", paired with an input that provides further context" if given else "",
        instruction=record["instruction"],
        input=f"\n\n### Input:\n{given}" if given else "",
        output=record.get("output", ""),
    )


def _record_text(record: Any, where: str) -> str:
    if isinstance(record, str):
        return record
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return record["text"]
    if isinstance(record, dict) and isinstance(record.get("instruction"), str):
        return alpaca_text(record)
    raise UserError(
        f"a record must be a string, or have 'text', or Alpaca's 'instruction' and 'output'; not so {where}"
    )


def wikitext_rows(text: str) -> list[str]:
    """The rows of the Hugging Face data set from a raw file: a non-blank line keeps its newline, a blank one is ''.

    >>> wikitext_rows("A title\\n\\nA paragraph.\\n")
    ['A title\\n', '', 'A paragraph.\\n']
    """
    return [line if line.strip() else "" for line in io.StringIO(text, newline="\n")]


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"--data must be UTF-8 text, but {path} is not (byte {error.start}); convert it first"
        ) from error
    if not text.strip():
        raise UserError(f"--data must hold text, but {path} is empty; give a file with text")
    return text


def _local(path: Path) -> Documents:
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise UserError(f"--data files must end in {', '.join(_SUFFIXES)}, got {path}")
    if not path.is_file():
        raise UserError(f"--data names a file that does not exist: {path}; check the path")
    if suffix == ".parquet":
        return _parquet(path)
    text = _read(path)
    if suffix in (".txt", ".raw"):
        return Documents(wikitext_rows(text), "\n\n")
    try:
        if suffix == ".jsonl":
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            records = json.loads(text)
    except ValueError as error:
        raise UserError(f"--data must be valid {suffix[1:]}, but {path} is not ({error}); mend the file") from error
    if not isinstance(records, list) or not records:
        raise UserError(f"--data must be a list of records that is not empty, but {path} is not one")
    return Documents([_record_text(record, f"in {path}, record {i}") for i, record in enumerate(records)], "\n\n")


def _parquet(path: Path) -> Documents:
    try:
        import pyarrow.parquet

        records = pyarrow.parquet.read_table(path).to_pylist()
    except ImportError as error:
        raise UserError("reading .parquet needs pyarrow, which is not installed; pip install datasets") from error
    except Exception as error:
        raise UserError(f"--data must be a parquet file, but {path} cannot be read ({error})") from error
    documents = [_record_text(record, f"in {path}, row {i}") for i, record in enumerate(records)]
    if not any(document.strip() for document in documents):
        raise UserError(f"--data must hold text, but {path} has none")
    return Documents(documents, "\n\n")


def _hub(name: str, split: str) -> Documents:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--data {name} needs the package datasets, which is not installed; pip install datasets"
        ) from error
    location = {WIKITEXT2: ("Salesforce/wikitext", "wikitext-2-raw-v1"), ALPACA: ("tatsu-lab/alpaca", None)}[name]
    try:
        rows = datasets.load_dataset(location[0], location[1], split=split)
    except Exception as error:
        raise UserError(
            f"--data {name} could not be loaded from the Hugging Face hub ({type(error).__name__}); check the network, "
            "or give a local file or 'builtin'"
        ) from error
    if name == ALPACA:
        return Documents([alpaca_text(record) for record in rows], "\n\n")
    return Documents(list(rows["text"]), "\n\n")


def _builtin() -> Documents:
    from pydoc_data.topics import topics

    return Documents([topics[name] for name in sorted(topics)], "\n\n")


def load_documents(name: str, split: str) -> Documents:
    """A data set's documents; `split` is `train` (nine tenths), `test` (the last tenth) or `all`.

    `wikitext2` has splits of its own; of everything else the last tenth of the documents is held out for evaluation.
    Raises UserError where the data is missing, empty, not UTF-8 or not of a known kind.
    """
    if name == WIKITEXT2:
        return _hub(name, {"train": "train", "test": "test", "all": "test"}[split])
    if name == BUILTIN:
        whole = _builtin()
    elif name == ALPACA:
        whole = _hub(name, "train")
    elif Path(name).suffix:
        whole = _local(Path(name).expanduser())
    else:
        raise UserError(
            f"--data must be {WIKITEXT2}, {ALPACA}, {BUILTIN} or a file ({', '.join(_SUFFIXES)}), got {name!r}"
        )
    if split == "all":
        return whole
    cut = _held_out_start(whole.documents)
    kept = whole.documents[:cut] if split == "train" else whole.documents[cut:]
    if not kept:
        raise UserError(f"--data {name} must have at least two documents or lines, got {len(whole.documents)}")
    return Documents(kept, whole.separator)


def _held_out_start(documents: list[str]) -> int:
    """The first document of the last tenth, by characters; at least one stays on each side where there are two."""
    left = (1 - HELD_OUT_FRACTION) * sum(map(len, documents))
    for index, document in enumerate(documents):
        left -= len(document)
        if left < 0:
            return max(index, 1) if len(documents) > 1 else index
    return len(documents)


def tokenize(documents: Documents, tokenizer: Any) -> Tensor:
    """Token ids of the whole text, (tokens,) int64, tokenized once as the perplexity protocol asks."""
    tokens = torch.tensor(tokenizer(documents.text(), verbose=False)["input_ids"], dtype=torch.int64)
    return_small_blocks()
    return tokens


def training_tokens(names: list[str], tokenizer: Any) -> Tensor:
    """The training splits of all data sets, one after the other, documents of records parted by end-of-sequence."""
    parts = []
    for name in names:
        documents = load_documents(name, "train")
        if Path(name).suffix in (".json", ".jsonl", ".parquet") or name == ALPACA:
            documents = Documents(documents.documents, tokenizer.eos_token or "\n\n")
        parts.append(tokenize(documents, tokenizer))
    return torch.cat(parts)


class Blocks:
    """Consecutive blocks of `sequence_length` tokens in a seeded order; a stateless sampler.

    Batch number i is a function of (seed, i) alone, so a resumed run sees the very batches it would have seen.
    """

    def __init__(self, tokens: Tensor, sequence_length: int, *, seed: int):
        count = tokens.numel() // sequence_length
        if count == 0:
            raise UserError(
                f"training data must have at least {sequence_length} tokens (one sequence), got {tokens.numel()}; "
                "give more --data or a smaller --sequence-length"
            )
        self.blocks = tokens[: count * sequence_length].view(count, sequence_length)
        self._seed = seed

    def __len__(self) -> int:
        return len(self.blocks)

    def batch(self, index: int, batch_size: int) -> Tensor:
        """Batch `index`, (batch_size, sequence_length); each pass over the data has its own permutation."""
        picks = []
        for position in range(index * batch_size, (index + 1) * batch_size):
            epoch, offset = divmod(position, len(self.blocks))
            picks.append(int(self._permutation(epoch)[offset]))
        return self.blocks[picks]

    def _permutation(self, epoch: int) -> Tensor:
        if getattr(self, "_cached_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order, self._cached_epoch = torch.randperm(len(self.blocks), generator=generator), epoch
        return self._order
