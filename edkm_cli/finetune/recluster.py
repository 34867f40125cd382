"""From a packed model with an adapter to a clustered one: what `edkm merge` starts from.

The update B A of a layer is small beside the gaps of its table: rounded to the nearest entries, nearly every weight would
fall back to the entry it had. So weights are compensated column by column, and decoder layer by decoder layer trained to
give what the adapted one gives (`edkm_cli.initialize.reconstruct`), from the tables that are there; then all together, to
predict what the adapted model predicts. Layers without an update are clustered, too: their weights are entries of their
tables already.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from edkm_cli.errors import UserError
from edkm_cli.nn.clustered import ClusteredLinear, Clustering, clustered_layers
from edkm_cli.nn.held import parameters_of
from edkm_cli.runtime.palettized import PalettizedEmbedding, PalettizedHead, PalettizedLinear, to_dense


def cluster_again(model: PeftModel, clustering: Clustering) -> Any:
    """The model without peft, its adapter added to the weights (float32), each layer with the tables it had, in place.

    Embeddings and layers that are not packed keep what they hold. Raises UserError for an adapter of packed embeddings.
    """
    base: Any = model.base_model.model
    tables: dict[str, tuple[torch.Tensor, int]] = {}
    for name, module in list(base.named_modules()):
        if isinstance(module, PalettizedLinear):
            path = name.removesuffix(".base_layer")
            tables[path] = parameters_of(module), module.bits
            base.set_submodule(name, to_dense(module, torch.float32))
        elif isinstance(module, (PalettizedEmbedding, PalettizedHead)) and name.endswith(".base_layer"):
            raise UserError(
                f"the adapter changes {name.removesuffix('.base_layer')}, whose weight has a palette of its own that cannot "
                "be merged into; train an adapter with --target-modules all-linear"
            )
    merged = model.merge_and_unload()
    for path, (table, bits) in tables.items():
        linear = merged.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        if not bool(linear.weight.isfinite().all()):
            raise UserError(f"the adapter must be finite, but its update of {path} is not")
        own = replace(clustering, bits=bits)
        layer = ClusteredLinear(linear.weight, linear.bias, table, own, temperature=1.0, name=path)
        merged.set_submodule(path, layer)
    return merged.requires_grad_(False).eval()


def decoded_copy(model: Any) -> Any:
    """A frozen copy of a clustered model that computes with its weights as they are: the adapted model, for a teacher."""
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    for layer in clustered_layers(teacher).values():
        layer.dense = True
    return teacher
