"""What finetune and merge do alike, beside what every run does: the packed model they begin with."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from edkm_cli import data, models
from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.export.checkpoint import DenseFormat
from edkm_cli.export.ownership import run_paths
from edkm_cli.export.run import Session
from edkm_cli.format import QuantizationSpec, read_spec, sha256_of
from edkm_cli.model_files import files_digest, stored_dtypes
from edkm_cli.nn.clustered import Clustering
from edkm_cli.progress import Observer


def require_palettized(directory: Path) -> QuantizationSpec:
    """The format of a compressed model. Raises UserError for another directory."""
    if not directory.is_dir():
        raise UserError(f"DIR must be the directory of a compressed model, but there is no directory {directory}")
    spec = read_spec(directory) if (directory / "config.json").is_file() else None
    if spec is None:
        raise UserError(
            f"DIR must be what edkm compress wrote, but {directory} is not; to compress a model while it "
            "learns a text use edkm compress, to train it as it is use peft"
        )
    return spec


class PackedSession(Session):
    """One run on the compressed model in `directory`."""

    def __init__(self, directory: Path, config: Any, world: World, watch: Observer, *, dtype: str):
        self.directory, self.spec = directory, require_palettized(directory)
        super().__init__(config, data.parse_sources(config.data), world, watch, dtype=dtype)

    @property
    def inputs(self) -> list[tuple[str, Path]]:
        """(option, path) of what the run reads."""
        return run_paths(self.config, "DIR", self.directory)

    @property
    def clustering(self) -> Clustering:
        """Of the model's layers, where they train."""
        return Clustering(self.spec.bits, self.spec.granularity, self.spec.lut_dtype, palette=self.spec.palette)

    @cached_property
    def tokenizer(self) -> Any:
        source = models.resolve(str(self.directory))
        return models.load_tokenizer(source, trust_remote_code=self.config.trust_remote_code)

    def dense_format(self, model: Any) -> DenseFormat:
        """How the files of a model as it was loaded hold what is not packed."""
        source = models.resolve(str(self.directory))
        trust = self.config.trust_remote_code
        stored = models.load_config(source, trust_remote_code=trust, may_be_quantized=True).dtype
        return DenseFormat.of(model, stored or torch.float32, stored_dtypes(self.directory))

    def digest(self, *more: Path) -> str:
        """Of the compressed model's files, and of `more`."""
        return " ".join([self.world.on_main(lambda: files_digest(self.directory)), *map(sha256_of, more)])
