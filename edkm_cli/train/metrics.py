"""The record of each training step: a line in `metrics.jsonl`, and the same for the trackers of `--log-with`."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edkm_cli.config import TrainingSettings
from edkm_cli.distributed import World


class Metrics:
    """`metrics.jsonl`, a line for each step, and the trackers of `--log-with`; on the first process only."""

    def __init__(self, path: Path, accelerator: Any, config: TrainingSettings, first: int, world: World):
        self._file = None
        self._accelerator = accelerator if config.log_with else None
        if world.main:
            keep_metrics(path, first)
            self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        if self._accelerator is not None:
            plain = (bool, int, float, str)
            settings = {name: one if isinstance(one, plain) else str(one) for name, one in asdict(config).items()}
            # What trackers write goes with the run; steps that a resumed run repeats replace the former ones.
            wandb = {} if "WANDB_DIR" in os.environ else {"dir": str(path.parent)}
            options = {"tensorboard": {"purge_step": first + 1}, "wandb": wandb}
            accelerator.init_trackers("edkm", config=settings, init_kwargs=options)

    def write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._accelerator is not None:
            self._accelerator.log({name: value for name, value in record.items() if name != "step"}, record["step"])

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
        if self._accelerator is not None:
            self._accelerator.end_training()


def keep_metrics(path: Path, steps: int) -> None:
    """Drop the lines after step `steps`, which a resumed run writes again, and a last line that was cut."""
    if path.is_file():
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:steps]
        kept = path.with_name(path.name + ".tmp")
        kept.write_text("".join(line + "\n" for line in lines if line), encoding="utf-8")
        os.replace(kept, path)  # a kill in between loses no line
