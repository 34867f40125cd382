"""transformers integration: `import edkm_cli.hf`, then `AutoModelForCausalLM.from_pretrained(DIR)` just works.

transformers has no entry points for quantizers: without this import it warns that it does not know "edkm", builds a
dense model and fills it with random weights. So load with `edkm_cli.load(DIR)`, which imports this module, verifies the
files and refuses a checkpoint that does not fit; or import this module first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
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
from edkm_cli.format import QUANT_METHOD, QuantizationSpec, is_plain_name, read_json, read_spec, verify_checksums
from edkm_cli.model_files import check_numbers, no_larger_than
from edkm_cli.nn.one_token import shorten
from edkm_cli.nn.palettized import PALETTIZED
from edkm_cli.nn.swap import dequantize_model, palettize_skeleton, share_inputs
from edkm_cli.progress import quiet_bars

_AGAIN = "copy or export the checkpoint again"
_MAX_BUFFER_BYTES = 2**30


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

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        stored = stored_names(checkpoint_files) if checkpoint_files else None
        foreign = foreign_modules(model, stored) if stored is not None else set()
        palettize_skeleton(model, self.quantization_config.spec, stays=foreign.__contains__)
        if stored is not None:
            require_stored(model, stored, foreign)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in model.named_modules():
            if isinstance(module, PALETTIZED):
                _check_loaded(name, module)
        share_inputs(model)
        shorten(model)
        # What is saved again has the names it was loaded by, which are those of the modules.
        model._weight_conversions = []
        return model

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> torch.dtype | None:
        """LUTs and scales keep the dtype they are stored in, whatever `dtype` the model is loaded with."""
        if any(str(target).endswith((".lut", ".scale", ".lut_scale")) for target in _targets(converter)):
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
        """Adapters on packed layers train: their products are differentiable in the input."""
        return True


def stored_names(files: Iterable[str | Path]) -> set[str]:
    """The tensor names of safetensors files. Raises UserError for a file that is none."""
    names: set[str] = set()
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is not a whole safetensors file ({error}); {_AGAIN}") from error
    return names


def foreign_modules(model: Any, stored: set[str]) -> set[str]:
    """Linears and embeddings that the checkpoint does not know, because the model has another head than was compressed:
    they are outside the base model, are not its output embedding, and the files hold nothing of them."""
    base, prefix = model.base_model, f"{model.base_model_prefix}."
    if base is model:
        return set()
    head = model.get_output_embeddings()
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, nn.Embedding)) and module is not head and not name.startswith(prefix)
        if not any(key.startswith(f"{name}.") for key in stored)
    }


def require_stored(model: Any, stored: set[str], foreign: set[str]) -> None:
    """Raises UserError naming the first tensor of a palettized model that its files lack: without it transformers would
    use whatever the memory holds. The tensors of `foreign` modules may lack."""
    prefix = f"{model.base_model_prefix}."
    known = stored | {key.removeprefix(prefix) for key in stored} | {prefix + key for key in stored}
    absent = re.compile(
        "|".join(f"({pattern})" for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ["$^"])
    )
    tied = set(model.all_tied_weights_keys)
    outside = tuple(f"{name}." for name in foreign)
    for name in model.state_dict():
        if name not in known and name not in tied and not name.startswith(outside) and not absent.search(name):
            raise UserError(f"{name} is missing from the checkpoint; {_AGAIN}")


def _targets(converter: Any) -> list[str]:
    return list(getattr(converter, "target_patterns", None) or [])


def _check_loaded(name: str, module: nn.Module) -> None:
    for buffer_name, buffer in module.named_buffers(recurse=False):
        if buffer.is_meta:
            raise UserError(f"{name}.{buffer_name} is missing from the checkpoint; {_AGAIN}")
        if buffer_name != "indices" and not bool(buffer.float().isfinite().all()):
            raise UserError(f"{name}.{buffer_name} must be finite, but holds NaN or Inf; {_AGAIN}")


def check_checkpoint(directory: str | Path, *, trust_remote_code: bool = False) -> QuantizationSpec:
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
    if (directory / "generation_config.json").is_file():  # transformers reads it together with the weights
        read_json(directory / "generation_config.json", remedy=_AGAIN)
    stored = stored_tensors(directory)
    expected = expected_tensors(directory, spec, limit=len(stored), trust_remote_code=trust_remote_code)
    for name in sorted(expected.keys() | stored.keys()):
        wanted, found = expected.get(name, "absent"), stored.get(name, "nothing")
        if wanted != found and wanted != _FLOATING.sub("floating", found):
            raise UserError(f"{directory}: tensor {name[:100]} must be {wanted}, got {found}; {_AGAIN}")
    return spec


def skeleton(
    config: Any, spec: QuantizationSpec, dtype: torch.dtype | None = None, *, trust_remote_code: bool = False
) -> Any:
    """The palettized model of a configuration on the meta device, as loading builds it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype or config.dtype or torch.float32, trust_remote_code=trust_remote_code
        )
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


def read_config(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a checkpoint. Raises UserError for one that describes no model, or more layers
    or experts than any has: building such a model would not end."""
    from transformers import AutoConfig

    check_numbers(directory / "config.json", read_json(directory / "config.json", remedy=_AGAIN), remedy=_AGAIN)
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _no_model(directory, error) from error


def _no_model(directory: Path, error: Exception) -> UserError:
    if "trust_remote_code" in str(error):
        return UserError(
            f"{directory} brings Python files of its own, which would be run; read them, and if you trust them give "
            "--trust-remote-code (trust_remote_code=True)"
        )
    told = " ".join(str(error).split())[:200]
    return UserError(
        f"{directory}/config.json does not describe a model that can be built ({type(error).__name__}: {told}); {_AGAIN}"
    )


def expected_tensors(
    directory: Path, spec: QuantizationSpec, *, limit: int, trust_remote_code: bool = False
) -> dict[str, str]:
    """Tensor name -> "dtype (shape)" that a checkpoint with this config must hold, of a model of about `limit` tensors.
    What is not packed may be of any floating dtype, since some models keep a few tensors in float32.

    Raises UserError for a config that describes no model.
    """
    config = read_config(directory, trust_remote_code=trust_remote_code)
    try:
        with no_larger_than(directory, tensors=limit, remedy=_AGAIN):
            model = skeleton(config, spec, trust_remote_code=trust_remote_code)
        hidden = sum(_bytes(buffer) for _, buffer in model.named_non_persistent_buffers())
        if hidden > _MAX_BUFFER_BYTES:
            raise UserError(
                f"{directory}/config.json describes a model that needs {hidden} bytes beside its weights, more than the "
                f"{_MAX_BUFFER_BYTES} that are given; {_AGAIN}"
            )
        return describe_tensors(model, skeleton_tensors(model))
    except UserError:
        raise
    except Exception as error:
        raise _no_model(directory, error) from error


def describe_tensors(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Tensor name -> what it must be in a checkpoint of the palettized `model`."""
    packed = {path for path, module in model.named_modules() if isinstance(module, PALETTIZED)}
    described = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        text = _describe(tensor.dtype, tuple(tensor.shape))
        described[name] = text if path in packed and leaf != "bias" else _FLOATING.sub("floating", text)
    return described


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def stored_tensors(directory: Path) -> dict[str, str]:
    """Tensor name -> "dtype (shape)" of the safetensors files of a directory. Raises UserError for files that are not
    whole, are links out of it, hold a tensor twice, or are not those of the index."""
    files = sorted(directory.glob("model*.safetensors"))
    if not files:
        raise UserError(f"{directory} has no model.safetensors; {_AGAIN}")
    index = directory / "model.safetensors.index.json"
    placed: dict[str, str] | None = None
    if index.is_file():
        weight_map = read_json(index, remedy=_AGAIN).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise UserError(f"{index} must map tensors to files, but does not; {_AGAIN}")
        placed = weight_map
        missing = [
            name for name in sorted(set(placed.values())) if not is_plain_name(name) or not (directory / name).is_file()
        ]
        if missing:
            raise UserError(f"{directory} lacks {missing[0][:100]!r}, which its index names; {_AGAIN}")
    elif files != [directory / "model.safetensors"]:
        raise UserError(f"{directory} holds {files[0].name}, but no index that names it; {_AGAIN}")
    stored: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    part = opened.get_slice(name)
                    if name in stored or (placed is not None and placed.get(name) != file.name):
                        raise UserError(f"{file} holds {name[:100]}, which its index does not place there; {_AGAIN}")
                    stored[name] = _describe(_DTYPES.get(part.get_dtype()), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is not a whole safetensors file ({error}); {_AGAIN}") from error
    absent = sorted(set(placed or ()) - set(stored))
    if absent:
        raise UserError(f"{directory} lacks tensor {absent[0][:100]}, which its index names; {_AGAIN}")
    return stored


_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
_FLOATING = re.compile(r"^(float32|float16|bfloat16)\b")


def _describe(dtype: torch.dtype | None, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def load(
    directory: str | Path, *, dtype: torch.dtype | str = "auto", device: str = "cpu", trust_remote_code: bool = False
) -> Any:
    """Load a compressed checkpoint as a causal LM whose weights stay packed in memory.

    Args:
        directory: what `edkm compress` wrote.
        dtype: of activations and dense tensors (`auto`: as stored); LUTs keep theirs.
        device: `cpu`, `cuda`, `cuda:1` ...
        trust_remote_code: run the Python files of a checkpoint whose model is none of transformers' own.

    Raises UserError for a directory that is none, truncated or altered.
    """
    check_checkpoint(directory, trust_remote_code=trust_remote_code)
    with quiet_bars(True):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                str(directory), dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except UserError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            told = " ".join(str(error).split())[:200]
            raise UserError(f"{directory} cannot be loaded ({type(error).__name__}: {told}); {_AGAIN}") from error
    return model.to(device).eval()


def load_any(name: str, *, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False) -> Any:
    """A causal LM, compressed by any method or not, from anything `--model` takes."""
    source = models.resolve(name)
    if source.is_local and source.gguf_file is None and read_spec(source.location) is not None:
        return load(source.location, dtype=getattr(torch, dtype), device=device, trust_remote_code=trust_remote_code)
    return models.load_dense(
        source, dtype=dtype, device=device, trust_remote_code=trust_remote_code, may_be_quantized=True
    )
