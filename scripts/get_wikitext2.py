"""WikiText-2 as the two files of the README's table, from the Hugging Face hub (CC BY-SA 3.0; needs the network).

    python scripts/get_wikitext2.py [DIRECTORY]        writes wikitext2-test.raw and wikitext2-valid.tokens.txt

The files hold the rows of the data set Salesforce/wikitext: the test split of wikitext-2-raw-v1, on which perplexity is
measured, and the validation split of wikitext-2-v1 (words, rare ones as <unk>), which calibrates and trains. An empty row
becomes an empty line, and edkm reads the files as these very rows again. Both are compared with the text that the
recorded figures were measured on.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

# file -> (configuration, split, sha256 of all rows one after the other)
FILES = {
    "wikitext2-test.raw": (
        "wikitext-2-raw-v1",
        "test",
        "bbf94c53a05abe9ee670d3b6343608095822c85e26de37c70b24fc571964574a",
    ),
    "wikitext2-valid.tokens.txt": (
        "wikitext-2-v1",
        "validation",
        "a3c995f97e3c638c50876bdfe8a82b0aa5113355f3e71d9c0f82eb37eba0812b",
    ),
}


def rows_digest(rows: Iterable[str]) -> str:
    """sha256 of the rows' text in UTF-8; empty rows, which edkm also reads from blank lines, add nothing."""
    return hashlib.sha256("".join(rows).encode("utf-8")).hexdigest()


def write_rows(rows: Iterable[str], path: Path) -> None:
    """Write rows as lines: each keeps the newline it ends with, an empty row becomes an empty line."""
    partial = path.with_name(path.name + ".part")
    partial.write_text("".join(row or "\n" for row in rows), encoding="utf-8", newline="\n")
    os.replace(partial, path)


def main(directory: Path) -> None:
    if not directory.is_dir():
        sys.exit(f"get_wikitext2.py: {directory} is not a directory; make it first")
    import datasets

    for name, (configuration, split, digest) in FILES.items():
        rows = datasets.load_dataset("Salesforce/wikitext", configuration, split=split)["text"]
        write_rows(rows, directory / name)
        same = rows_digest(rows) == digest
        print(f"{directory / name}: {len(rows):,} rows" + ("" if same else ", NOT the text of the recorded figures"))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
