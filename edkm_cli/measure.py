"""`edkm eval` and `edkm generate`: load anything, measure it or let it write."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from edkm_cli import data as texts
from edkm_cli import models, tasks
from edkm_cli.config import UserError
from edkm_cli.evaluate import Track, decode_speed, footprint, no_progress, peak_memory_bytes, perplexity
from edkm_cli.hf import load_any
from edkm_cli.nn.swap import dequantize_model


def evaluate_model(
    name: str,
    *,
    data: str | None,
    context: int,
    max_windows: int | None,
    dtype: str,
    device: str,
    speed: bool = False,
    trust_remote_code: bool = False,
    benchmarks: Sequence[str] = (),
    task_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 1,
    track: Track = no_progress,
) -> dict[str, Any]:
    """The result of `edkm eval` (design section 9's keys): a local file is evaluated whole, a data set on its test split.

    Without `data` there is no perplexity: it and what belongs to it are None. `benchmarks` are tasks of
    lm-evaluation-harness; `task_path`, `limit`, `num_fewshot` and `batch_size` are theirs (see edkm_cli.tasks).

    Raises UserError for a model, text or task that cannot be had, tasks and text before the model is loaded.
    """
    _check_dtype(dtype)
    source = models.resolve(name)
    if data is None and (speed or not benchmarks):
        raise UserError("--data must name a text: only --tasks work without one; give --data")
    documents = texts.load_documents(data, "all" if Path(data).suffix else "test") if data else None
    loaded: dict[str, Any] = {}
    if benchmarks:
        loaded = tasks.load_tasks(
            benchmarks, task_path=task_path, num_fewshot=num_fewshot, trust_remote_code=trust_remote_code
        )
    model = load_any(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    tokenizer = models.load_tokenizer(source, trust_remote_code=trust_remote_code)
    start = time.perf_counter()
    size = footprint(model)
    result: dict[str, Any] = {"model": name, "data": data}
    result |= dict.fromkeys(("context", "windows", "tokens", "perplexity"))
    if documents is not None:
        tokens = texts.tokenize(documents, tokenizer)
        measured = perplexity(model, tokens, context=context, max_windows=max_windows, track=track)
        result |= {key: getattr(measured, key) for key in ("context", "windows", "tokens", "perplexity")}
    result |= {
        "dtype": dtype,
        "device": device,
        "weights_bytes": models.stored_bytes(source) or size.weights_bytes,
        "decoder_bits_per_weight": size.decoder_bits_per_weight,
        "model_bits_per_weight": size.model_bits_per_weight,
    }
    if speed:
        result["prefill_tokens_per_second"] = measured.windows * measured.context / measured.seconds
        result["decode_tokens_per_second"] = decode_speed(model, tokens[: min(32, measured.context)])
    if loaded:
        dequantize_model(model, getattr(torch, dtype))  # once, not in each of many thousand short passes
        result["tasks"] = tasks.run_tasks(model, tokenizer, loaded, limit=limit, batch_size=batch_size)
        result["lm_eval_version"] = tasks.harness_version()
    result["seconds"] = time.perf_counter() - start
    result["peak_memory_bytes"] = peak_memory_bytes(device)
    return result


def generate_text(
    name: str,
    prompt: str,
    *,
    max_new_tokens: int,
    chat: bool,
    temperature: float | None,
    dequantize: bool,
    dtype: str,
    device: str,
    seed: int,
) -> dict[str, Any]:
    """The result of `edkm generate`: greedy where `temperature` is None, sampled else. Raises UserError."""
    _check_dtype(dtype)
    if not prompt:
        raise UserError("the prompt must not be empty; give a text to continue")
    source = models.resolve(name)
    model = load_any(name, dtype=dtype, device=device)
    tokenizer = models.load_tokenizer(source)
    if chat and not tokenizer.chat_template:
        raise UserError(f"--chat needs a chat template, but the tokenizer of {name} has none; leave --chat out")
    if dequantize:
        dequantize_model(model, getattr(torch, dtype))
    text = prompt
    if chat:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=not chat).to(device)
    inputs.pop("token_type_ids", None)
    torch.manual_seed(seed)
    sampling = {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}
    start = time.perf_counter()
    written = model.generate(**inputs, max_new_tokens=max_new_tokens, **sampling)[0, inputs["input_ids"].shape[1] :]
    seconds = time.perf_counter() - start
    answer = tokenizer.decode(written, skip_special_tokens=True)
    return {
        "model": name,
        "prompt": prompt,
        "text": answer if chat else prompt + answer,
        "new_tokens": len(written),
        "tokens_per_second": len(written) / seconds,
    }


def _check_dtype(dtype: str) -> None:
    if dtype not in models.DTYPES:
        raise UserError(f"--dtype must be one of {', '.join(models.DTYPES)}, got {dtype!r}")
