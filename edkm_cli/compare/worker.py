"""One method of `edkm compare`, in a process of its own, which keeps its peak memory, failures and random state apart.

    python -m edkm_cli.compare.worker DIR/rtn.json TOKENS.safetensors [--resume] [--overwrite]

The first file holds `settings` (all that the row depends on); the process adds `row`, or `error` with the reason. The
second holds the tokens of the `training` and the `evaluation` text.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from edkm_cli import models
from edkm_cli.baselines import load
from edkm_cli.baselines.autoround import quantize as autoround
from edkm_cli.baselines.outcome import decoder_linears
from edkm_cli.compare.config import AUTOROUND, OURS, UNCOMPRESSED
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.data import Blocks
from edkm_cli.environment import peak_memory_bytes
from edkm_cli.errors import Preempted, UserError
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.format import write_json
from edkm_cli.hf import load as load_compressed
from edkm_cli.preflight import calibration_batches, choose_start
from edkm_cli.progress import Observer, Progress, Track
from edkm_cli.settings import from_mapping

EMBEDDING_BYTES = 2  # a baseline's embeddings and norms are stored as they came, in 16 bits


def measure(
    settings: dict[str, Any],
    tokens: dict[str, Tensor],
    directory: Path,
    observer: Observer,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """The row of one method. `directory` is where `edkm` puts its checkpoint. Raises UserError."""
    if settings["method"] == OURS:
        row, model = _ours(settings, tokens["training"], directory, observer, resume=resume, overwrite=overwrite)
    elif settings["method"] == UNCOMPRESSED:
        row, model = _uncompressed(settings)
    else:
        row, model = _baseline(settings, tokens["training"], observer.track)
    measured = perplexity(
        model,
        tokens["evaluation"],
        context=settings["context"],
        max_windows=settings["eval_windows"],
        track=observer.track,
    )
    return {
        **row,
        "perplexity": measured.perplexity,
        "windows": measured.windows,
        "evaluation_seconds": round(measured.seconds, 3),
        "peak_memory_bytes": peak_memory_bytes(settings["device"]),
    }


def _uncompressed(settings: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    model = _dense(settings)
    row = {
        "bits": 16,
        "granularity": "",
        "decoder_bits_per_weight": 16.0,
        "weights_bytes": EMBEDDING_BYTES * sum(parameter.numel() for parameter in model.parameters()),
        "calibration_tokens": 0,
        "training_tokens": 0,
        "seconds": 0.0,
        "note": "",
    }
    return row, model


def _dense(settings: dict[str, Any]) -> Any:
    return models.load_dense(
        models.resolve(settings["model"]),
        dtype="float32",
        device=settings["device"],
        trust_remote_code=settings["trust_remote_code"],
        progress=False,
    )


def _baseline(settings: dict[str, Any], tokens: Tensor, track: Track) -> tuple[dict[str, Any], Any]:
    """Quantize a dense model in place by a method of `edkm_cli.baselines`."""
    calibration, arguments = settings["calibration"], settings["arguments"]
    blocks = Blocks(tokens, calibration["sequence_length"], seed=arguments["seed"])
    count = min(calibration["samples"], len(blocks))
    batches = [blocks.batch(index, 1).to(settings["device"]) for index in range(count)]
    model = _dense(settings)
    quantized = sum(layer.weight.numel() for layer in decoder_linears(model).values())
    others = sum(parameter.numel() for parameter in model.parameters()) - quantized
    quantize = autoround if settings["method"] == AUTOROUND else load(settings["method"]).quantize
    torch.manual_seed(arguments["seed"])
    start = time.perf_counter()
    outcome = quantize(model, batches, track=track, **arguments)
    seconds = time.perf_counter() - start
    row = {
        "bits": arguments["bits"],
        "granularity": settings["granularity"],
        "decoder_bits_per_weight": outcome.bits_per_weight,
        "weights_bytes": outcome.stored_bytes + EMBEDDING_BYTES * others,
        "calibration_tokens": outcome.calibration_tokens,
        "training_tokens": outcome.training_tokens,
        "seconds": round(seconds, 3),
        "note": outcome.note,
    }
    return row, model


def _ours(
    settings: dict[str, Any], tokens: Tensor, directory: Path, observer: Observer, *, resume: bool, overwrite: bool
) -> tuple[dict[str, Any], Any]:
    """Run `edkm compress` into `directory` and load what it wrote."""
    config = from_mapping(CompressConfig, {**settings["arguments"], "output": str(directory)})
    report = compress(config, overwrite=overwrite, resume=resume, observer=observer)
    # Both begin with the same blocks.
    limits = [config.calibration_tokens] * (config.importance != "none") + [config.start_tokens] * (
        choose_start(config, sharded=False) != "kmeans"
    )
    texts = [calibration_batches(tokens, config, limit) for limit in limits]
    dense = config.embedding_bits == 16
    row = {
        "bits": config.bits,
        "granularity": config.granularity,
        "decoder_bits_per_weight": report["decoder_bits_per_weight"],
        "weights_bytes": report["weights_bytes"],
        "calibration_tokens": max((sum(batch.numel() for batch in text) for text in texts), default=0),
        "training_tokens": report["training_tokens"],
        "seconds": round(
            sum(value for name, value in report["seconds"].items() if name not in ("load", "evaluate")), 3
        ),
        "note": "embeddings as they came" if dense else f"embeddings at {config.embedding_bits} bits",
        "directory": str(directory),
    }
    return row, load_compressed(directory, dtype=torch.float32, device=settings["device"])


def main(arguments: list[str]) -> int:
    """0: the file has a row or an error; 143: stopped by SIGTERM with its state saved; 130: interrupted."""
    path = Path(arguments[0])
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    progress = Progress()
    observer = Observer(progress.track, progress.show, progress.say)
    result: dict[str, Any]
    try:
        row = measure(
            settings,
            load_file(arguments[1]),
            path.with_name(path.stem),
            observer,
            resume="--resume" in arguments,
            overwrite="--overwrite" in arguments,
        )
        result = {"row": row}
    except Preempted:
        return 143
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        result = {"error": " ".join(str(error).split())}
    except Exception as error:  # a fault in one method must not cost the others; the traceback is on standard error
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    write_json(path, {"settings": settings, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
