"""`--dequantize`: a model that is quantized already, decoded to a dense one, which then is compressed like any other.

What was lost when it was quantized stays lost: the decoded model is what the run measures, teaches with and starts from.
"""

from __future__ import annotations

from typing import Any

import torch

from edkm_cli import models
from edkm_cli.hf import load
from edkm_cli.quantized import FP8, OWN, quantization_method


def load_source(
    source: models.ModelSource, *, dequantize: bool, dtype: str, device: str = "cpu", trust_remote_code: bool = False
) -> Any:
    """`models.load_dense`, and with `dequantize` also of our own checkpoints and of FP8.

    Raises UserError if the model cannot be had, or cannot be decoded.
    """
    options: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    if not dequantize or source.gguf_file:
        return models.load_dense(source, progress=False, **options)
    config = models.load_config(source, trust_remote_code=trust_remote_code, may_be_quantized=True)
    method = quantization_method(config)
    if method == OWN:
        # Decoded in float32 and rounded once.
        model = load(source.location, dtype=torch.float32, trust_remote_code=trust_remote_code)
        model.dequantize()
        model.to(getattr(torch, dtype))
        model.config._name_or_path, model.config.dtype = source.name, getattr(torch, dtype)
        return model.to(device).eval()
    if method == FP8:
        config.quantization_config["dequantize"] = True
        return models.load_dense(source, progress=False, may_be_quantized=True, config=config, **options)
    return models.load_dense(source, progress=False, **options)
