"""transformers integration: `import edkm_cli.hf`, then `AutoModelForCausalLM.from_pretrained(DIR)` just works.

transformers has no entry points for quantizers: without this import it warns that it does not know "edkm", builds a
dense model and fills it with random weights. So load with `edkm_cli.load(DIR)`, which imports this module, verifies the
files and refuses a checkpoint that does not fit; or import this module first.
"""

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from edkm_cli import models
from edkm_cli.errors import UserError, explained
from edkm_cli.format import QUANT_METHOD, QuantizationSpec, read_spec
from edkm_cli.initialize.sharded import open_layers
from edkm_cli.integrity import AGAIN, check_checkpoint
from edkm_cli.model_files import from_pretrained, header, quantization_method, stays_wide
from edkm_cli.nn.swap import dequantize_model, palettize_skeleton
from edkm_cli.packing import fault
from edkm_cli.progress import quiet_bars
from edkm_cli.runtime.experts import split_experts
from edkm_cli.runtime.one_token import shorten
from edkm_cli.runtime.palettized import PackedModule


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

    is_trainable = True  # adapters on packed layers: their products are differentiable in the input
    requires_calibration = True  # a dense model is compressed by `edkm compress`, not while loading

    quantization_config: EdkmConfig

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> Any:
        told, stored = getattr(model.config, "distributed_config", None), None
        if any((getattr(told, f"{kind}_size", 1) or 1) > 1 for kind in ("tp", "ep", "pp")):
            rule = "transformers divides no packed matrices among processes"
            raise UserError(f"{rule}; serve with vLLM, or use one process")
        if checkpoint_files:
            stored = {name for file in checkpoint_files for name, *_ in header(Path(file), remedy=AGAIN)}
        foreign = foreign_modules(model, stored) if stored is not None else set()
        if self.quantization_config.spec.split_experts:  # before anything is found by its name
            split_experts(model)
        spec = named_as(model, self.quantization_config.spec)
        spec = self.quantization_config.spec = replace(spec, skipped=[*spec.skipped, *sorted(foreign)])
        palettize_skeleton(model, spec)
        if stored is not None:
            require_stored(model, stored, foreign)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, module in model.named_modules():
            for leaf, buffer in module.named_buffers(recurse=False) if isinstance(module, PackedModule) else ():
                if buffer.is_meta:
                    raise UserError(f"{name}.{leaf} is missing from the checkpoint, or offloaded; {AGAIN}")
                if rule := fault(leaf, buffer):
                    raise UserError(f"{name}.{leaf} must be {rule}; {AGAIN}")
        shorten(model)
        # What is saved again has the names it was loaded by, which are those of the modules.
        model._weight_conversions = []
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        name = str(dtype or "float32").removeprefix("torch.")  # a configuration may hold the dtype as text
        before = str(model.get_input_embeddings().weight.dtype)  # the configuration's does not follow `to`
        dequantize_model(model, getattr(torch, name))
        if name != before.removeprefix("torch."):  # the rest, too, but what is computed, as rotary frequencies are
            for path, tensor in model.state_dict(keep_vars=True).items():
                if tensor.is_floating_point() and not stays_wide(model, path, getattr(torch, name)):
                    tensor.data = tensor.data.to(getattr(torch, name))
        model.config.dtype = getattr(torch, name)
        model.__dict__.pop("_weight_conversions", None)  # it has the names of its family again
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    def get_state_dict_and_metadata(self, model: Any) -> Any:
        """Raises UserError for a dense module in a packed one's place, which would be saved and not load again."""
        adapted, skipped = getattr(model, "_hf_peft_config_loaded", False), self.quantization_config.spec.skipped
        for name, module in model.named_modules() if not adapted else ():
            if isinstance(module, PackedModule) and name.endswith(".base_layer"):
                rule = f"{name} is inside an adapter's layer"
                raise UserError(f"{rule}; take the adapter off by peft's unload() to save it")
            dense = isinstance(module, (nn.Linear, nn.Embedding)) and not isinstance(module, PackedModule)
            if dense and name not in skipped:
                kind = type(module).__name__
                raise UserError(f"{name} must be packed to be saved, but is a {kind}; dequantize() the model first")
        return super().get_state_dict_and_metadata(model)


def named_as(model: Any, spec: QuantizationSpec) -> QuantizationSpec:
    """The spec with its modules named as in `model`, which may be the base of what was compressed, or have a head that
    it lacked: transformers finds tensors in the same way. Modules outside of a base model are left out."""
    modules = {name for name, _ in model.named_modules()}
    prefix, is_base = f"{model.base_model_prefix}.", model.base_model is model

    def named(name: str) -> str | None:
        if name in modules:
            return name
        if not is_base:
            return prefix + name if prefix + name in modules else name
        return name.removeprefix(prefix) if name.startswith(prefix) else None

    def renamed(values: dict[str, Any]) -> dict[str, Any]:
        return {new: value for name, value in values.items() if (new := named(name)) is not None}

    bits, granularity = renamed(spec.module_bits), renamed(spec.module_granularity)
    skipped = list(renamed(dict.fromkeys(spec.skipped)))
    return replace(spec, skipped=skipped, module_bits=bits, module_granularity=granularity)


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
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ["$^"]
    absent = re.compile("|".join(f"({pattern})" for pattern in patterns))
    tied, outside = set(model.all_tied_weights_keys), tuple(f"{name}." for name in foreign)
    for name in model.state_dict():
        if name not in known and name not in tied and not name.startswith(outside) and not absent.search(name):
            raise UserError(f"{name} is missing from the checkpoint; {AGAIN}")


def load(
    directory: str | Path, *, dtype: torch.dtype | str = "auto", device: str = "cpu", trust_remote_code: bool = False
) -> Any:
    """Load a compressed checkpoint as a causal LM whose weights stay packed in memory.

    Args:
        dtype: of activations and dense tensors (`auto`: as stored); LUTs keep theirs.
        trust_remote_code: run the Python files of a checkpoint whose model is none of transformers' own.

    Raises UserError for a directory that is none, truncated or altered.
    """
    with explained(f"dtype and device must be torch's and there, got {dtype} and {device}", "; use auto and cpu"):
        torch.finfo(torch.float32 if dtype == "auto" else getattr(torch, str(dtype).removeprefix("torch.")))
        torch.empty(0, device=device)
    check_checkpoint(directory, trust_remote_code=trust_remote_code)
    with quiet_bars(), explained(f"{directory} does not load", f"; {AGAIN}"):
        model = from_pretrained(str(directory), dtype=dtype, local_files_only=True, trust_remote_code=trust_remote_code)
    return model.to(device).eval()


def load_any(source: models.ModelSource, *, dtype: str, device: str) -> Any:
    """A causal LM, compressed by any method or not."""
    if source.is_local and source.gguf_file is None and read_spec(source.location) is not None:
        options: dict[str, Any] = {"device": device, "trust_remote_code": source.trust_remote_code}
        return load(source.location, dtype=getattr(torch, dtype), **options)
    return models.load_dense(source, dtype=dtype, device=device, may_be_quantized=True)


def load_source(source: models.ModelSource, *, dequantize: bool, dtype: str, device: str = "cpu") -> Any:
    """`models.load_dense`, and with `dequantize` also of our own checkpoints, of FP8 and MXFP4, decoded to a dense
    model. What was lost when it was quantized stays lost: the decoded model is what a run measures and starts from.

    Raises UserError if the model cannot be had, or cannot be decoded.
    """
    if dequantize and not source.gguf_file:
        if (method := quantization_method(models.load_config(source, may_be_quantized=True))) == QUANT_METHOD:
            # Decoded in float32 and rounded once.
            directory, trust = models.safetensors_directory(source), source.trust_remote_code
            model = load(directory, dtype=torch.float32, trust_remote_code=trust).dequantize(getattr(torch, dtype))
            if source.splits:
                split_experts(model)
            model.config._name_or_path, model.config.dtype = source.name, getattr(torch, dtype)
            return model.to(device).eval()
        if method is not None:
            if (layers := open_layers(source, dtype=getattr(torch, dtype), device=device, dequantize=True)) is None:
                rule = f"--dequantize reads {method} matrix by matrix, which files of {source.name} do not allow"
                raise UserError(f"{rule}; give the model that it was made from")
            for path in layers.paths:
                with layers.whole(path):
                    layers.stay(path)
            return layers.model
    return models.load_dense(source, dtype=dtype, device=device, progress=False)


class LateTokenizer:
    """A model's tokenizer, loaded when something of it is first asked for."""

    def __init__(self, source: models.ModelSource):
        self._source = source

    @cached_property
    def tokenizer(self) -> Any:
        """Raises UserError if it cannot be had."""
        return models.load_tokenizer(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)
