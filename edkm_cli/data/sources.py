"""What `--data` and `--eval-data` name: a built-in text, a data set of the hub, or local files. Nothing is read here."""

import glob
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edkm_cli.errors import UserError
from edkm_cli.settings import ready_file

BUILTIN, PROSE, WIKITEXT2, ALPACA, SELF = "builtin", "builtin-prose", "wikitext2", "alpaca", "self"
EVERYTHING = "all"  # of records is learnt, not the answers alone
SPLIT, DROP = "split", "drop"  # what becomes of documents longer than a sequence
# Short names: (repository, configuration) on the hub.
NAMED = {
    WIKITEXT2: ("Salesforce/wikitext", "wikitext-2-raw-v1"),
    ALPACA: ("tatsu-lab/alpaca", None),
    "c4": ("allenai/c4", "en"),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT"),
}
TEXTS = (".txt", ".raw", ".tokens")  # all others hold records
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", *TEXTS)
_COMPRESSED = (".gz", ".zst")
_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # what `datasets` writes
_HUB = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(:(?P<config>[^@:=]+))?(@(?P<split>[^@=]+))?")


@dataclass(frozen=True)
class Source:
    """One text or data set. `files` are sorted; `repository`, `config` and `split` are the hub's; `weight` is the share
    of training sequences it was asked for, None where none was; `option` is the one that named it."""

    name: str
    kind: str  # "builtin", "files", "hub" or "self"
    files: tuple[Path, ...] = ()
    repository: str = ""
    config: str | None = None
    split: str | None = None
    weight: float | None = None
    option: str = "--data"

    def __str__(self) -> str:
        """As errors name it: `--data a.txt`."""
        return f"{self.option} {self.name}"

    @property
    def needs_model(self) -> bool:
        """Whether the text has to be written by the model that is compressed, before it can be read."""
        return self.kind == SELF


def suffix_of(path: Path) -> str:
    """`.jsonl` for `a.jsonl` and `a.jsonl.gz`; lower case."""
    suffixes = ["", *map(str.lower, path.suffixes)]
    return suffixes[-2 if suffixes[-1] in _COMPRESSED else -1]


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in _COMPRESSED


def is_wikitext(path: Path) -> bool:
    """`.raw`, `.tokens` and `.tokens.txt`: the names of WikiText's files. Any other text is what the file holds."""
    return suffix_of(path) in (".raw", ".tokens") or path.name.lower().endswith(".tokens.txt")


def parse_sources(names: Iterable[str], option: str = "--data") -> list[Source]:
    """All of a repeated option, each perhaps with `=WEIGHT`. Raises UserError where one names nothing, and where some
    have weights and some have none."""
    sources = [parse_source(name, option) for name in names]
    unweighted = [source.name for source in sources if source.weight is None]
    if unweighted and len(unweighted) < len(sources):
        raise UserError(f"{option} needs a weight for each source or for none; write {unweighted[0]}=0.5")
    return sources


def repeated(sources: Sequence[Source]) -> dict[str, str]:
    """Of each source whose files, or whose data set, an earlier one has, too: its name, and one of them."""
    seen: set[object] = set()
    twice_named = {}
    for source in sources:
        texts: dict[object, str] = {path.resolve(): str(path) for path in source.files}
        texts = texts or {(source.kind, source.repository or source.name, source.config, source.split): source.name}
        if twice := [text for key, text in texts.items() if key in seen]:
            twice_named[source.name] = twice[0]
        seen.update(texts)
    return twice_named


def parse_source(name: str, option: str = "--data") -> Source:
    """The source that a name stands for, `=WEIGHT` included. Raises UserError where it can be nothing."""
    text, weight = _weight(name, option)
    short, _, split = text.partition("@")
    source: Source | None
    if text in (BUILTIN, PROSE, SELF):
        source = Source(text, SELF if text == SELF else "builtin")
    elif short in NAMED:
        repository, config = NAMED[short]
        source = Source(text, "hub", repository=repository, config=config, split=split or None)
    else:
        source = _files(text, option)
        if source is None and (match := _HUB.fullmatch(text)):
            repository, config, split = match.group("repository", "config", "split")
            source = Source(text, "hub", repository=repository, config=config, split=split)
        source = source or _local_set(text)
    if source is None:
        rule = f"{option} must be {', '.join((*NAMED, BUILTIN, PROSE))} or a file, glob or directory"
        hub = f"a data set of the hub as owner/name[:config][@split], got {text!r}"
        raise UserError(f"{rule} ({', '.join(SUFFIXES)}), or {hub}")
    return replace(source, weight=weight, option=option)


def _weight(name: str, option: str) -> tuple[str, float | None]:
    text, equals, number = name.rpartition("=")
    if not equals or Path(name).expanduser().exists():
        return name, None
    try:
        weight = float(number)
    except ValueError:
        return name, None
    if not 0 < weight < float("inf"):
        raise UserError(f"{option} weights must be positive numbers, got {name}")
    return text, weight


def _files(text: str, option: str) -> Source | None:
    """Local files; None where the text does not look like any."""
    path = ready_file(text)
    hub = _HUB.fullmatch(text)
    endings = ", ".join(SUFFIXES)
    if path.is_dir() and text:
        readme = path / "README.md"
        if readme.is_file() and readme.read_bytes().partition(b"\n")[0].strip() == b"---":
            return Source(text, "hub", repository=str(path))  # the hub's layout, which `datasets` reads
        inside = path.rglob("*")
        visible = [file for file in inside if not any(part[0] == "." for part in file.relative_to(path).parts)]
        if linked := next((file for file in visible if file.is_symlink() and file.is_dir()), None):
            rule = f"{option} {path} holds a link to a directory, {linked}, which is not followed"
            raise UserError(f"{rule}; name that, too")
        texts = (p for p in visible if suffix_of(p) in SUFFIXES and p.name not in _METADATA and p.is_file())
        # `map` of a data set that was saved leaves its result beside it.
        files = sorted(p for p in texts if not (p.suffix == ".arrow" and p.name.startswith("cache-")))
        if twice := next((p for p in files if is_compressed(p) and p.with_suffix("").is_file()), None):
            raise UserError(f"{option} {path} holds {twice} packed and unpacked; keep one of the two elsewhere")
        if not files:
            raise UserError(f"{option} names a directory without files that end in {endings}: {path}")
        return Source(text, "files", files=tuple(files))
    named = path.is_file() or (hub and hub["split"]) or _local_set(text) is not None
    if any(sign in text for sign in "*?[") and not named:
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not (files := [file for file in matches if file.is_file() and suffix_of(file) in SUFFIXES]):
            raise UserError(f"{option} pattern matches no file that ends in {endings}: {text}")
        return Source(text, "files", files=tuple(files))
    known = suffix_of(path) in SUFFIXES
    if path.is_file() and known:
        return Source(text, "files", files=(path,))
    if not path.is_file() and (named or (hub and hub["config"])):
        return None
    if not path.is_file() and (known or text.startswith((".", "/", "~"))):
        raise UserError(f"{option} names a file that does not exist: {path}; check the path")
    if path.is_file() or (path.suffix and "/" not in text):
        raise UserError(f"{option} files must end in {endings}, perhaps with .gz or .zst, got {path}")
    return None


def _local_set(text: str) -> Source | None:
    """`DIRECTORY[:config][@split]` of a local copy of a data set, in the hub's layout."""
    rest, _, split = text.partition("@")
    name, _, config = rest.partition(":")
    if not name or not (directory := Path(name).expanduser()).is_dir():
        return None
    return Source(text, "hub", repository=str(directory), config=config or None, split=split or None)
