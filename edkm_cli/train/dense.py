"""`--compare-dense`: the uncompressed model trained as the compressed one is, to tell what compression costs.

A perplexity after training mixes two things: the model has learnt the text, and it has lost something by compression. The
uncompressed model, trained on the same batches for as many steps towards the same objective, has only learnt. The ratio of
the two is what compression costs whoever fine-tunes.

What trains is what trains in the compressed model, the decoder's linears and norms; embeddings stay. Of the settings only
the learning rate differs: weights that are not rounded in each forward pass want a lower one.
"""

from pathlib import Path
from typing import Any

from edkm_cli.config import CHECKPOINTS, CompressConfig, TrainingSettings
from edkm_cli.data import Blocks
from edkm_cli.settings import part_of
from edkm_cli.train.loop import train
from edkm_cli.train.losses import Objective, Teacher

METRICS = "metrics_dense.jsonl"


def dense_directory(staging: Path, config: CompressConfig) -> Path:
    """Where the training keeps its own metrics and checkpoints, one directory for each learning rate that was tried: what
    is below goes when the run is finished."""
    return staging / CHECKPOINTS / f"dense-{config.dense_learning_rate:g}"


def train_dense(model: Any, teacher: Teacher | None, blocks: Blocks, config: CompressConfig, **options: Any) -> None:
    """Train a dense causal LM in place by the settings of a compressed one; `options` are the other arguments of `train`.

    A killed run goes on from its newest checkpoint, and a finished one only loads its last. The lines of its metrics end
    in `staging`.
    """
    world, staging = options["world"], options["staging"]
    directory = dense_directory(staging, config)
    if world.main:
        directory.mkdir(parents=True, exist_ok=True)
    world.any(False)  # all wait until it is there
    settings = part_of(TrainingSettings, config, learning_rate=config.dense_learning_rate, log_with=())
    objective = Objective(teacher, label_weight=config.label_weight or 0.0)
    train(model, objective, blocks, settings, **{**options, "staging": directory})
    if world.main:
        (staging / METRICS).write_bytes((directory / "metrics.jsonl").read_bytes())
