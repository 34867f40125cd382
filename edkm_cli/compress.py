"""One compression run from the model's name to a verified checkpoint: the steps of `edkm compress`, in order."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from edkm_cli import data, models, report
from edkm_cli.config import CompressConfig, UserError
from edkm_cli.environment import hardware, versions
from edkm_cli.evaluate import Track, footprint, no_progress, peak_memory_bytes, perplexity
from edkm_cli.export.checkpoint import write_checkpoint
from edkm_cli.export.directory import OutputDirectory
from edkm_cli.format import QuantizationSpec, read_spec, write_json
from edkm_cli.hf import load
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.sensitivity import collect_importance
from edkm_cli.nn.swap import (
    LINEAR,
    Swap,
    check_geometry,
    decoder_bits_per_weight,
    palettize_embeddings,
    plan_swaps,
    swap_linears,
)
from edkm_cli.resume import Checkpoints, fingerprint, require_same
from edkm_cli.train import train

_CALIBRATION_LENGTH = 1024


@dataclass(frozen=True)
class Observer:
    """How a run shows itself: `track` wraps long loops, `show` adds a short text to the current one, `say` prints."""

    track: Track = no_progress
    show: Callable[[str], None] = lambda text: None
    say: Callable[[str], None] = lambda text: None


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.perf_counter() - start, 3)


def choose_device(device: str) -> str:
    """`auto` is CUDA where there is one. Raises UserError for a device this machine lacks."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"--device must be one this machine has, but {device!r} is not available; use cpu or auto")
    return device


def choose_dtype(dtype: str, device: str) -> str:
    """`auto` is bfloat16 on CUDA and float32 on a CPU."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.startswith("cuda") else "float32"


def meta_model(config: CompressConfig) -> Any:
    """The dense model on the meta device: shapes without weights. Raises UserError for an unknown model."""
    from transformers import AutoModelForCausalLM

    source = models.resolve(config.model)
    if source.is_local and source.gguf_file is None and read_spec(source.location) is not None:
        raise UserError(f"--model {config.model} is compressed already; give the uncompressed model")
    architecture = models.load_config(source, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(architecture, trust_remote_code=config.trust_remote_code)


def plan(config: CompressConfig) -> tuple[Any, list[Swap]]:
    """The meta model and what becomes of its modules. Raises UserError where the geometry does not fit."""
    model = meta_model(config)
    swaps = plan_swaps(model, embedding_bits=embedding_bits(config), skip=config.skip)
    check_geometry(swaps, config.granularity)
    return model, swaps


def embedding_bits(config: CompressConfig) -> int | None:
    """16 in the configuration means dense."""
    return None if config.embedding_bits == 16 else config.embedding_bits


def spec_of(config: CompressConfig, swaps: list[Swap]) -> QuantizationSpec:
    return QuantizationSpec(
        bits=config.bits,
        granularity=config.granularity,
        lut_dtype=config.lut_dtype,
        embedding_bits=embedding_bits(config),
        skipped=[swap.name for swap in swaps if swap.reason],
    )


def evaluation_tokens(config: CompressConfig, tokenizer: Any) -> Tensor:
    """What perplexities are measured on: --eval-data as a whole, or the held-out part of the first --data."""
    name = config.eval_data or config.data[0]
    split = "all" if config.eval_data and Path(name).suffix else "test"
    return data.tokenize(data.load_documents(name, split), tokenizer)


def calibration_batches(tokens: Tensor, config: CompressConfig, device: str) -> list[Tensor]:
    """The first blocks of a seeded shuffle, together at most `calibration_tokens` tokens (and at least one block)."""
    length = min(_CALIBRATION_LENGTH, tokens.numel(), max(config.calibration_tokens, 2))
    blocks = data.Blocks(tokens, length, seed=config.seed)
    count = max(1, min(len(blocks), config.calibration_tokens // length))
    return [blocks.batch(index, 1).to(device) for index in range(count)]


def compress(
    config: CompressConfig, *, overwrite: bool = False, resume: bool = False, observer: Observer | None = None
) -> dict[str, Any]:
    """Run `edkm compress` and return its report (design section 9's keys).

    With `resume`, an unfinished run in `DIR.partial` goes on from its newest checkpoint and ends with the same weights
    as if it had not been interrupted; where there is none, the run starts, and a finished one is returned as it is.

    Raises UserError for anything the user can mend, before the first expensive step wherever that is possible; the
    output directory then is as it was.
    """
    watch = observer or Observer()
    clock = Clock()
    finished = finished_report(config) if resume else None
    if finished is not None:
        watch.say(f"{config.output} is finished already")
        return finished
    output = OutputDirectory(config.output, overwrite=overwrite)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    torch.manual_seed(config.seed)
    source = models.resolve(config.model)
    meta, swaps = plan(config)
    del meta
    spec = spec_of(config, swaps)

    with clock.phase("load"):
        tokenizer = models.load_tokenizer(source, trust_remote_code=config.trust_remote_code)
        tokens = data.training_tokens(list(config.data), tokenizer)
        held_out = evaluation_tokens(config, tokenizer)
        blocks = data.Blocks(tokens, config.sequence_length, seed=config.seed)
        watch.say(f"loading {config.model} ({dtype}, {device})")
        model = models.load_dense(
            source, dtype=dtype, device=device, trust_remote_code=config.trust_remote_code, progress=False
        )
    measured: dict[str, float | None] = dict.fromkeys(("original", "start", "trained", "exported"))

    def measure(name: str, subject: Any) -> None:
        with clock.phase("evaluate"):
            measured[name] = perplexity(
                subject,
                held_out,
                context=config.context,
                max_windows=config.eval_windows,
                track=watch.track,
                description=f"perplexity, {name}",
            ).perplexity

    original = footprint(model)
    output.require_space(needed_bytes(config, original.parameters))
    identity = fingerprint(config, model, tokens)
    unfinished = output.marked() if resume else None
    if unfinished is not None:
        require_same(unfinished["fingerprint"], identity, output.partial)
        measured.update(unfinished["perplexity"])
    else:
        measure("original", model)
    teacher = copy.deepcopy(model).requires_grad_(False) if config.distill and config.steps else None
    with clock.phase("start"):
        start(model, swaps, spec, config, tokens, device=device, track=watch.track)
    if unfinished is None:
        measure("start", model)
    staging = output.begin(keep=unfinished is not None)
    output.mark({"fingerprint": identity, "perplexity": measured})
    checkpoints = Checkpoints(staging, keep=config.keep)
    offloaded: dict[str, Any] = {}
    if config.steps:
        with clock.phase("train"):
            model, offloaded = train(
                model,
                teacher,
                blocks,
                config,
                device=device,
                metrics=staging / "metrics.jsonl",
                checkpoints=checkpoints,
                track=watch.track,
                show=watch.show,
            )
        del teacher
        measure("trained", model)
    with clock.phase("export"):
        write_checkpoint(model, tokenizer, staging, spec, track=watch.track)
        exported = load(staging, dtype=getattr(torch, dtype), device=device)
    measure("exported", exported)

    size = footprint(exported)
    result = {
        "model": config.model,
        "output": str(output.path),
        "perplexity": measured,
        "evaluation": {
            "data": config.eval_data or f"held-out tenth of {config.data[0]}",
            "context": config.context,
            "windows": min(config.eval_windows, max(1, held_out.numel() // config.context)),
            "tokens": held_out.numel(),
        },
        "weights_bytes": models.weight_files_bytes(staging),
        "original_weights_bytes": 2 * original.parameters,
        "parameters": size.parameters,
        "decoder_bits_per_weight": decoder_bits_per_weight(
            swaps, bits=config.bits, granularity=config.granularity, lut_dtype=config.lut_dtype
        ),
        "model_bits_per_weight": size.model_bits_per_weight,
        "steps": config.steps,
        "training_tokens": config.steps * config.batch_size * config.gradient_accumulation * config.sequence_length,
        "seconds": clock.seconds,
        **({"offload": offloaded} if offloaded else {}),
        "peak_memory_bytes": peak_memory_bytes(device),
        "swapped": [swap.to_mapping() for swap in swaps if not swap.reason],
        "skipped": [swap.to_mapping() for swap in swaps if swap.reason],
        "config": asdict(config),
        "versions": versions(),
        "hardware": hardware(device),
    }
    write_json(staging / "report.json", result)
    card = report.model_card(result, base_model=None if source.is_local else source.location)
    (staging / "README.md").write_text(card, encoding="utf-8")
    checkpoints.remove()
    output.commit()
    return result


def finished_report(config: CompressConfig) -> dict[str, Any] | None:
    """The report of a finished run with these settings in `--output`, if there is one."""
    try:
        report_ = json.loads((Path(config.output) / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    same = report_.get("config") == json.loads(json.dumps(asdict(config)))
    return report_ if same else None


def needed_bytes(config: CompressConfig, parameters: int) -> int:
    """Disk for the result (at most a byte a weight) and for checkpoints (weight and two moments, in float32)."""
    kept = (config.keep + 1) if config.steps and config.save_every else 0
    return int(parameters * 1.1) + 50_000_000 + kept * 12 * parameters


def start(
    model: Any,
    swaps: list[Swap],
    spec: QuantizationSpec,
    config: CompressConfig,
    tokens: Tensor,
    *,
    device: str,
    track: Track = no_progress,
) -> None:
    """Swap the planned modules in place: linears start at sensitivity-weighted k-means, embeddings are rounded."""
    names = [swap.name for swap in swaps if swap.role == LINEAR and not swap.reason]
    batches = calibration_batches(tokens, config, device) if config.importance != "none" else []
    importance = collect_importance(model, names, track(batches, "calibration", len(batches)), kind=config.importance)
    clustering = Clustering(
        bits=config.bits,
        granularity=config.granularity,
        lut_dtype=config.lut_dtype,
        method=config.method,
        mode=config.mode,
        iterations=config.iterations,
    )
    swapped = swap_linears(
        model, swaps, clustering, importance=lambda name: importance.pop(name, None), temperature=config.temperature
    )
    for _ in track(swapped, "k-means start", len(names)):
        pass
    palettize_embeddings(model, swaps, spec)
