"""`edkm eval` and `edkm generate`: load anything, measure it or let it write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from edkm_cli import data as texts
from edkm_cli import models
from edkm_cli.config import UserError
from edkm_cli.evaluate import Track, decode_speed, footprint, no_progress, peak_memory_bytes, perplexity
from edkm_cli.hf import load_any
from edkm_cli.nn.swap import dequantize_model


def evaluate_model(
    name: str,
    *,
    data: str,
    context: int,
    max_windows: int | None,
    dtype: str,
    device: str,
    speed: bool = False,
    trust_remote_code: bool = False,
    track: Track = no_progress,
) -> dict[str, Any]:
    """The result of `edkm eval` (design section 9's keys): a local file is evaluated whole, a data set on its test split.

    Raises UserError for a model or text that cannot be had.
    """
    _check_dtype(dtype)
    source = models.resolve(name)
    documents = texts.load_documents(data, "all" if Path(data).suffix else "test")
    model = load_any(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    tokenizer = models.load_tokenizer(source, trust_remote_code=trust_remote_code)
    tokens = texts.tokenize(documents, tokenizer)
    start = time.perf_counter()
    measured = perplexity(model, tokens, context=context, max_windows=max_windows, track=track)
    size = footprint(model)
    result = {
        "model": name,
        "data": data,
        "context": measured.context,
        "windows": measured.windows,
        "tokens": measured.tokens,
        "perplexity": measured.perplexity,
        "dtype": dtype,
        "device": device,
        "weights_bytes": models.stored_bytes(source) or size.weights_bytes,
        "decoder_bits_per_weight": size.decoder_bits_per_weight,
        "model_bits_per_weight": size.model_bits_per_weight,
    }
    if speed:
        result["prefill_tokens_per_second"] = measured.windows * measured.context / measured.seconds
        result["decode_tokens_per_second"] = decode_speed(model, tokens[: min(32, measured.context)])
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
