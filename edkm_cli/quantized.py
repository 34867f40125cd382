"""Models that are quantized already: which ones are refused, and which ones `--dequantize` can decode."""

from __future__ import annotations

from typing import Any

from edkm_cli.errors import UserError

# Our own checkpoints, and weights in float8 with a scale for each block (DeepSeek's), which transformers decodes.
OWN, FP8 = "edkm", "fp8"
DECODABLE = (OWN, FP8)


def quantization_method(config: Any) -> str | None:
    """The `quant_method` of a transformers configuration; None of a dense model (a GGUF file counts as one: it is
    decoded always), `unknown` where it does not say."""
    given = getattr(config, "quantization_config", None)
    if given is None:
        return None
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    method = getattr(method, "value", method)
    return None if method == "gguf" else str(method or "unknown")


def require_unquantized(name: str, config: Any) -> None:
    """Raises UserError for a checkpoint whose weights are quantized: clustering needs the numbers themselves."""
    method = quantization_method(config)
    if method is None:
        return
    remedy = "--dequantize, to start from what is left of it" if method in DECODABLE else _OUTSIDE
    raise UserError(
        f"--model must not be quantized yet, but {name} is ({method}); give the model it was made from, or {remedy}"
    )


_OUTSIDE = (
    "decode it first, which --dequantize cannot: AutoModelForCausalLM.from_pretrained(...).dequantize() and "
    "save_pretrained(...)"
)


def as_if_dense(name: str, config: Any) -> None:
    """Let a configuration describe the decoded model, in place. Raises UserError for what cannot be decoded here."""
    method = quantization_method(config)
    if method is not None and method not in DECODABLE:
        require_unquantized(name, config)
    if method is not None:
        del config.quantization_config
