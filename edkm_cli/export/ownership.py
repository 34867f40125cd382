"""What may be replaced or removed: only what an earlier run of ours wrote, which its own files say.

A finished directory lists its files with their digests in edkm-files.json; one that is being written has edkm-run.json,
and holds files that runs write. A page, a figure or a result of `--json` says inside what wrote it. All else is foreign: it
is never touched, and where it stands in the way it is named before any work. Nothing here imports torch.
"""

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from edkm_cli import __version__
from edkm_cli.config import CHECKPOINTS
from edkm_cli.errors import UserError
from edkm_cli.settings import cache_directory, token_cache_directory

MARKER, FILES = "edkm-run.json", "edkm-files.json"
GENERATOR = f"edkm {__version__}"
_GENERATORS = (b'<meta name="generator" content="edkm ', b"<desc>edkm ")  # a page, a figure
_MOST_BYTES = 2**28  # of a result that is read to see whose it is

# Names of the files that a run writes into its unfinished result, as paths from there.
WRITTEN = re.compile(
    r"(edkm-run|edkm-files|config|generation_config|((video_)?pre)?processor_config|special_tokens_map"
    r"|added_tokens|tekken|checksums|tensors|report|finetune|merge|export|quant_config|adapter_config"
    r"|model\.safetensors\.index)\.json(\.tmp)?"
    r"|(adapter_)?model[\w-]*\.safetensors(\.tmp)?|metrics(_dense)?\.jsonl(\.tmp)?|README\.md|merges\.txt"
    r"|tokenizer[\w.-]*|(vocab|chat_template)\.\w+|additional_chat_templates/[^/]+|[\w-]+\.model|\w+\.py|model\.gguf"
    r"|checkpoints/([\w.-]+/)*[\w.-]+\.(safetensors|jsonl?|tmp)|(edkm|wandb|[\w-]+\.mlpackage)/.+"
)


def entries(directory: Path) -> Iterator[str]:
    """Paths from `directory` of all files and links below it; links are not followed."""
    for folder, folders, files in os.walk(directory):
        for name in (*files, *(name for name in folders if Path(folder, name).is_symlink())):
            yield Path(folder, name).relative_to(directory).as_posix()


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def listing(directory: Path) -> dict[str, Any]:
    """What edkm-files.json of a finished directory says: `files` (path -> bytes and sha256) and what the run recorded."""
    content = read_object(directory / FILES)
    return content if isinstance(content.get("files"), dict) else {}


def foreign(directory: Path) -> list[str]:
    """Paths from `directory` of everything in it that no run of ours wrote, or that was changed since; sorted."""
    files, begun = listing(directory).get("files", {}), (directory / MARKER).is_file()
    return sorted(name for name in entries(directory) if not _is_ours(directory, name, files, begun=begun))


def _is_ours(directory: Path, name: str, files: dict[str, Any], *, begun: bool) -> bool:
    if (path := directory / name).is_symlink():
        return False
    if name in (MARKER, f"{MARKER}.tmp", FILES, f"{FILES}.tmp") or path.name == ".DS_Store":  # which Finder writes
        return path.is_file()
    if name in files:
        return path.is_file() and entry_of(path) == files[name]
    return begun and (not files or name.startswith(f"{CHECKPOINTS}/")) and WRITTEN.fullmatch(name) is not None


def entry_of(path: Path) -> dict[str, Any]:
    """Size and digest of a file, as edkm-files.json has them."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def files_of(directory: Path) -> dict[str, Any]:
    """The list of a result that is about to be put in place: what its run wrote, without what it will clear away."""
    names = [name for name in entries(directory) if WRITTEN.fullmatch(name) and (directory / name).is_file()]
    kept = [name for name in names if not name.startswith((MARKER, FILES, f"{CHECKPOINTS}/"))]
    return {name: entry_of(directory / name) for name in sorted(kept)}


def require_ours(directory: Path, why: str) -> None:
    """Raises UserError naming what in a directory is foreign, as the end of the sentence `why`."""
    if names := foreign(directory):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        rule = f"{why}, but holds something else: {names[0]}{more}, which no run of this edkm wrote as it is"
        raise UserError(f"{rule}; move it away, or choose another --output")


def remove(directory: Path, below: str = "") -> None:
    """Remove what is ours of a directory (of its folder `below`), its marks last: what a kill leaves of it is still known
    as ours. What is foreign stays, with the folders that lead to it. Where there is no directory, there is nothing to do."""
    strange = set(foreign(directory))
    names = [name for name in entries(directory) if name not in strange and name.startswith(below)]
    for name in sorted(names, key=(FILES, MARKER).__contains__):
        (directory / name).unlink(missing_ok=True)
    for folder, _, _ in os.walk(directory / below, topdown=False):
        if not os.listdir(folder):
            os.rmdir(folder)


def input_paths(option: str, *names: str | Path | None) -> list[tuple[str, Path]]:
    """(option, path) of everything on this machine that the names of models and texts stand for; a weight (`=0.5`), a
    configuration or a split after a name is left out. What is no path gives nothing."""
    paths = []
    for name in map(str, filter(None, names)):
        texts = (name, name.rpartition("=")[0], re.split("[:@]", name)[0])
        there = next((path for text in texts if text and (path := Path(text).expanduser()).exists()), None)
        matches = [there] if there is not None else map(Path, glob.glob(texts[1] or name, recursive=True))
        paths += [(option, path) for path in matches]
    return paths


def run_paths(config: Any, option: str, model: str | Path) -> list[tuple[str, Path]]:
    """(option, path) of everything that a command reads: its model, and what its configuration names beside it."""
    paths = input_paths(option, model) or [(option, Path(model))]  # an alias that an output would stand in the way of
    for name in ("adapter", "reference", "data", "eval_data", "task_path", "base_gguf"):
        named = getattr(config, name, None)
        paths += input_paths(f"--{name.replace('_', '-')}", *(named if isinstance(named, tuple) else (named,)))
    return paths


def require_apart(option: str, target: Path, inputs: Iterable[tuple[str, Path]]) -> None:
    """Raises UserError where an output is, contains or lies inside something that is read. Links are followed."""
    target = Path(os.path.realpath(target.expanduser()))
    for name, given in inputs:
        there = Path(os.path.realpath(given.expanduser()))
        same = target.exists() and there.exists() and target.samefile(there)  # where case makes no difference, too
        if same or target == there:
            relation = "is"
        elif there.is_relative_to(target):
            relation = "contains"
        elif target.is_relative_to(there):
            relation = "lies inside"
        else:
            continue
        raise UserError(f"{option} must be apart from the source, but {target} {relation} {name} {there}")


def cache_paths() -> list[tuple[str, Path]]:
    """The cache directories, which are inputs, too."""
    return [("the cache", path) for path in (cache_directory(), token_cache_directory())]


def require_replaceable(option: str, path: Path) -> None:
    """Raises UserError for a file that exists, unless it is empty or says that it is a page, figure or result of ours."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with open(path, "rb") as file:
        head = file.read(4096)
    part = path.name in listing(path.parent).get("files", {}) and WRITTEN.fullmatch(path.name)  # of a finished result
    if any(sign in head for sign in _GENERATORS) and not part:
        return
    if head.lstrip()[:1] == b"{" and path.stat().st_size <= _MOST_BYTES and not part:
        content = read_object(path)
        signs = {"versions": "edkm-cli", "settings": "edkm_version"}
        signed = (sign in part for key, sign in signs.items() if isinstance(part := content.get(key), dict))
        if head.strip() == b"{}" or any(signed):
            return
    raise UserError(f"{option} {path} exists and is no page, figure or --json result of edkm; move it away")


def is_stream(path: Path) -> bool:
    """Whether a path leads to a device, a pipe or a terminal (/dev/stdout), which nothing may replace."""
    return path.exists() and not path.is_file() and not path.is_dir()


def replace_file(path: Path, text: str) -> None:
    """Write a file of ours, or what a link leads to, in one step; where its directory is a finished result, it then belongs
    to that. A stream is written to."""
    from edkm_cli.files import write_json, written_whole

    if is_stream(path):
        path.write_text(text, encoding="utf-8")
        return
    path = Path(os.path.realpath(path))
    with written_whole(path, f".{os.getpid()}") as partial:
        partial.write_text(text, encoding="utf-8")
    if (content := listing(path.parent)) and path.name != FILES:
        content["files"][path.name] = entry_of(path)
        write_json(path.with_name(FILES), content)
