"""`edkm eval`: load any causal LM and measure it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from edkm_cli import data as texts
from edkm_cli import models
from edkm_cli.environment import peak_memory_bytes
from edkm_cli.errors import UserError
from edkm_cli.evaluate import tasks
from edkm_cli.evaluate.perplexity import perplexity
from edkm_cli.evaluate.reference import logits_of
from edkm_cli.evaluate.size import footprint
from edkm_cli.evaluate.speed import measure_speed
from edkm_cli.hf import load_any
from edkm_cli.integrity import stored_skeleton
from edkm_cli.nn.swap import dequantize_model, is_packed
from edkm_cli.progress import Track, no_progress
from edkm_cli.runtime.palettized import PALETTIZED

_SMALL_BYTES = 2**30  # a dense 16-bit model of up to this size is measured in float32, too, which takes twice as much


def evaluate_model(
    name: str,
    *,
    data: str | Sequence[str] | None,
    context: int,
    max_windows: int | None,
    dtype: str,
    device: str,
    reference: str | None = None,
    speed: bool = False,
    trust_remote_code: bool = False,
    benchmarks: Sequence[str] = (),
    task_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    track: Track = no_progress,
) -> dict[str, Any]:
    """The result of `edkm eval` (its keys: docs/results.md): a local file is evaluated whole, a data set on its test split.

    Of several texts each has a row in `texts`; the keys beside it are those of the first. Without `data` there is no
    perplexity: it and what belongs to it are None. `benchmarks` are tasks of
    lm-evaluation-harness; `task_path`, `limit`, `num_fewshot` and `batch_size` are theirs (see edkm_cli.evaluate.tasks).
    `reference` is the uncompressed model that predictions are compared with; it is loaded beside the model.

    Raises UserError for a model, text or task that cannot be had, tasks and text before the model is loaded.
    """
    models.check_dtype(dtype)
    source = models.resolve(name)
    names = [data] if isinstance(data, str) else list(data or ())
    if len(set(names)) < len(names):
        raise UserError(f"--data must name each text once, got {', '.join(names)}")
    if not names and (speed or not benchmarks):
        raise UserError("--data must name a text: only --tasks work without one; give --data")
    if reference is not None and not names:
        raise UserError("--reference must come with a text on which models are compared; give --data")
    if reference is not None:
        models.resolve(reference)
    # Most texts are read without it, and a damaged model is better told of by its weights.
    late = models.LateTokenizer(source, trust_remote_code=trust_remote_code)
    documents = {}
    for text in names:
        documents[text] = texts.load_documents(texts.parse_source(text), tokenizer=late)
    loaded: dict[str, Any] = {}
    if benchmarks:
        loaded = tasks.load_tasks(
            benchmarks, task_path=task_path, num_fewshot=num_fewshot, trust_remote_code=trust_remote_code
        )
    model = load_any(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    tokenizer = late.tokenizer
    start = time.perf_counter()
    compressed = any(isinstance(module, PALETTIZED) for module in model.modules())
    # It is measured in `dtype`, but it weighs what its files do.
    size = footprint(stored_skeleton(source.location, trust_remote_code=trust_remote_code) if compressed else model)
    result: dict[str, Any] = {"model": name, "data": names[0] if names else None}
    result |= dict.fromkeys(("context", "windows", "tokens", "perplexity"))
    tokens = [texts.tokenize(found, tokenizer) for found in documents.values()]
    if names:
        theirs = None
        if reference is not None:
            theirs = logits_of(load_any(reference, dtype=dtype, device=device, trust_remote_code=trust_remote_code))
            result["reference"] = reference
        keys = ["context", "windows", "tokens", "perplexity"]
        keys += ["kl_per_token", "top1_agreement"] if reference is not None else []
        rows = []
        for text, ids in zip(names, tokens, strict=True):
            measured = perplexity(model, ids, context=context, max_windows=max_windows, track=track, reference=theirs)
            rows.append({"data": text} | {key: getattr(measured, key) for key in keys})
        del theirs
        result |= rows[0] | {"texts": rows}
    stored = 1.0 if compressed else (_tensor_bytes(source) or size.weights_bytes) / size.weights_bytes
    result |= {
        "dtype": dtype,
        "device": device,
        "weights_bytes": models.stored_bytes(source) or size.weights_bytes,
        "decoder_bits_per_weight": size.decoder_bits_per_weight * stored,
        "model_bits_per_weight": size.model_bits_per_weight * stored,
    }
    if speed:
        result |= measure_speed(model, tokens[0])
        if is_packed(model):  # the same weights dense, in the same run; nothing below needs them packed
            dequantize_model(model, getattr(torch, dtype))
            result["dense"] = measure_speed(model, tokens[0])
            if device == "cpu" and dtype != "float32" and result["dense"]["weights_resident_bytes"] <= _SMALL_BYTES:
                result["dense_fp32"] = measure_speed(torch.nn.Module.float(model), tokens[0])
                torch.nn.Module.to(model, getattr(torch, dtype))  # exactly what it was; transformers' own `to` refuses
    if loaded:
        dequantize_model(model, getattr(torch, dtype))  # once, not in each of many thousand short passes
        result["tasks"] = tasks.run_tasks(model, tokenizer, loaded, limit=limit, batch_size=batch_size)
        result["lm_eval_version"] = tasks.harness_version()
    result["seconds"] = time.perf_counter() - start
    result["peak_memory_bytes"] = peak_memory_bytes(device)
    return result


def _tensor_bytes(source: models.ModelSource) -> int | None:
    """Bytes of the tensors in a model's files on this machine, without headers; None for a hub model."""
    stored, path = models.stored_bytes(source), source.path
    if stored is None or path is None or path.is_file():
        return stored
    headers = 0
    for file in path.glob("*.safetensors"):
        with open(file, "rb") as opened:
            headers += 8 + int.from_bytes(opened.read(8), "little")
    return stored - headers
