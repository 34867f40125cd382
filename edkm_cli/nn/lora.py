"""LoRA under clustering (arXiv 2106.09685): what is clustered is `w0 + s B A`, and only A, B and the LUTs train.

w0 stays as it was loaded: 16 bits per weight, without gradient or optimizer state. The sum exists only inside the forward
or backward of one layer at a time (`edkm_cli.clustering.linear`). So training takes little more memory than the model
itself. The plain w0 is the uncompressed model, so the teacher of distillation needs no second copy.

peft provides configuration, injection, initialisation, scaling and the adapter's file format. Its usual layer wraps the one
it adapts, which renames every parameter (`q_proj.base_layer.weight`). `ClusteredLora` takes the place of the layer
instead and *is* a `ClusteredLinear`: training, export and checkpoints find the names they know. The float32 sum is what
is snapped, never a merge rounded to w0's dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from edkm_cli.clustering.linear import LowRank
from edkm_cli.errors import UserError
from edkm_cli.nn.clustered import ClusteredLinear, clustered_layers

_ADAPTER = "default"
_INSIDE = "clustered"
_WEIGHTS_FILE = "adapter_model.safetensors"


class ClusteredLora(ClusteredLinear, LoraLayer):
    """A `ClusteredLinear` that trains peft's `lora_A` (rank, in) and `lora_B` (out, rank), float32, and not its weight.

    It shares the storage of the layer it replaces. peft makes it: see `add_lora`.
    """

    lora_A: Any
    lora_B: Any
    r: Any
    lora_alpha: Any
    scaling: Any
    # peft's layers look for these two in a layer that they wrap; here they are parameters of the layer itself.
    weight: Any = property(lambda self: nn.Module.__getattr__(self, "weight"))
    bias: Any = property(lambda self: nn.Module.__getattr__(self, "bias"))

    def __init__(self, layer: ClusteredLinear, adapter_name: str, *, seed: int, r: int, lora_alpha: float, **more: Any):
        super().__init__(
            layer.weight,
            layer.bias,
            layer.centroids,
            layer.clustering,
            temperature=layer.temperature,
            name=layer.name,
            importance=layer.importance,
        )
        # peft asks the wrapped layer for its shape; a linear without memory answers, and nothing stays wrapped.
        LoraLayer.__init__(self, nn.Linear(self.in_features, self.out_features, bias=False, device="meta"))
        del self.base_layer
        self._active_adapter = adapter_name
        with torch.random.fork_rng(devices=[]):  # peft draws A on the CPU, then moves it
            torch.default_generator.manual_seed(_layer_seed(seed, layer.name))
            LoraLayer.update_layer(self, adapter_name, r, lora_alpha=lora_alpha, **more)
        self.lora_A.float()  # peft gives both the weight's dtype
        self.lora_B.float()

    def low_rank(self) -> LowRank:
        return LowRank(self.lora_A[_ADAPTER].weight, self.lora_B[_ADAPTER].weight, self.scaling[_ADAPTER])

    def without_update(self) -> ClusteredLinear:
        """A plain layer with the float32 sum as its weight: it snaps to the same indices."""
        layer = ClusteredLinear(
            self.effective_weight(),
            self.bias,
            self.centroids,
            self.clustering,
            temperature=self.temperature,
            name=self.name,
            importance=self.importance,
        )
        return layer.train(self.training)


def _layer_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1


def _config(names: list[str], rank: int, alpha: float) -> Any:
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, bias="none", task_type="CAUSAL_LM")


def add_lora(model: nn.Module, *, rank: int, alpha: float, seed: int = 0) -> None:
    """Freeze a clustered model, or a part of one, and give each `ClusteredLinear` a low-rank update to train, in place.

    The update is `alpha / rank * B @ A`. B starts at zero, so nothing changes yet, A at random: Kaiming uniform, from
    `seed` and the layer's name alone, on any device. What trains is A, B and, in mode `straight-through` or without
    iterations, the LUT entries; norms, biases, embeddings and skipped linears do not. Parameters keep their names; A and
    B are `<path>.lora_A.default.weight` and `<path>.lora_B.default.weight`.

    Raises UserError if the rank is below 1 or alpha is not a positive number.
    """
    if rank < 1:
        raise UserError(
            f"--lora-rank must be at least 1 to train with LoRA, got {rank}; 0 trains the weights themselves"
        )
    if not (math.isfinite(alpha) and alpha > 0):
        raise UserError(f"--lora-alpha must be a positive number, got {alpha}; twice the rank is usual")
    names, training = list(clustered_layers(model)), model.training
    if names:  # a part of a model may have none
        config = _config([f"{_INSIDE}.{name}" for name in names], rank, alpha)
        config._register_custom_module({ClusteredLinear: partial(ClusteredLora, seed=seed)})
        # Of a model whose configuration it knows to have fused experts, peft would take names that end in `down_proj` for
        # those experts. Inside a module without configuration, the names are what they say.
        inject_adapter_in_model(config, nn.ModuleDict({_INSIDE: model}), adapter_name=_ADAPTER)
        model.train(training)
    # peft's own freezing takes all that a tuner layer holds for the adapter's, also w0.
    model.requires_grad_(False)
    for layer in lora_layers(model).values():
        layer.lora_A.requires_grad_(True)
        layer.lora_B.requires_grad_(True)
        layer.centroids.requires_grad_(layer.clustering.trains_luts)


def lora_layers(model: nn.Module) -> dict[str, ClusteredLora]:
    """Module path -> layer, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ClusteredLora)}


def merge_lora(model: nn.Module) -> None:
    """Fold the updates into the weights, in place: each layer becomes a plain `ClusteredLinear` that trains as usual.

    Its weight is the float32 sum, so evaluation and export stay the same to the bit; a 16-bit model grows. Export does
    not need this.
    """
    for name, layer in lora_layers(model).items():
        model.set_submodule(name, layer.without_update())


@contextmanager
def dense_weights(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the uncompressed one: each `ClusteredLora` multiplies with its plain w0, in evaluation mode.

    With dense embeddings the logits are those of the model before it was clustered, to the bit. For distillation: run
    the teacher's forward inside, under `torch.no_grad()`. The student's forward *and backward* belong outside.

    Raises ValueError if a clustered layer's weight is trained: it is not the uncompressed model's any more.
    """
    layers = clustered_layers(model)
    for name, layer in layers.items():
        if layer.weight.requires_grad:
            raise ValueError(f"the weight of {name} is trained, so the uncompressed model needs a copy of its own")
    training = model.training
    model.eval()
    for layer in layers.values():
        layer.dense = True
    try:
        yield
    finally:
        for layer in layers.values():
            layer.dense = False
        model.train(training)


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """A and B of each layer, named as in peft's adapter files."""
    tensors = {}
    for name, layer in lora_layers(model).items():
        low_rank = layer.low_rank()
        tensors[f"base_model.model.{name}.lora_A.weight"] = low_rank.a.detach()
        tensors[f"base_model.model.{name}.lora_B.weight"] = low_rank.b.detach()
    return tensors


def save_adapter(model: nn.Module, directory: Path, *, base_model: str | None = None) -> list[str]:
    """Write the updates as an ordinary peft adapter into an existing directory; returns the files' names.

    `peft.PeftModel.from_pretrained(uncompressed_model, directory)` adds them to the dense weights, without clustering.
    `base_model` is the hub id or directory that the adapter names as its own. The model must not be sharded.
    """
    layers = lora_layers(model)
    first = next(iter(layers.values()))
    config = _config(sorted(layers), first.r[_ADAPTER], first.lora_alpha[_ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base_model, True
    config.save_pretrained(str(directory))
    tensors = {name: tensor.cpu().contiguous() for name, tensor in adapter_tensors(model).items()}
    save_file(tensors, directory / _WEIGHTS_FILE, metadata={"format": "pt"})
    return ["adapter_config.json", _WEIGHTS_FILE]
