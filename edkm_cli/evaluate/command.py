"""`edkm eval`: load any causal LM and measure it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edkm_cli import data as texts
from edkm_cli import models
from edkm_cli.contradictions import too_long
from edkm_cli.environment import peak_memory_bytes
from edkm_cli.errors import UserError
from edkm_cli.evaluate import tasks
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.evaluate.limits import judge
from edkm_cli.evaluate.size import footprint
from edkm_cli.evaluate.speed import measure_speed
from edkm_cli.evaluate.verdict import Study, text_row
from edkm_cli.format import read_spec
from edkm_cli.hf import load_any
from edkm_cli.integrity import check_checkpoint, stored_skeleton
from edkm_cli.nn.swap import dequantize_model, is_packed
from edkm_cli.preflight import choose_device
from edkm_cli.progress import Track, no_progress

_SMALL_BYTES = 2**30  # a dense 16-bit model of up to this size is measured in float32, too, which takes twice as much


def evaluate_model(
    name: str, settings: EvalConfig, *, track: Track = no_progress, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The result of `edkm eval` (its keys: docs/results.md): a local file is evaluated whole, a data set on its test split.

    Of several texts each has a row in `texts`; the keys beside it are those of the first. Without a text there is no
    perplexity: it and what belongs to it are None. The reference is measured first, and there is a verdict. `say` gets
    warnings.

    Raises UserError for a model, text or task that cannot be had, tasks and text before the model is loaded.
    """
    dtype, device, reference = settings.dtype, choose_device(settings.device), settings.reference
    models.check_dtype(dtype)
    trust: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    source, names = models.resolve(name), settings.texts
    if len(set(names)) < len(names):
        raise UserError(f"--data must name each text once, got {', '.join(names)}")
    if settings.speed and not names:
        raise UserError("--data must name a text: only --tasks work without one; give --data")
    if reference is not None:
        if source.path is not None and read_spec(source.path) is not None:
            check_checkpoint(source.path, **trust)
        _require_same_words(source, models.resolve(reference), **trust)
    # Most texts are read without it, and a damaged model is better told of by its weights.
    # With a reference it is the reference's: what both get are its tokens, and a saved model may come without.
    late = models.LateTokenizer(source if reference is None else models.resolve(reference), **trust)
    documents = [texts.load_documents(texts.parse_source(text), tokenizer=late) for text in names]
    loaded = tasks.load_tasks(settings) if settings.benchmarks else {}
    load = partial(load_any, dtype=dtype, device=device, trust_remote_code=settings.trust_remote_code)
    model = load(name if reference is None else reference)
    tokens = [texts.tokenize(document, late.tokenizer) for document in documents]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="edkm-reference-") as directory:
        study = Study(settings, tokens, late.tokenizer, Path(directory), loaded, track)
        if reference is not None:
            study.see_reference(model)
            del model  # one of the two at a time
            model = load(name)
        for warning in too_long(model.config, {"--context": settings.context, "--positions": settings.positions or 0}):
            say(f"WARNING: {warning}")
        measured, beside = study.see_model(model)
    compressed = is_packed(model)
    # It is measured in `dtype`, but it weighs what its files do.
    size = footprint(stored_skeleton(source.location, **trust) if compressed else model)
    result: dict[str, Any] = {"model": name, "data": names[0] if names else None}
    result |= dict.fromkeys(("context", "windows", "tokens", "perplexity"))
    if names:
        rows = [text_row(text, figures) for text, figures in zip(names, measured, strict=True)]
        result |= {} if reference is None else {"reference": reference}
        result |= rows[0] | {"texts": rows} | beside
    stored = 1.0 if compressed else (_tensor_bytes(source) or size.weights_bytes) / size.weights_bytes
    result |= {
        "dtype": dtype,
        "device": device,
        "weights_bytes": models.stored_bytes(source) or size.weights_bytes,
        "decoder_bits_per_weight": size.decoder_bits_per_weight * stored,
        "model_bits_per_weight": size.model_bits_per_weight * stored,
    }
    if settings.speed:
        result |= measure_speed(model, tokens[0])
        if is_packed(model):  # the same weights dense, in the same run; nothing below needs them packed
            dequantize_model(model, getattr(torch, dtype))
            result["dense"] = measure_speed(model, tokens[0])
            if device == "cpu" and dtype != "float32" and result["dense"]["weights_resident_bytes"] <= _SMALL_BYTES:
                result["dense_fp32"] = measure_speed(torch.nn.Module.float(model), tokens[0])
                torch.nn.Module.to(model, getattr(torch, dtype))  # exactly what it was; transformers' own `to` refuses
    if loaded:
        result |= study.see_tasks(model)
        result["lm_eval_version"] = tasks.harness_version()
    if reference is not None:
        result["verdict"] = judge(result, settings)
    result["seconds"] = time.perf_counter() - start
    result["peak_memory_bytes"] = peak_memory_bytes(device)
    return result


def _require_same_words(source: models.ModelSource, reference: models.ModelSource, *, trust_remote_code: bool) -> None:
    """Raises UserError where the reference has another vocabulary, as far as the configurations say."""
    options = {"trust_remote_code": trust_remote_code, "may_be_quantized": True}
    ours, theirs = (models.load_config(one, **options).get_text_config(decoder=True) for one in (source, reference))
    if ours.vocab_size != theirs.vocab_size:
        raise UserError(
            f"--reference must have the model's vocabulary, {ours.vocab_size} tokens, got {theirs.vocab_size}; give the "
            "model that was compressed"
        )


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
