"""Mutations of a checkpoint directory: what a broken disk, a broken program or an enemy may make of it."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

COUNT = int(os.environ.get("EDKM_FUZZ", "700"))  # of checkpoints; other files are drawn in shares of it
_WEIGHTS = "model.safetensors"
_JSON = (
    "config.json",
    "checksums.json",
    "tensors.json",
    "report.json",
    "generation_config.json",
    "tokenizer_config.json",
)
_NUMBERS = (0, -1, 1, 2**31, 2**63, 10**30, -(10**12), 0.5, float("nan"), float("inf"), True, None, "3", "", [], {})
_NAMES = ("../secret", "/etc/passwd", "..", "", "a\0b", "x" * 5000, "model.safetensors/..", "sub/model.safetensors")


class Mutator:
    """Draws one mutation after the other, all from one seed, and applies it to a copy of a directory."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self._kinds = [name for name in dir(self) if name.startswith("mutate_")]

    def apply(self, directory: Path) -> str:
        """Mutate the directory in place; returns what was done."""
        while True:
            kind = self.random.choice(self._kinds)
            told = getattr(self, kind)(directory)
            if told:
                return f"{kind.removeprefix('mutate_')}: {told}"

    # Bytes of any file.

    def _file(self, directory: Path) -> Path:
        return self.random.choice(sorted(path for path in directory.iterdir() if path.is_file()))

    def mutate_flip(self, directory: Path) -> str:
        path = self._file(directory)
        data = bytearray(path.read_bytes())
        if not data:
            return ""
        places = [self.random.randrange(len(data)) for _ in range(self.random.choice((1, 1, 1, 8)))]
        for place in places:
            data[place] ^= 1 << self.random.randrange(8)
        path.write_bytes(data)
        return f"{path.name} at {places}"

    def mutate_truncate(self, directory: Path) -> str:
        path = self._file(directory)
        size = self.random.randrange(path.stat().st_size + 1)
        os.truncate(path, size)
        return f"{path.name} to {size}"

    def mutate_append(self, directory: Path) -> str:
        path = self._file(directory)
        with open(path, "ab") as file:
            file.write(self.random.randbytes(self.random.choice((1, 8, 1000))))
        return path.name

    def mutate_remove(self, directory: Path) -> str:
        path = self._file(directory)
        path.unlink()
        return path.name

    def mutate_link(self, directory: Path) -> str:
        path = self._file(directory)
        path.unlink()
        target = self.random.choice(("/etc/hostname", "/dev/null", "nowhere", str(directory), path.name))
        path.symlink_to(target)
        return f"{path.name} -> {target}"

    def mutate_garbage(self, directory: Path) -> str:
        path = self._file(directory)
        path.write_bytes(
            self.random.choice((b"", b"null", b"[]", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 20_000, b"\0" * 64))
        )
        return path.name

    # The header of the weights.

    def _with_header(self, directory: Path, change) -> bool:
        path = directory / _WEIGHTS
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        if change(header) is False:
            return False
        encoded = json.dumps(header).encode()
        path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data[8 + length :])
        (directory / "checksums.json").unlink(missing_ok=True)
        return True

    def _tensor(self, header: dict) -> str:
        return self.random.choice(sorted(name for name in header if name != "__metadata__"))

    def mutate_header_length(self, directory: Path) -> str:
        path = directory / _WEIGHTS
        data = bytearray(path.read_bytes())
        length = self.random.choice((0, 1, 7, 2**20, 2**40, 2**63, 2**64 - 1))
        data[:8] = length.to_bytes(8, "little")
        path.write_bytes(data)
        (directory / "checksums.json").unlink(missing_ok=True)
        return str(length)

    def mutate_shape(self, directory: Path) -> str:
        def change(header):
            tensor = header[self._tensor(header)]
            tensor["shape"] = self.random.choice(
                (
                    tensor["shape"][::-1],
                    [1, *tensor["shape"]],
                    [2**40, 2**40],
                    [-1],
                    [0],
                    tensor["shape"] * 30,
                    [2**62, 4],
                )
            )

        self._with_header(directory, change)
        return "shape"

    def mutate_dtype(self, directory: Path) -> str:
        def change(header):
            tensor = header[self._tensor(header)]
            tensor["dtype"] = self.random.choice(
                ("F64", "F32", "F16", "BF16", "I8", "U8", "I64", "BOOL", "F8_E4M3", "?")
            )

        self._with_header(directory, change)
        return "dtype"

    def mutate_offsets(self, directory: Path) -> str:
        def change(header):
            tensor = header[self._tensor(header)]
            start, end = tensor["data_offsets"]
            tensor["data_offsets"] = self.random.choice(
                ([end, start], [0, 2**60], [start + 1, end], [start, end - 1], [-1, 1], [])
            )

        self._with_header(directory, change)
        return "offsets"

    def mutate_swap_tensors(self, directory: Path) -> str:
        def change(header):
            first, second = self._tensor(header), self._tensor(header)
            if first == second:
                return False
            header[first], header[second] = header[second], header[first]
            return True

        return "swapped" if self._with_header(directory, change) else ""

    def mutate_duplicate(self, directory: Path) -> str:
        def change(header):
            header[self._tensor(header) + ".copy"] = header[self._tensor(header)]

        self._with_header(directory, change)
        return "duplicated"

    def mutate_rename(self, directory: Path) -> str:
        def change(header):
            name = self._tensor(header)
            header[self.random.choice(("", "x", name.upper(), "../" + name, name + "\0"))] = header.pop(name)

        self._with_header(directory, change)
        return "renamed"

    # Values of the weights, with the checksums made right again.

    def mutate_values(self, directory: Path) -> str:
        import torch
        from safetensors.torch import load_file, save_file

        from edkm_cli.files import write_checksums

        tensors = load_file(directory / _WEIGHTS)
        name = self.random.choice(sorted(tensors))
        tensor = tensors[name]
        flat = tensor.reshape(-1)
        place = self.random.randrange(flat.numel())
        if tensor.dtype == torch.uint8:
            flat[place] ^= 1 << self.random.randrange(8)
        else:
            flat[place] = self.random.choice((float("nan"), float("inf"), -float("inf"), 1e4, float(flat[place]) + 1))
        save_file(tensors, directory / _WEIGHTS, metadata={"format": "pt"})
        write_checksums(
            directory, [path.name for path in directory.iterdir() if path.name in (_WEIGHTS, "config.json")]
        )
        return name

    # Values of the JSON files.

    def mutate_json(self, directory: Path) -> str:
        path = directory / self.random.choice(_JSON)
        if not path.is_file():
            return ""
        value = json.loads(path.read_text(encoding="utf-8"))
        places = list(_places(value))
        owner, key = self.random.choice(places)
        kind = self.random.choice(("number", "remove", "name", "deep"))
        if kind == "remove" and isinstance(owner, dict):
            del owner[key]
        elif kind == "name" and isinstance(owner, dict):
            owner[self.random.choice(_NAMES)] = owner[key]
        else:
            owner[key] = self.random.choice(_NUMBERS)
        path.write_text(json.dumps(value), encoding="utf-8")
        if self.random.random() < 0.7:
            (directory / "checksums.json").unlink(missing_ok=True)
        return f"{path.name}: {key} {kind} {str(owner.get(key) if isinstance(owner, dict) else '')[:40]}"

    def mutate_index(self, directory: Path) -> str:
        name = self.random.choice(_NAMES)
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name, "b": _WEIGHTS}}))
        return repr(name[:30])


def _places(value):
    if isinstance(value, dict):
        for key, part in value.items():
            yield value, key
            yield from _places(part)
    elif isinstance(value, list):
        for key, part in enumerate(value):
            yield value, key
            yield from _places(part)


def copied(source: Path, target: Path) -> Path:
    """A fresh copy of a directory; links in an older copy are removed, not followed."""
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(source, target))
