"""`edkm eval`: load any causal LM and measure it, and how fast it reads and writes."""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from edkm_cli import data as texts
from edkm_cli import model_files, models
from edkm_cli.config import known_positions, too_long
from edkm_cli.environment import least_seconds, peak_memory_bytes
from edkm_cli.errors import UserError
from edkm_cli.evaluate import tasks
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.evaluate.limits import judge
from edkm_cli.evaluate.reference import other_vocabulary
from edkm_cli.evaluate.size import footprint
from edkm_cli.evaluate.verdict import Study, text_row
from edkm_cli.format import read_spec
from edkm_cli.hf import LateTokenizer, load_any
from edkm_cli.integrity import check_checkpoint, stored_skeleton
from edkm_cli.nn.hooks import changed, evaluating
from edkm_cli.nn.swap import dequantize_model, is_packed
from edkm_cli.preflight import choose_device
from edkm_cli.progress import Track, no_progress

_SMALL_BYTES = 2**30  # a dense 16-bit model of up to this size is measured in float32, too, which takes twice as much


def evaluate_model(
    name: str, settings: EvalConfig, *, track: Track = no_progress, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """The result of `edkm eval` (its keys: docs/results.md): a local file is evaluated whole, a data set on its test split.

    Of several texts each has a row in `texts`; the keys beside it are those of the first. Without a text there is no
    perplexity: it and what belongs to it are None. The reference is measured first, for a verdict. `say` gets warnings.

    Raises UserError for a model, text or task that cannot be had, tasks and text before the model is loaded.
    """
    dtype, device, reference = settings.dtype, choose_device(settings.device), settings.reference
    trust: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    source, names = models.resolve(name, **trust), settings.texts
    first = source if reference is None else models.resolve(reference, **trust)
    if len(set(names)) < len(names):
        raise UserError(f"--data must name each text once, got {', '.join(names)}")
    if settings.speed and not names:
        raise UserError("--data must name a text: only --tasks work without one; give --data")
    if reference is not None:
        if source.path is not None and read_spec(source.path) is not None:
            check_checkpoint(source.path, **trust)
        configs = (models.load_config(one, may_be_quantized=True) for one in (source, first))
        ours, theirs = (config.get_text_config(decoder=True).vocab_size for config in configs)
        if ours != theirs:
            raise other_vocabulary(ours, theirs)
    # Most texts are read without it, and a damaged model is better told of by its weights.
    # With a reference it is the reference's: what both get are its tokens, and a saved model may come without.
    late = LateTokenizer(first)
    most = texts.characters_of(settings.max_windows and settings.max_windows * settings.context)
    documents = [texts.load_documents(texts.parse_source(text), tokenizer=late, characters=most) for text in names]
    loaded = tasks.load_tasks(settings) if settings.benchmarks else {}
    model = load_any(first, dtype=dtype, device=device)
    lengths = {"--context": settings.context * bool(names), "--positions": settings.positions or 0}
    for warning in too_long(model.config, lengths):
        say(f"WARNING: {warning}")
    tokens = [texts.tokenize(document, late.tokenizer) for document in documents]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="edkm-reference-", ignore_cleanup_errors=True) as directory:
        study = Study(settings, tokens, late.tokenizer, Path(directory), loaded, track)
        if reference is not None:
            study.see_reference(model)
            del model  # one of the two at a time
            model = load_any(source, dtype=dtype, device=device)
        measured, beside = study.see_model(model)
    if not source.is_local:  # its files are on this machine by now
        source = models.resolve(str(models.safetensors_directory(source, fetch=False)), **trust)
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
        "weights_bytes": models.stored_bytes(source) or size.weights_bytes,  # where its files are elsewhere
        "decoder_bits_per_weight": size.decoder_bits_per_weight * stored,
        "model_bits_per_weight": size.model_bits_per_weight * stored,
    }
    if settings.speed:
        result |= measure_speed(model, tokens[0])
        if compressed:  # the same weights dense, in the same run; nothing below needs them packed
            dequantize_model(model, getattr(torch, dtype))
            result["dense"] = measure_speed(model, tokens[0])
    if loaded:
        result |= study.see_tasks(model) | {"lm_eval_version": tasks.harness_version()}
    dense = result.get("dense")
    if dense and device == "cpu" and dtype != "float32" and dense["weights_resident_bytes"] <= _SMALL_BYTES:
        result["dense_fp32"] = measure_speed(torch.nn.Module.float(model), tokens[0])  # last: nothing casts it back
    if reference is not None:
        result["verdict"] = judge(result, settings)
    result["seconds"] = time.perf_counter() - start
    result["peak_memory_bytes"] = peak_memory_bytes(device)
    return result


def _tensor_bytes(source: models.ModelSource) -> int:
    """Bytes of the tensors in a model's files, without headers."""
    stored, path = models.stored_bytes(source), source.path
    assert stored is not None
    assert path is not None
    if path.is_file():
        return stored
    # The first eight bytes of a file are the size of the header behind them.
    return stored - sum(8 + int(np.fromfile(file, "<u8", count=1)[0]) for file in model_files.weight_files(path))


_PREFILL_TOKENS = 512
_RUNS = 3


@torch.no_grad()
def decode_speed(model: Any, prompt: Tensor, *, new_tokens: int = 16) -> float:
    """Tokens per second of greedy generation after a prompt (tokens,) int64, the prompt's time left out."""
    ids = prompt.to(model.device)[None]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def seconds(tokens: int, runs: int = _RUNS) -> float:
        run = partial(model.generate, ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        return least_seconds(run, ids.device, runs)

    with changed(model, generation_config=GenerationConfig()):  # nothing that the model's own settings add
        seconds(2, 1)  # caches and kernels warm up
        return new_tokens / max(seconds(new_tokens + 1) - seconds(1), 1e-9)


@torch.no_grad()
def prefill_speed(model: Any, tokens: Tensor) -> float:
    """Tokens per second of reading a prompt, of at most 512 of `tokens` (n,), up to its first new token."""
    ids = tokens[: min(_PREFILL_TOKENS, known_positions(model.config) or _PREFILL_TOKENS)].to(model.device)[None]
    run = partial(model, ids, logits_to_keep=1, use_cache=True)
    run()  # caches and kernels warm up
    return ids.shape[1] / least_seconds(run, ids.device, _RUNS)


def resident_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers in memory, shared ones once, and of tables that `PalettizedLinear` has made."""
    tables = (t for module in model.modules() if (t := vars(module).get("_table")) is not None)
    return sum({t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers(), *tables)}.values())


def measure_speed(model: Any, tokens: Tensor) -> dict[str, float | int]:
    """The keys that `edkm eval --speed` adds, for a text (n,) of token ids."""
    with evaluating(model):
        return {
            "prefill_tokens_per_second": prefill_speed(model, tokens),
            "decode_tokens_per_second": decode_speed(model, tokens[:32]),
            "weights_resident_bytes": resident_bytes(model),
        }
