"""What the files of a model say, before anything is built of them: no numbers that no model has, no file outside of the
directory, no tensor in two places, no weights of integers. Whoever wrote the files may be careless, or hostile."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.format import is_plain_name, read_json, sha256_of

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# What belongs to a model beside its weights.
BESIDE_WEIGHTS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
                  "vocab.*", "merges.txt", "*.model", "chat_template*", "*.py", "*.index.json")  # fmt: skip
FETCH_AGAIN = "fetch the files again"
# What is built one by one, and how many of them a model may have; and what any number of a configuration may be.
_COUNTED, _MAX_COUNT = ("layer", "expert", "block", "depth", "num_hidden"), 100_000
_MAX_NUMBER = 2**48
_TIMES_STORED = 8


@dataclass(frozen=True)
class Stored:
    """What a directory's weight files hold: tensors, and numbers in all of them."""

    tensors: int
    numbers: int


def files_digest(path: Path) -> str:
    """One sha256 over the names and bytes of a model's files that say what it is: weights, configuration, tokenizer, code.
    `path` is its directory, or a file that holds all of it."""
    if path.is_file():
        return sha256_of(path)
    weights = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    beside = {file for pattern in BESIDE_WEIGHTS for file in path.glob(pattern) if file.is_file()}
    total = hashlib.sha256()
    for file in [*weights, *sorted(beside)]:
        total.update(f"{file.name} {sha256_of(file)}\n".encode())
    return total.hexdigest()


def check_numbers(path: Path, config: Any, *, remedy: str = FETCH_AGAIN, key: str = "") -> None:
    """Raises UserError for a number in a config.json that no model has: to build such a model would not end."""
    if isinstance(config, dict):
        for name, value in config.items():
            check_numbers(path, value, remedy=remedy, key=str(name))
    elif isinstance(config, list):
        for value in config:
            check_numbers(path, value, remedy=remedy, key=key)
    elif isinstance(config, int) and not isinstance(config, bool):
        limit = _MAX_COUNT if any(part in key for part in _COUNTED) else _MAX_NUMBER
        if abs(config) > limit:
            raise UserError(f"{path}: {key} must be at most {limit}, got {str(config)[:40]}; {remedy}")


def check_model_files(directory: Path) -> Stored | None:
    """Look at the headers of the safetensors files that transformers will read; None where there are none.

    Raises UserError for an index that names files elsewhere, none, or tensors that its files do not hold, for a tensor in
    two files, and for weights that are no real numbers: transformers takes one of the two, and turns integers and the
    real parts of complex numbers into weights.
    """
    placed = _placed(directory)
    if placed is None:
        return None
    holders: dict[str, str] = {}
    numbers = 0
    for file in sorted(set(placed.values())) if placed else [SINGLE]:
        for name, dtype, shape in header(directory / file):
            if name in holders:
                raise UserError(f"{directory} holds {name[:100]} in {holders[name]} and in {file}; {FETCH_AGAIN}")
            if name.endswith("weight") and not dtype.startswith(("F", "BF")):
                raise UserError(
                    f"{directory / file} must hold weights of real numbers, but {name[:100]} is {dtype}; give the model "
                    "that it was made from"
                )
            holders[name] = file
            numbers += math.prod(shape)
    lacking = sorted(name for name, file in placed.items() if holders.get(name) != file)
    if lacking:
        raise UserError(
            f"{directory / placed[lacking[0]]} lacks {lacking[0][:100]}, which {INDEX} names; {FETCH_AGAIN}"
        )
    return Stored(len(holders), numbers)


def _placed(directory: Path) -> dict[str, str] | None:
    """Tensor -> file, as the index says; empty where one file holds all, None where there are no such files."""
    if (directory / SINGLE).is_file():  # transformers prefers it, too
        return {}
    if not (directory / INDEX).is_file():
        return None
    placed = read_json(directory / INDEX, remedy=FETCH_AGAIN).get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(isinstance(file, str) for file in placed.values()):
        raise UserError(f"{directory / INDEX} must map tensors to files, but does not; {FETCH_AGAIN}")
    for file in sorted(set(placed.values())):
        if not is_plain_name(file):
            raise UserError(
                f"{directory / INDEX} must name files of its own directory, got {file[:100]!r}; {FETCH_AGAIN}"
            )
        if not (directory / file).is_file():
            raise UserError(f"{directory} lacks {file[:100]}, which {INDEX} names; {FETCH_AGAIN}")
    return placed


def header(file: Path, *, remedy: str = FETCH_AGAIN) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype as safetensors calls it, shape) of each tensor of a file. Raises UserError for one that is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                yield name, str(part.get_dtype()), tuple(part.get_shape())
    except (SafetensorError, OSError) as error:
        told = " ".join(str(error).split())[:160]
        raise UserError(f"{file} is not a whole safetensors file ({told}); {remedy}") from error


@contextmanager
def no_larger_than(
    directory: Path, *, tensors: int, numbers: int | None = None, remedy: str = FETCH_AGAIN
) -> Iterator[None]:
    """Inside, raises UserError as soon as models register many more parameters than the `tensors` of a directory's files,
    or, unless it is None, parameters of many more than so many `numbers`: files that hold fewer cannot fill them."""
    from torch import nn
    from torch.nn.modules.module import register_module_parameter_registration_hook

    count = size = 0

    def registered(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal count, size
        count, size = count + 1, size + (0 if parameter is None else parameter.numel())
        # Tied ones and those of modules that take another's place are registered twice; fused ones are stored apart.
        too_many = count > _TIMES_STORED * tensors + 1000
        if too_many or (numbers is not None and size > _TIMES_STORED * numbers + 2**20):
            what = f"{tensors} tensors" if too_many else f"{numbers} weights"
            raise UserError(
                f"{directory}/config.json describes a model far larger than the {what} that the files hold; {remedy}"
            )

    handle = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        handle.remove()


def settle_ties(config: Any, directory: Path) -> None:
    """Let `config.tie_word_embeddings` say what the weights say, in place: where the files hold an output embedding of
    its own, which differs from the input embedding, the two are not tied, whatever the flag. transformers decides so,
    too, while it loads; here it is known before, and for every way to read the files.
    """
    text = config.get_text_config(decoder=True)
    if not getattr(text, "tie_word_embeddings", False) or differing_head(directory) is None:
        return
    text.tie_word_embeddings = config.tie_word_embeddings = False


def differing_head(directory: Path) -> str | None:
    """The name of an output embedding in a directory's safetensors files that is not equal to the input embedding."""
    from safetensors import SafetensorError, safe_open

    places: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                places |= dict.fromkeys(opened.keys(), file)
        except (SafetensorError, OSError):
            return None  # whoever reads the weights says what is wrong with them
    heads = [name for name in places if name.split(".")[-2:] in _HEADS]
    inputs = [name for name in places if name.split(".")[-2:] in _INPUTS]
    if len(heads) != 1 or len(inputs) != 1:
        return None
    with safe_open(places[heads[0]], framework="pt") as one, safe_open(places[inputs[0]], framework="pt") as other:
        head, rows = one.get_slice(heads[0]), other.get_slice(inputs[0])
        if head.get_shape() != rows.get_shape() or head.get_dtype() != rows.get_dtype():
            return heads[0]
        for first in range(0, head.get_shape()[0], _COMPARED_ROWS):
            part = slice(first, first + _COMPARED_ROWS)
            if not bool((head[part] == rows[part]).all()):
                return heads[0]
    return None


# What families call their output and their token embedding.
_HEADS = (["lm_head", "weight"], ["embed_out", "weight"])
_INPUTS = tuple([name, "weight"] for name in ("embed_tokens", "embed_in", "wte", "word_embeddings", "embedding"))
_COMPARED_ROWS = 4096
