"""One method of `edkm compare`, in a process of its own, which keeps its peak memory, failures and random state apart.

    python -m edkm_cli.research.compare.worker DIR/rtn.json FOLDER [--resume] [--overwrite] [--remember]

The file holds `settings` (all that the row depends on); the process adds `row`, or `error` with the reason. In the folder
are the tokens of the `training` text and of each that is measured (`evaluation.0`, ...), and the uncompressed model's
predictions on these, which a process with `--remember` puts there, and does nothing else.

Other engines' models, a file of llama.cpp or a directory of mlx-lm (`convert -q`, its DWQ), are decoded to the numbers that
they hold, and measured as every other row is.
"""

import json
import math
import os
import re
import sys
import time
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from edkm_cli import models
from edkm_cli.compress import compress
from edkm_cli.config import CompressConfig
from edkm_cli.data import Blocks
from edkm_cli.data.cache import end_with
from edkm_cli.environment import peak_memory_bytes
from edkm_cli.errors import Preempted, UserError, explained
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.evaluate.reference import Recorder, RememberedPredictions
from edkm_cli.export.formats import mlx
from edkm_cli.export.formats.folder import opened, read_model
from edkm_cli.export.formats.options import Options
from edkm_cli.files import TORCH_DTYPES, write_json
from edkm_cli.format import read_spec
from edkm_cli.hf import load as load_compressed
from edkm_cli.preflight import choose_device
from edkm_cli.progress import Progress, Track
from edkm_cli.research.baselines import SHARED, load
from edkm_cli.research.baselines.outcome import Task, decoder_linears
from edkm_cli.research.compare.config import FILES, GGUF, OURS, PREDICTIONS, TOKENS, UNCOMPRESSED, Entry
from edkm_cli.settings import from_mapping

NOTHING, BLOCKS, END_TO_END = "none", "block by block", "end to end"
EMBEDDING_BYTES = 2  # a baseline's embeddings and norms are stored as they came, in 16 bits
FREE = {"training": NOTHING, "calibration_tokens": 0, "training_tokens": 0, "seconds": 0.0, "note": ""}
_GGUF_DECODER = re.compile(r"blk\.\d+\..*weight")


def facts_of(entry: Entry) -> tuple[Path, dict[str, Any]]:
    """The file or directory of an entry, and the facts of its row that headers give: `bits`, `granularity` (the commonest
    tensor type, or the group), `decoder_bits_per_weight`, `weights_bytes` and a `note`.

    Raises UserError for options, and for what is no such file.
    """
    options, gguf = dict(entry.options), entry.method == GGUF
    if set(options) != {"file"}:
        raise UserError(f"{entry.method} must be written {entry.method}:FILE, without options, got {entry.label!r}")
    path = Path(options["file"]).expanduser().absolute()
    rule = f"{entry.method}:FILE must name a {'.gguf file' if gguf else 'directory of mlx-lm'}, but {path}"
    if not (path.suffix == ".gguf" and path.is_file() if gguf else (path / "config.json").is_file()):
        raise UserError(f"{rule} is none; check the path")
    with explained(f"{rule} cannot be read as one"):
        return path, (_gguf_facts if gguf else _mlx_facts)(path)


def _gguf_facts(path: Path) -> dict[str, Any]:
    """A type's blocks hold their scales, so bits per weight are the bytes of the decoder's matrices by their weights."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    matrices = [one for one in reader.tensors if len(one.shape) > 1 and _GGUF_DECODER.fullmatch(one.name)]
    weights: Counter[str] = Counter()
    for one in matrices:
        weights[one.tensor_type.name] += int(one.n_elements)
    bits_per_weight = 8 * sum(int(one.n_bytes) for one in matrices) / weights.total()
    common = weights.most_common(1)[0][0]
    bits = re.search(r"Q(\d)", common)
    mixed = ", ".join(f"{count / weights.total():.0%} {kind}" for kind, count in weights.most_common())
    ends = ("token_embd.weight", "output.weight")
    others = sorted({one.tensor_type.name for one in reader.tensors if one.name in ends})
    note = f"decoder {mixed}; embeddings {', '.join(others)}; decoded to bfloat16"
    matrix = reader.fields.get("quantize.imatrix.dataset")
    return {
        "bits": int(bits[1]) if bits else round(bits_per_weight),
        "granularity": common,
        "decoder_bits_per_weight": bits_per_weight,
        "weights_bytes": sum(int(one.n_bytes) for one in reader.tensors),
        "note": note + (f"; importance matrix from {matrix.contents()}" if matrix is not None else ""),
    }


def _mlx_facts(path: Path) -> dict[str, Any]:
    """`quantization` of config.json, and the bytes of a matrix with its scales and biases by its weights."""
    config, files = opened(path)
    usual = config["quantization"]
    sizes = {name: TORCH_DTYPES[one.dtype].itemsize * math.prod(one.shape) for name, one in files.tensors.items()}
    packed = [name.removesuffix(".scales") for name in sizes if name.endswith(".scales")]
    bits = {module: usual.get(module, usual)["bits"] for module in packed}
    layers = [module for module in bits if ".layers." in module]
    stored = sum(sizes.get(f"{module}.{leaf}", 0) for module in layers for leaf in ("weight", "scales", "biases"))
    others = ", ".join(f"at {bits[module]} bits" for module in bits.keys() - layers) or "as they came"
    return {
        "bits": usual["bits"],
        "granularity": f"group:{usual['group_size']}",
        "decoder_bits_per_weight": stored / sum(sizes[f"{module}.weight"] / bits[module] for module in layers),
        "weights_bytes": sum(sizes.values()),
        "note": f"embeddings {others}; decoded to float32",
    }


def opened_model(settings: dict[str, Any]) -> Any:
    """The model of a row, decoded. Raises UserError for one that is not of the compared model's sizes."""
    path, source = Path(settings["file"]), models.resolve(settings["file"])
    configs = [models.load_config(models.resolve(settings["model"])), models.load_config(source, may_be_quantized=True)]
    for name in ("vocab_size", "hidden_size", "num_hidden_layers"):
        wanted, given = (getattr(config.get_text_config(), name, None) for config in configs)
        if wanted != given:
            raise UserError(f"{path} must be a file of {settings['model']}, but its {name} is {given}, not {wanted}")
    if settings["method"] == GGUF:
        return models.load_dense(source, dtype="float32", device=settings["device"], progress=False)
    return read_model(path, mlx.read(path, Options())).to(settings["device"])


def measure(
    settings: dict[str, Any], tokens: dict[str, Tensor], directory: Path, predictions: Path, **how: Any
) -> dict[str, Any]:
    """The row of one method. `directory` is where `edkm` puts its checkpoint, `predictions` where those of the
    uncompressed model are, `how` what `compress` is told beside its configuration. Raises UserError."""
    reference, track = RememberedPredictions(predictions), how["observer"].track
    row: dict[str, Any]
    if settings["method"] == OURS:
        row, model = _ours(settings, directory, **how)
    elif settings["method"] == UNCOMPRESSED:
        model = _dense(settings)
        size = EMBEDDING_BYTES * sum(parameter.numel() for parameter in model.parameters())
        row = {**FREE, "bits": 16, "granularity": "", "decoder_bits_per_weight": 16.0, "weights_bytes": size}
    elif settings["method"] in FILES:
        row, model = {**FREE, **settings["facts"]}, opened_model(settings)
    else:
        row, model = _baseline(settings, tokens["training"], track)
    measured = []
    for ids, windows in _texts(settings, tokens, track):
        known = reference if reference.knows_text(ids, settings["context"]) else None
        measured.append(perplexity(model, ids, reference=known, **windows))
    keys = ("perplexity", "kl_per_token", "top1_agreement", "windows", "context")
    texts = [{key: getattr(one, key) for key in keys} for one in measured]
    return {
        **row,
        **texts[0],
        "texts": [{"data": name, **figures} for name, figures in zip(settings["texts"], texts, strict=True)],
        "evaluation_seconds": round(sum(one.seconds for one in measured), 3),
        "peak_memory_bytes": peak_memory_bytes(settings["device"]),
    }


def _texts(settings: dict[str, Any], tokens: dict[str, Tensor], track: Track) -> list[tuple[Tensor, dict[str, Any]]]:
    """The tokens of each text that is measured, in their order, and how much of it is."""
    windows = {"context": settings["context"], "max_windows": settings["eval_windows"], "track": track}
    return [(tokens[f"evaluation.{index}"], windows) for index in range(len(tokens) - 1)]


def remember(settings: dict[str, Any], tokens: dict[str, Tensor], predictions: Path, track: Track) -> None:
    """Put the uncompressed model's predictions on the measured texts into a directory. Raises UserError."""
    model = _dense(settings)
    recorder = Recorder(model, predictions)
    for ids, windows in _texts(settings, tokens, track):
        perplexity(model, ids, seen=recorder.see, **windows)
    if recorder.failure:
        raise UserError(recorder.failure)


def _dense(settings: dict[str, Any]) -> Any:
    source = models.resolve(settings["model"], trust_remote_code=settings["trust_remote_code"])
    return models.load_dense(source, dtype="float32", device=settings["device"], progress=False)


def _baseline(settings: dict[str, Any], tokens: Tensor, track: Track) -> tuple[dict[str, Any], Any]:
    """Quantize a dense model in place by a method of `edkm_cli.research.baselines`."""
    calibration, arguments = settings["calibration"], dict(settings["arguments"])
    blocks = Blocks(tokens, calibration["sequence_length"], seed=arguments["seed"])
    count = min(calibration["samples"], len(blocks))
    batches = [blocks.batch(index, 1).to(settings["device"]) for index in range(count)]
    model = _dense(settings)
    quantized = sum(layer.weight.numel() for layer in decoder_linears(model).values())
    others = sum(parameter.numel() for parameter in model.parameters()) - quantized
    torch.manual_seed(arguments["seed"])
    start = time.perf_counter()
    task = Task(model, batches, track=track, **{name: arguments.pop(name) for name in SHARED if name in arguments})
    outcome = load(settings["method"]).quantize(task, **arguments)
    trained = BLOCKS if settings["method"] == "autoround" else END_TO_END
    row = {
        "training": trained if outcome.training_tokens else NOTHING,
        "bits": task.bits,
        "granularity": settings["granularity"],
        "decoder_bits_per_weight": outcome.bits_per_weight,
        "weights_bytes": outcome.stored_bytes + EMBEDDING_BYTES * others,
        "calibration_tokens": outcome.calibration_tokens,
        "training_tokens": outcome.training_tokens,
        "seconds": round(time.perf_counter() - start, 3),
        "note": outcome.note,
    }
    return row, model


def _ours(settings: dict[str, Any], directory: Path, **how: Any) -> tuple[dict[str, Any], Any]:
    """Run `edkm compress` into `directory` and load what it wrote."""
    config = from_mapping(CompressConfig, {**settings["arguments"], "output": str(directory)})
    report = compress(config, **how)
    config = replace(config, **report["resolved"])
    calibrated = (config.calibration_tokens or 0) if config.importance != "none" else 0
    fitted = (config.start_tokens or 0) if config.start != "kmeans" else 0
    spec = read_spec(directory)
    assert spec is not None
    row = {
        "training": END_TO_END if config.steps else BLOCKS if config.start == "reconstructed" else NOTHING,
        "bits": config.bits,
        "granularity": config.granularity,
        "decoder_bits_per_weight": report["decoder_bits_per_weight"],
        "weights_bytes": report["weights_bytes"],
        "calibration_tokens": min(max(calibrated, fitted), sum(one["tokens"] for one in report["data"]["sources"])),
        "training_tokens": report["training_tokens"],
        "seconds": round(sum(took for name, took in report["seconds"].items() if name not in ("evaluate", "dense")), 3),
        "note": f"embeddings {f'at {spec.embedding_widths} bits' if spec.packs_embeddings else 'as they came'}",
        "directory": str(directory),
    }
    trust = settings["trust_remote_code"]
    return row, load_compressed(directory, dtype=torch.float32, device=settings["device"], trust_remote_code=trust)


def main(arguments: list[str]) -> int:
    """0: the file has a row or an error; 143: stopped by SIGTERM with its state saved; 130: interrupted. With `--remember`
    0: the predictions are there; 2: they are not, of which standard error has the reason."""
    path, predictions = Path(arguments[0]), Path(arguments[1]) / PREDICTIONS
    settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
    observer = Progress()
    result: dict[str, Any]
    try:
        choose_device(settings["device"])  # whose kernels and peaks are those of the current GPU
        tokens = load_file(predictions.with_name(TOKENS))
        if "--remember" in arguments:
            remember(settings, tokens, predictions, observer.track)
            return 0
        how = {"resume": "--resume" in arguments, "overwrite": "--overwrite" in arguments, "observer": observer}
        result = {"row": measure(settings, tokens, path.with_name(path.stem), predictions, **how)}
    except Preempted:
        return 143
    except KeyboardInterrupt:
        return 130
    except UserError as error:
        result = {"error": " ".join(str(error).split())}
    except Exception as error:  # a fault in one method must not cost the others; the traceback is on standard error
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
    if "--remember" in arguments:
        observer.say(f"  KL is not measured: {result['error']}")
        return 2
    write_json(path, {"settings": settings, **result})
    return 0


if __name__ == "__main__":
    Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    sys.exit(main(sys.argv[1:]))
