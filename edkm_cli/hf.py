"""transformers integration: `import edkm_cli.hf`, then `AutoModelForCausalLM.from_pretrained(DIR)` just works.

transformers has no entry points for quantizers: without this import it warns that it does not know "edkm", builds a
dense model and fills it with random weights. So load with `edkm_cli.load(DIR)`, which imports this module, verifies the
files and refuses a checkpoint that does not fit; or import this module first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.quantizers import (
    HfQuantizer,
    register_quantization_config,
    register_quantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from edkm_cli import models
from edkm_cli.config import UserError
from edkm_cli.format import QUANT_METHOD, QuantizationSpec, read_spec, verify_checksums
from edkm_cli.nn.palettized import PALETTIZED, share_inputs
from edkm_cli.nn.swap import dequantize_model, palettize_skeleton


@register_quantization_config(QUANT_METHOD)
class EdkmConfig(QuantizationConfigMixin):
    """The `quantization_config` of a palettized checkpoint, for transformers. Raises UserError for a broken one."""

    def __init__(self, **values: Any):
        self.spec = QuantizationSpec.from_mapping({"quant_method": QUANT_METHOD, **values})
        self.quant_method: Any = QUANT_METHOD

    def to_dict(self) -> dict[str, Any]:
        return self.spec.to_mapping()

    def __iter__(self) -> Any:
        yield from self.to_dict().items()


@register_quantizer(QUANT_METHOD)
class EdkmQuantizer(HfQuantizer):
    """Builds the palettized modules before the weights are read, and checks them after."""

    requires_calibration = True  # a dense model is compressed by `edkm compress`, not while loading

    quantization_config: EdkmConfig

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        palettize_skeleton(model, self.quantization_config.spec)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, PALETTIZED):
                _check_loaded(name, module)
        share_inputs(model)
        return model

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """LUTs and scales keep the dtype they are stored in, whatever `dtype` the model is loaded with."""
        if any(str(target).endswith((".lut", ".scale")) for target in _targets(converter)):
            return None
        return super().get_new_dtype(converter, param, dtype)

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        name = str(dtype or "float32").removeprefix("torch.")  # a configuration may hold the dtype as text
        dequantize_model(model, getattr(torch, name))
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False


def _targets(converter: Any) -> list[str]:
    return list(getattr(converter, "target_patterns", None) or [])


def _check_loaded(name: str, module: nn.Module) -> None:
    for buffer_name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            raise UserError(f"{name}.{buffer_name} is missing from the checkpoint; copy or export it again")
        if buffer_name != "indices" and not bool(buffer.float().isfinite().all()):
            raise UserError(f"{name}.{buffer_name} must be finite, but holds NaN or Inf; copy or export it again")


def check_checkpoint(directory: str | Path) -> QuantizationSpec:
    """Check a compressed directory without loading it: config, checksums, tensor names, dtypes and shapes.

    Raises UserError naming the first thing that is wrong.
    """
    directory = Path(directory)
    spec = read_spec(directory)
    if spec is None:
        raise UserError(
            f"{directory} must be a checkpoint written by edkm compress, but its config.json says otherwise"
        )
    verify_checksums(directory)
    expected, stored = expected_tensors(directory, spec), stored_tensors(directory)
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) != stored.get(name):
            raise UserError(
                f"{directory}: tensor {name} must be {expected.get(name, 'absent')}, got {stored.get(name, 'nothing')}; "
                "copy or export the checkpoint again"
            )
    return spec


def skeleton(config: Any, spec: QuantizationSpec, dtype: torch.dtype | None = None) -> Any:
    """The palettized model of a configuration on the meta device, as loading builds it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
    palettize_skeleton(model, spec)
    return model


def skeleton_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors a checkpoint stores, tied ones once, in the order in which `save_pretrained` fills shards."""
    tied = set(model.all_tied_weights_keys)
    state = model.state_dict()
    return {name: state[name] for name in sorted(state, key=_natural_order) if name not in tied}


def _natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sorts layer 2 before layer 10."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def expected_tensors(directory: Path, spec: QuantizationSpec) -> dict[str, str]:
    """Tensor name -> "dtype (shape)" that a checkpoint with this config must hold; dense tensors may be any float."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        model = skeleton(config, spec)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{directory}/config.json does not describe a model ({error}); export it again") from error
    return {name: _describe(tensor.dtype, tuple(tensor.shape)) for name, tensor in skeleton_tensors(model).items()}


def stored_tensors(directory: Path) -> dict[str, str]:
    """Tensor name -> "dtype (shape)" of the safetensors files of a directory."""
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{directory} has no model.safetensors; copy or export the checkpoint again")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError) as error:
            raise UserError(f"{index} cannot be read ({error}); copy or export the checkpoint again") from error
        missing = [name for name in sorted(names) if Path(name).name != name or not (directory / name).is_file()]
        if missing:
            raise UserError(f"{directory} lacks {missing[0]}, which its index names; copy or export it again")
    stored = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    stored[name] = _describe(_DTYPES.get(part.get_dtype()), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{file} is not a whole safetensors file ({error}); copy or export the checkpoint again"
            ) from error
    return stored


_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}


def _describe(dtype: torch.dtype | None, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def load(directory: str | Path, *, dtype: torch.dtype | str = "auto", device: str = "cpu") -> Any:
    """Load a compressed checkpoint as a causal LM whose weights stay packed in memory.

    Args:
        directory: what `edkm compress` wrote.
        dtype: of activations and dense tensors (`auto`: as stored); LUTs keep theirs.
        device: `cpu`, `cuda`, `cuda:1` ...

    Raises UserError for a directory that is none, truncated or altered.
    """
    check_checkpoint(directory)
    with models.quiet_bars(True):
        model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def load_any(name: str, *, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False) -> Any:
    """A causal LM, compressed or not, from anything `--model` takes."""
    source = models.resolve(name)
    if source.is_local and source.gguf_file is None and read_spec(source.location) is not None:
        return load(source.location, dtype=getattr(torch, dtype), device=device)
    return models.load_dense(source, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
