"""`coreml`: a Core ML program (.mlpackage, target iOS 18) whose compressed weights are palettized.

Each compressed weight is one `constexpr_lut_to_dense` with our indices and float16 tables, of the whole tensor or of groups
of rows; scales of float8 tables are multiplied into the entries (`enable_per_channel_scale` of coremltools crashes on
macOS 26, apple/coremltools issue 2688). Embeddings are `constexpr_blockwise_shift_scale`: int8 with a float16 scale for each
row; what they give or take is multiplied with the factors of their columns. Norms and biases are float16.

coremltools runs on Linux, Core ML does not: what was written is read back, weight by weight, and computed again in float32
(`coreml_run`). It has not been run on Apple hardware. The program is built in memory, about one byte for each weight.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.export.formats import coreml_graph
from edkm_cli.export.formats.folder import copy_beside, rounded
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, Described
from edkm_cli.files import sync
from edkm_cli.model_files import weight_files_bytes
from edkm_cli.progress import Track, no_progress
from edkm_cli.targets import full_positions

PACKAGE = "model.mlpackage"
_MAP = "edkm.tensors"  # in the package's metadata: name of an operation -> name of the tensor it holds
_LENGTH = "edkm.length"


def check(source: Described, options: Options | None) -> None:
    """Sequences that the model's attention spans; coremltools installed."""
    if options is None:
        return
    if options.dtype not in ("auto", "float16"):
        raise UserError(f"--to coreml computes in float16, got --dtype {options.dtype}; leave it out")
    first, last = lengths(options)
    if last > (limit := full_positions(source.config) or last):
        given = "is 1-1024 by default" if options.sequence_length == "1-1024" else f"is {options.sequence_length}"
        raise UserError(f"--sequence-length must end by {limit}, the attention's span, but {given}; give 1-{limit}")
    if options.verify == "perplexity" and not first <= options.context <= last:
        rule = f"--verify perplexity measures windows of --context {options.context} tokens"
        raise UserError(f"{rule}, but the program takes {options.sequence_length}; give a --context within")
    if find_spec("coremltools") is None:
        raise UserError("--to coreml needs coremltools, which is not installed; pip install 'edkm-cli[coreml]'")


def lengths(options: Options) -> tuple[int, int]:
    """The fewest and most tokens of a call. Raises UserError for a text that is neither N nor A-B."""
    parts = options.sequence_length.split("-")
    if len(parts) <= 2 and all(part.isdigit() and 0 < int(part) < 2**20 for part in parts):
        first, last = int(parts[0]), int(parts[-1])
        if first <= last:
            return first, last
    raise UserError(f"--sequence-length must be a number, or a range such as 1-1024, got {options.sequence_length!r}")


def facts(source: Compressed, options: Options) -> dict[str, Any]:
    return {
        "dtype": "float16",
        "sequence_length": options.sequence_length,
        "cache": options.cache,
        "notes": ["read back and computed again on this machine; not run on Apple hardware"],
    }


def needed_bytes(source: Compressed, options: Options) -> int:
    """Disk that the export takes, about: what the converter writes first, and its copy."""
    return 2 * weight_files_bytes(source.directory) + 4 * source.config.hidden_size


def write(source: Compressed, folder: Path, options: Options, track: Track = no_progress) -> None:
    """Write model.mlpackage, and the tokenizer beside it."""
    with _quiet():
        import coremltools as ct

        names: dict[str, str] = {}
        positions = torch.arange(lengths(options)[1])[None]
        rotary = type(source.model.model.rotary_emb)(config=source.config)  # the model's own class
        cosines, sines = (table[0].half().numpy() for table in rotary(torch.zeros(1), positions))
        weights = _weights(source, names, track)
        made = coreml_graph.program(source.config, lengths(options), options.cache, weights, (cosines, sines))
        first, last = lengths(options)
        tokens = ct.RangeDim(first, last, last) if first < last else last
        inputs = [ct.TensorType("input_ids", shape=(1, tokens), dtype=np.int32)]
        if options.cache:
            inputs.append(ct.TensorType("position", shape=(1,), dtype=np.int32))
        as_written = {"compute_precision": ct.precision.FLOAT32, "pass_pipeline": ct.PassPipeline.EMPTY}
        kind = {"source": "milinternal", "convert_to": "mlprogram", "minimum_deployment_target": ct.target.iOS18}
        model = ct.convert(made, inputs=inputs, skip_model_load=True, **kind, **as_written)
        model.user_defined_metadata[_MAP] = json.dumps(names)
        model.user_defined_metadata[_LENGTH] = str(last)
        model.save(str(folder / PACKAGE))
    for path in (folder / PACKAGE).rglob("*"):
        sync(path)
    copy_beside(source.directory, folder)


def _weights(source: Compressed, names: dict[str, str], track: Track) -> Any:
    """Makes the variable of a tensor, and records under which name; None for what there is not."""
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    index_type = types.nptype_from_builtin(types.string_to_builtin(f"uint{source.spec.bits}"))
    progress = iter(track(list(source.tensors), "building the program", len(source.tensors)))

    def make(name: str) -> Any:
        label, (path, _, leaf) = name.replace(".", "_"), name.rpartition(".")
        factors = source.factors(path) if leaf == "factors" else None
        if factors is None and name not in source.tensors:
            return None
        names[label] = name
        if factors is not None:
            return mb.const(val=rounded(factors, torch.float16, name).numpy(), name=label)
        next(progress, None)
        tensor = source.tensors[name]
        if tensor.linear:
            table = rounded(source.table(tensor.module), torch.float16, name)
            groups = table.shape[0]  # of rows: `check` has seen to that
            indices = source.indices(tensor.module).numpy().astype(index_type)
            return mb.constexpr_lut_to_dense(indices=indices, lut=table.numpy().reshape(groups, 1, -1, 1), name=label)
        if tensor.module:
            data, scale = _embedding(source, tensor.module)
            return mb.constexpr_blockwise_shift_scale(data=data.numpy(), scale=scale.numpy(), name=label)
        return mb.const(val=rounded(source.dense(name), torch.float16, name).numpy(), name=label)

    return make


def _embedding(source: Compressed, path: str) -> tuple[Tensor, Tensor]:
    """(levels (rows, columns) int8, scales (rows, groups) float16) of an embedding."""
    return source.levels(path).to(torch.int8), rounded(source.stored(f"{path}.scale"), torch.float16, f"{path}.scale")


def _function(folder: Path) -> tuple[Any, dict[str, str]]:
    """(the program's function as coremltools reads it from the disk, the metadata)."""
    with _quiet():
        import coremltools as ct
        from coremltools.converters.mil.frontend.milproto.load import load as load_program

        model = ct.models.MLModel(str(folder / PACKAGE), skip_model_load=True)
        spec = model.get_spec()
        loaded = load_program(spec, specification_version=spec.specificationVersion, file_weights_dir=model.weights_dir)
        return loaded.functions["main"], dict(spec.description.metadata.userDefined)


def read(folder: Path, options: Options) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model: the constants of the program read back."""
    from edkm_cli.export.formats.coreml_run import dense_of

    function, metadata = _function(folder)
    names = json.loads(metadata[_MAP])
    held = [(names.get(operation.outputs[0].name), operation) for operation in function.operations]
    constants = {name: operation for name, operation in held if name and not operation.op_type.startswith("constexpr_")}
    plain = {name: torch.from_numpy(np.array(op.val.val, dtype=np.float32)) for name, op in constants.items()}
    factors = {name.removesuffix("factors"): plain.pop(name) for name in constants if name.endswith(".factors")}
    yield from plain.items()
    for name, operation in held:
        if operation.op_type.startswith("constexpr_"):
            weight = dense_of(operation)
            by = factors.get((name or "").removesuffix("weight"))
            yield name or operation.name, weight if by is None else weight * by


def stated(source: Compressed, name: str, options: Options) -> tuple[Tensor, Tensor]:
    """Tables, norms and biases are float16; of an embedding the scale is, its product with a level, and factors."""
    exact, tensor = source.dense(name), source.tensors[name]
    if tensor.module and not tensor.linear:
        data, scale = _embedding(source, tensor.module)
        scale = scale.float().repeat_interleave(data.shape[1] // scale.shape[1], 1)  # of each column
        product, factors = (data.float() * scale).half().float(), source.factors(tensor.module)
        return product if factors is None else product * factors.half().float(), exact
    return exact.half().float(), exact


def load(folder: Path, options: Options) -> Any:
    """The program read back, computed in float32."""
    from edkm_cli.export.formats.coreml_run import Program

    function, metadata = _function(folder)
    return Program(function, int(metadata[_LENGTH]))


@contextmanager
def _quiet() -> Iterator[None]:
    """coremltools tells on import what of Core ML it does not find on Linux."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
