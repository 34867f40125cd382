"""Where a model differs from a reference: the outputs of its decoder layers, of each matrix in them, and of its head.

The reference passes some tokens once; what its layers give, and what some of these tokens bring into each matrix and out
of it, goes into files, one for each layer and one for the head. The other model passes the same tokens, which shows how the
error of its layers' outputs grows with depth. Each of its matrices gets the reference's own inputs, which shows the error
that this matrix alone makes, whatever came before.

An error is the mean over tokens of ||y - y'|| / ||y||: a token of large activations counts as much as any other. It is 0
for the same output and 1 for no output at all, so a matrix whose error is above 1 does harm.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from edkm_cli.nn.hooks import LAST, decoder_layers, hidden_of, hooked
from edkm_cli.runtime.palettized import is_plain_linear

TOKENS = 256  # that layers are compared on
_MATRIX_TOKENS = 64  # of these, for each matrix
_LAYER, _HEAD = "layer", "head.safetensors"


@torch.no_grad()
def record_layers(model: Any, ids: Tensor, directory: Path) -> None:
    """Write what the reference's layers do with ids (1, tokens) into an existing directory.

    Raises UserError for a family whose decoder layers are not known, OSError for a disk that cannot be written to."""
    layers = list(decoder_layers(model).values())
    names = {m: name for name, m in model.named_modules() if isinstance(m, nn.Linear) and is_plain_linear(m)}
    kept: dict[str, Tensor] = {}

    def take(matrix: Any, args: tuple[Any, ...], output: Any) -> None:
        name, x = names[matrix], args[0].flatten(0, -2)
        if f"{name}.in" not in kept and len(x):
            some = _some_of(len(x))
            kept.update({f"{name}.in": x[some], f"{name}.out": output.flatten(0, -2)[some]})

    def write(layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        kept[_LAYER] = hidden_of(output)
        tensors = {name: tensor.cpu().contiguous() for name, tensor in kept.items()}
        save_file(tensors, directory / f"{layers.index(layer)}.safetensors")
        kept.clear()

    inside = [module for layer in layers for module in layer.modules() if module in names]
    inside += [head] if (head := model.get_output_embeddings()) in names else []
    with hooked(inside, take, after=True), hooked(layers, write, after=True):
        model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=_some_of(ids.shape[1]))
    save_file({name: tensor.cpu().contiguous() for name, tensor in kept.items()}, directory / _HEAD)


def _some_of(tokens: int) -> Tensor:
    """Which of so many tokens matrices are compared on."""
    return torch.linspace(0, tokens - 1, min(_MATRIX_TOKENS, tokens)).long()


@torch.no_grad()
def compare_layers(model: Any, ids: Tensor, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """`layers` and `matrices` of a model: `name` and `error`, in order, of what was recorded and is a module here, which
    experts that stayed dense are not; none of a model of another shape than the reference's."""
    named, modules = decoder_layers(model), dict(model.named_modules())
    rows: dict[str, list[dict[str, Any]]] = {"layers": [], "matrices": []}
    outputs: list[Tensor] = []
    with hooked(named.values(), lambda layer, args, output: outputs.append(hidden_of(output)), after=True):
        model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=LAST)
    if len(outputs) != len(list(directory.iterdir())) - 1:
        return rows

    def compare_matrices(kept: dict[str, Tensor]) -> None:
        for path in sorted(modules.keys() & {key.removesuffix(".in") for key in kept if key.endswith(".in")}):
            x = kept[f"{path}.in"].to(model.device, model.dtype)
            rows["matrices"].append({"name": path, "error": _error(modules[path](x), kept[f"{path}.out"])})

    for index, (name, output) in enumerate(zip(named, outputs, strict=True)):
        kept = load_file(directory / f"{index}.safetensors")
        wanted = kept.pop(_LAYER)
        if wanted.shape != output.shape:
            return {"layers": [], "matrices": []}
        rows["layers"].append({"name": name, "error": _error(output, wanted)})
        compare_matrices(kept)
    compare_matrices(load_file(directory / _HEAD))
    return rows


def _error(output: Tensor, wanted: Tensor) -> float:
    """The mean over rows of ||output - wanted|| / ||wanted||; rows whose wanted output is zero are left out."""
    wanted = wanted.to(output.device).float().flatten(0, -2)
    norms = wanted.norm(dim=1)
    ratios = ((output.float().flatten(0, -2) - wanted).norm(dim=1) / norms)[norms > 0]
    return float(ratios.mean()) if len(ratios) else 0.0
