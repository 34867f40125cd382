"""`edkm generate`: load anything and let it write."""

from __future__ import annotations

import time
from typing import Any

import torch

from edkm_cli import models
from edkm_cli.config import UserError
from edkm_cli.hf import load_any
from edkm_cli.nn.swap import dequantize_model


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
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """The result of `edkm generate`: greedy where `temperature` is None, sampled else. Raises UserError."""
    models.check_dtype(dtype)
    if not prompt:
        raise UserError("the prompt must not be empty; give a text to continue")
    source = models.resolve(name)
    model = load_any(name, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    tokenizer = models.load_tokenizer(source, trust_remote_code=trust_remote_code)
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
