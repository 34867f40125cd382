"""Where a model's decoder layers are."""

from __future__ import annotations

from typing import Any

from torch import nn

from edkm_cli.errors import UserError


def decoder_layers(model: Any) -> dict[str, nn.Module]:
    """The model's decoder layers, in order: module path -> module.

    They are of the classes that its family names (`_no_split_modules`); where it names none, the one list of as many
    modules of one class as the configuration has layers. Raises UserError where there is no such list.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    named = {name: module for name, module in model.named_modules() if type(module).__name__ in kinds}
    if named:
        return named
    count = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and len({type(layer) for layer in module}) == 1
    }
    if len(lists) != 1:
        raise UserError(
            "--sharding full and methods that work layer by layer must know the decoder layers, but "
            f"{type(model).__name__} does not name them (_no_split_modules); use --sharding none, or another method"
        )
    ((path, layers),) = lists.items()
    return {f"{path}.{index}": layer for index, layer in enumerate(layers)}
