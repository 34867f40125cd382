"""Whether a compressed directory holds what its configuration promises, found out without loading it.

Checked are checksums, file names, and the name, dtype and shape of every tensor, against a model of the same configuration
on the meta device. Importing this module registers nothing with transformers, so other runtimes check by it, too.
"""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edkm_cli import model_files
from edkm_cli.errors import UserError, named
from edkm_cli.files import TORCH_DTYPES, read_json, verify_checksums
from edkm_cli.format import QuantizationSpec, read_spec
from edkm_cli.model_files import TensorFiles, build, check_numbers, needs_trust, no_larger_than, stored_dtypes
from edkm_cli.nn.swap import palettize_skeleton
from edkm_cli.runtime.palettized import PackedModule

AGAIN = "copy or export the checkpoint again"
_MAX_BUFFER_BYTES = 2**30


def check_checkpoint(directory: str | Path, *, trust_remote_code: bool = False) -> QuantizationSpec:
    """Check a compressed directory without loading it: config, checksums, tensor names, dtypes and shapes.

    Raises UserError naming the first thing that is wrong.
    """
    directory = Path(directory)
    if (spec := read_spec(directory)) is None:
        found = "its config.json says otherwise" if (directory / "config.json").is_file() else "no config.json is there"
        raise UserError(f"{directory} must be a checkpoint written by edkm compress, but {found}")
    model_files.require_no_adapter(directory)
    verify_checksums(directory)
    if (directory / "generation_config.json").is_file():  # transformers reads it together with the weights
        read_json(directory / "generation_config.json", remedy=AGAIN)
    stored = stored_tensors(directory)
    expected = expected_tensors(directory, spec, limit=len(stored), trust_remote_code=trust_remote_code)
    for name in sorted(expected.keys() | stored.keys()):
        wanted, present = expected.get(name, "absent"), stored.get(name, "nothing")
        if wanted != present and wanted != _FLOATING.sub("floating", present):
            raise UserError(f"{directory}: tensor {name[:100]} must be {wanted}, got {present}; {AGAIN}")
    return spec


def skeleton(
    config: Any, spec: QuantizationSpec, dtype: torch.dtype | None = None, *, trust_remote_code: bool = False
) -> Any:
    """The palettized model of a configuration on the meta device, as loading builds it."""
    with torch.device("meta"):
        model = build(config, dtype=dtype or config.dtype or torch.float32, trust_remote_code=trust_remote_code)
    palettize_skeleton(model, spec)
    return model


def stored_skeleton(directory: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The palettized model of a compressed directory on the meta device, with the number formats of its files."""
    spec = read_spec(directory)
    assert spec is not None
    config = read_config(Path(directory), trust_remote_code=trust_remote_code)
    model, kinds = skeleton(config, spec, trust_remote_code=trust_remote_code), stored_dtypes(Path(directory))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(kinds.get(name, tensor.dtype))
    return model


def skeleton_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors a checkpoint stores, tied ones once, in the order in which `save_pretrained` fills shards."""
    tied, state = set(model.all_tied_weights_keys), model.state_dict()
    # Layer 2 comes before layer 10.
    order = {name: [(0, int(p)) if p.isdigit() else (1, p) for p in name.split(".")] for name in state.keys() - tied}
    return {name: state[name] for name in sorted(order, key=order.__getitem__)}


def read_config(directory: Path, *, trust_remote_code: bool = False) -> Any:
    """The transformers configuration of a checkpoint. Raises UserError for one that describes no model, or more layers
    or experts than any has: building such a model would not end."""
    from transformers import AutoConfig

    check_numbers(directory / "config.json", read_json(directory / "config.json", remedy=AGAIN), remedy=AGAIN)
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _no_model(directory, error) from error


def _no_model(directory: Path, error: Exception) -> UserError:
    if "trust_remote_code" in str(error):
        return needs_trust(str(directory))
    return UserError(f"{directory}/config.json describes no model that can be built ({named(error)}); {AGAIN}")


def expected_tensors(
    directory: Path, spec: QuantizationSpec, *, limit: int, trust_remote_code: bool = False
) -> dict[str, str]:
    """Tensor name -> "dtype (shape)" that a checkpoint with this config must hold, of a model of about `limit` tensors.
    What is not packed may be of any floating dtype, since some models keep a few tensors in float32.

    Raises UserError for a config that describes no model.
    """
    config = read_config(directory, trust_remote_code=trust_remote_code)
    try:
        # A palettized module registers its dense one's parameters first; tied ones and biases that stay None count, too.
        with no_larger_than(directory, tensors=limit, remedy=AGAIN):
            model = skeleton(config, spec, trust_remote_code=trust_remote_code)
        if (hidden := sum(buffer.nbytes for _, buffer in model.named_non_persistent_buffers())) > _MAX_BUFFER_BYTES:
            rule = f"{directory}/config.json describes a model that needs {hidden} bytes beside its weights"
            raise UserError(f"{rule}, more than the {_MAX_BUFFER_BYTES} that are given; {AGAIN}")
        return describe_tensors(model, skeleton_tensors(model))
    except UserError:
        raise
    except Exception as error:
        raise _no_model(directory, error) from error


def describe_tensors(model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Tensor name -> what it must be in a checkpoint of the palettized `model`."""
    packed = {path for path, module in model.named_modules() if isinstance(module, PackedModule)}
    described = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        text = _describe(tensor.dtype, tuple(tensor.shape))
        described[name] = text if path in packed and leaf != "bias" else _FLOATING.sub("floating", text)
    return described


def stored_tensors(directory: Path) -> dict[str, str]:
    """Tensor name -> "dtype (shape)" of the safetensors files of a directory. Raises UserError for files that are not
    whole, lie elsewhere, hold a tensor twice, or are more than the index names."""
    tensors = TensorFiles(directory, remedy=AGAIN).tensors
    more = {file.name for file in directory.glob("model*.safetensors")} - {tensor.file for tensor in tensors.values()}
    if more:
        raise UserError(f"{directory} holds {min(more)[:100]}, but no index that names it; {AGAIN}")
    return {name: _describe(TORCH_DTYPES.get(dtype), shape) for name, (_, dtype, shape) in tensors.items()}


_FLOATING = re.compile(r"^(float32|float16|bfloat16)\b")


def _describe(dtype: torch.dtype | None, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {shape}"
