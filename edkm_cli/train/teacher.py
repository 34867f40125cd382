"""The uncompressed model's predictions of the training text, computed once and kept on disk.

Each sequence that training will see passes the uncompressed model once; what is kept is its last state for each token, two
bytes a number (8 KB a token for LLaMA-7B, 0.8 GB for 100,000 tokens), from which one copy of the head gives the logits
again. So training holds no second model and no step runs one, and a text that is trained on many times is passed once.

    $EDKM_CACHE/teacher/DIGEST.states     a row (tokens, width) for each sequence, float16 (bfloat16 of such a model)
    $EDKM_CACHE/teacher/DIGEST.json       its SHA-256, written last
    $EDKM_CACHE/teacher/DIGEST.partial    the rows so far: what is killed goes on after its last whole pass

The digest is that of the model and of all sequences in their order. What no run has used for 30 days goes when another
run keeps its own.
"""

import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli.data import Batch, Blocks
from edkm_cli.data.cache import locked
from edkm_cli.data.store import disk_error
from edkm_cli.distributed import ALONE, World, processes_here
from edkm_cli.errors import UserError
from edkm_cli.files import require_room, sha256_of, whole_record, write_json
from edkm_cli.models import cache_directory
from edkm_cli.nn.hooks import evaluating
from edkm_cli.nn.parts import Parts
from edkm_cli.progress import Track, no_progress
from edkm_cli.train.losses import inputs_of

_UNUSED_DAYS = 30
_CACHE = {"what": "the uncompressed model's states", "variable": "EDKM_CACHE"}
_PASS_TOKENS = 4096  # in one pass: where layers are read from files, each is read once for all of them


def micro_batch(blocks: Blocks, config: Any, world: World, step: int, micro: int) -> Batch:
    """This process's part of a micro-batch. A step sees the same blocks however they are split over processes."""
    return blocks.examples((step * config.gradient_accumulation + micro) * world.size + world.rank, config.batch_size)


def require_labels(blocks: Blocks, config: Any, world: World) -> None:
    """Raises UserError where no step has a token to learn: of long prompts, sequences may hold no answer."""
    turns = [(step, micro) for step in range(config.steps) for micro in range(config.gradient_accumulation)]
    if turns and not world.any(any(micro_batch(blocks, config, world, *turn).learnt for turn in turns)):
        rule = f"the sequences of all {config.steps} steps must hold a token to learn, but hold prompts alone"
        raise UserError(f"{rule}; give a longer --sequence-length, more --steps or --train-on all", everywhere=True)


class RememberedTeacher:
    """The states of sequences, by their tokens; the head is a copy of its own."""

    def __init__(self, path: Path, rows: dict[str, int], shape: tuple[int, int], dtype: torch.dtype, parts: Parts):
        size = len(rows) * shape[0] * shape[1]  # shared, though only read: a private one counts as memory to the system
        self._states = torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(len(rows), *shape)
        self._rows, self._parts = rows, parts

    def states(self, batch: Batch) -> Tensor:
        """(batch, sequence, width), as they are kept, on the batch's device. KeyError for a sequence that was not seen."""
        return self._states[[self._rows[digest] for digest in _digests(batch)]].to(batch.ids.device)

    def logits(self, states: Tensor) -> Tensor:
        """The logits of some of these states."""
        with torch.no_grad():
            return self._parts.logits(states.to(self._parts.dtype))


def _digests(batch: Batch) -> list[str]:
    """What tells each sequence of a batch apart: its tokens, and where its documents begin."""
    tensors = [batch.ids, *([] if batch.positions is None else [batch.positions])]
    rows = zip(*(tensor.cpu().numpy() for tensor in tensors), strict=True)
    return [hashlib.sha256(b"".join(part.tobytes() for part in row)).hexdigest() for row in rows]


def remember(
    model: Any,
    blocks: Blocks,
    config: Any,
    *,
    world: World,
    model_sha256: str,
    mixed_precision: str = "no",
    track: Track = no_progress,
    say: Callable[[str], None] = lambda text: None,
) -> RememberedTeacher:
    """The teacher of a training by `config` (steps, batch sizes): what of it is not in
    the cache is computed by `model`, the uncompressed one, which may go afterwards. Each process has sequences of its own.

    Raises UserError where the disk has no room, or states are not finite.
    """
    rows: dict[str, int] = {}
    places: list[tuple[int, int, int]] = []
    for step in range(config.steps):
        for micro in range(config.gradient_accumulation):
            for row, digest in enumerate(_digests(micro_batch(blocks, config, world, step, micro))):
                if rows.setdefault(digest, len(places)) == len(places):
                    places.append((step, micro, row))
    parts = Parts(model, frozen=True)
    kind = torch.device(world.device).type
    dtype = torch.bfloat16 if parts.dtype == torch.bfloat16 else torch.float16
    shape = (config.sequence_length, parts.width)
    kinds = ["2", kind, str(parts.dtype), str(dtype), mixed_precision]
    about = " ".join([model_sha256, *kinds, str(shape), *[str(world.rank)] * world.sharded, *rows])
    path = cache_directory() / "teacher" / f"{hashlib.sha256(about.encode()).hexdigest()[:32]}.states"
    partial, facts = path.with_suffix(".partial"), path.with_suffix(".json")
    at_once = max(1, _PASS_TOKENS // config.sequence_length)
    row_bytes = shape[0] * shape[1] * dtype.itemsize

    def compute(some: list[tuple[int, int, int]]) -> bytes:
        found = [(micro_batch(blocks, config, world, step, micro), row) for step, micro, row in some]
        ids = torch.stack([batch.ids[row] for batch, row in found])
        positions = [batch.positions[row] for batch, row in found if batch.positions is not None]
        batch = Batch(ids, None, torch.stack(positions) if positions else None).to(world.device)
        # Nothing cached: weights that were rounded would stay until the last layer is done.
        rounded = torch.autocast(kind, torch.bfloat16, enabled=mixed_precision == "bf16", cache_enabled=False)
        with evaluating(model), torch.no_grad(), rounded:
            states = parts.states(**inputs_of(batch)).to(dtype)
        if not bool(states.isfinite().all()):
            rule = f"the uncompressed model's states must be finite in {dtype}, but are not"
            raise UserError(f"{rule}; its weights are broken, or it needs --dtype bfloat16")
        return states.cpu().contiguous().view(torch.uint8).numpy().tobytes()

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        together = world if world.sharded else ALONE
        with locked(path.with_suffix(".lock"), say, "computing the same teacher's states", together, **_CACHE):
            _forget_unused(path, say)
            if whole_record(facts) is None:
                path.unlink(missing_ok=True)
                # The same sequences pass together after a kill as without one: sums depend on what is multiplied with what.
                passes = [places[first : first + at_once] for first in range(0, len(places), at_once)]
                done = partial.stat().st_size // (at_once * row_bytes) if partial.is_file() else 0
                what = "the uncompressed model's states of the training text need"
                remedy = "free some, set EDKM_CACHE to another directory, or train on fewer tokens"
                require_room(path.parent, processes_here() * (len(places) - done * at_once) * row_bytes, what, remedy)
                partial.touch()
                # Each pass in its place: where locks are of one machine, another run writes the same bytes.
                with open(partial, "r+b") as file:
                    file.seek(done * at_once * row_bytes)
                    todo = passes[done:]
                    # A sharded model is called by all processes as often.
                    count = world.largest(len(todo)) if world.sharded else len(todo)
                    for number in track(range(count), "teacher", count):
                        states = compute(todo[number] if number < len(todo) else passes[0])
                        if number < len(todo):
                            file.write(states)
                            file.flush()
                            os.fsync(file.fileno())
                with suppress(FileNotFoundError):  # that run was first
                    os.replace(partial, path)
                write_json(facts, {"files": {path.name: sha256_of(path)}})
            elif world.sharded:
                for _ in range(world.largest(0)):
                    compute(places[:at_once])
            os.utime(path)
    except OSError as error:
        raise disk_error(error, path.parent, **_CACHE) from error
    parts.release()
    if mixed_precision == "bf16":
        parts.round_linears()
    return RememberedTeacher(path, rows, shape, dtype, parts)


def require_place() -> None:
    """Raises UserError, before the work, where states could not be kept."""
    folder = cache_directory() / "teacher"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise disk_error(error, folder, **_CACHE) from error


def _forget_unused(path: Path, say: Callable[[str], None]) -> None:
    """Remove the states beside `path` that no run has used for long."""
    for other in {*path.parent.glob("*.states"), *path.parent.glob("*.partial")} - {path, path.with_suffix(".partial")}:
        with suppress(FileNotFoundError):  # another run is at it, too
            if time.time() - other.stat().st_mtime > 86400 * _UNUSED_DAYS:
                say(f"removing {other}, which no run has used for {_UNUSED_DAYS} days")
                other.with_suffix(".json").unlink(missing_ok=True)
                other.unlink()
