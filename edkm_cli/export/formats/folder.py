"""What formats share: their limits; and files of Hugging Face directories, written tensor by tensor, read back by name."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from edkm_cli.errors import UserError
from edkm_cli.export.formats.options import Options
from edkm_cli.export.source import Compressed, DenseTensor, Described
from edkm_cli.files import read_json, safetensors_writer
from edkm_cli.integrity import read_config
from edkm_cli.model_files import BESIDE_WEIGHTS, INDEX, TensorFiles, build
from edkm_cli.packing import pack
from edkm_cli.progress import Track, no_progress
from edkm_cli.targets import TARGETS, check_model, closest, misfits

MAX_SHARD_SIZE = "5GB"
EXPORT_AGAIN = "export it again"


def target_of(form: str, source: Compressed) -> str:
    """The target of a format that the checkpoint's tables are of, or are least far from."""
    spec = source.spec
    return closest(form, bits=spec.bits, lut_dtype=spec.lut_dtype, palette=spec.palette)


def require_fit(name: str, source: Compressed) -> None:
    """Raises UserError unless a target, or one of a format's, holds this checkpoint's bits, tables and shapes."""
    name, spec = name if name in TARGETS else target_of(name, source), source.spec
    scales = {source.scale(tensor.module) for tensor in source.linears}
    scale = scales.pop() if len(scales) == 1 else None
    tables: dict[str, Any] = {"granularity": spec.granularity, "lut_dtype": spec.lut_dtype, "palette": spec.palette}
    faults = misfits(name, bits=spec.bits, lut_scale=scale, **tables)
    if spec.module_bits and not TARGETS[name].mixes:
        faults.append("the matrices differ in bits, and the format has one number for all; use --allocation uniform")
    if TARGETS[name].mixes and not spec.module_bits and spec.bits != TARGETS[name].settings["bits"]:
        faults.append(f"{name} holds {TARGETS[name].settings['bits']} bits, got {spec.bits}; export what was trained")
    if spec.module_granularity:
        faults.append("the matrices differ in granularity, and the format has one for all; use --to dense")
    if faults:
        raise UserError(f"--to {name}: {'; '.join(faults)} (edkm compress --target {name} sets all of them)")
    shapes = {tensor.module: tensor.shape for tensor in source.linears}
    check_model(name, source.config, shapes, lut_scale=scale or 1.0, experts=source.spec.split_experts)


def row_tables(source: Compressed, tensor: DenseTensor) -> Tensor:
    """The table of each row of a linear, (out, 2**bits) float32; rows that share one repeat it."""
    table = source.table(tensor.module)
    return table.repeat_interleave(tensor.shape[0] // table.shape[0], 0)


def codes_in(words: Tensor, bits: int, columns: int) -> Tensor:
    """(rows, columns) int32 of rows of 32-bit words, int32: one little-endian stream of codes, some of which cross the
    border of two words."""
    place = torch.arange(columns) * bits
    low, shift = place // 32, place % 32
    high = (low + 1).clamp_max(words.shape[1] - 1)
    some = (part.long() & 0xFFFFFFFF for part in words.split(4096))  # 26 bytes a code: not of a whole embedding at once
    codes = (((part[:, low] >> shift) | (part[:, high] << (32 - shift))) & (2**bits - 1) for part in some)
    return torch.cat([part.int() for part in codes])


def scaled(levels: Tensor, scales: Tensor, offsets: Tensor | None = None) -> Tensor:
    """(rows, columns) float32: levels (rows, columns) times the scale of their group, of (rows, groups), plus its offset."""
    products = levels.float().unflatten(1, (scales.shape[1], -1)) * scales[:, :, None]
    return (products if offsets is None else products + offsets[:, :, None]).flatten(1)


_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SIGN = 8  # the bit of a code; alone it is minus zero


def fp4_codes(source: Compressed, path: str) -> Tensor:
    """The codes of a linear, (out, in / 2) uint8 with the even column in the low half, none of them minus zero; those of a
    scale that training turned round have the other sign."""
    codes, scales = source.indices(path), source.stored(f"{path}.scales").float()
    codes = torch.where((scales < 0).repeat_interleave(codes.shape[1] // scales.shape[1], 1), codes ^ _SIGN, codes)
    return pack(codes.masked_fill(codes == _SIGN, 0), 4)


def fp4_scales(source: Compressed, path: str) -> Tensor:
    """The scales of a linear (out, groups), none below zero, in their number format: powers of two or E4M3."""
    scales = source.stored(f"{path}.scales")
    return scales.float().abs().to(scales.dtype)


def fp4_weight(packed: Tensor, scales: Tensor) -> Tensor:
    """(rows, columns) float32 of 32-bit words of codes, int32, and scales (rows, groups) float32, by the formats' text."""
    codes = codes_in(packed, 4, 8 * packed.shape[1])
    return scaled(_FP4[codes % _SIGN] * (1 - codes // _SIGN * 2), scales)


def write_tensors(
    folder: Path,
    announced: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    tensors: Iterable[tuple[str, Tensor]],
    *,
    max_shard_size: str = MAX_SHARD_SIZE,
    **metadata: Any,
) -> list[str]:
    """Write safetensors files, with an index (and its `metadata`) where there are several; returns the files' names.

    `tensors` come in any order, each once. Raises ValueError where they are not those announced.
    """
    meta = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (dtype, shape) in announced.items()}
    split = split_torch_state_dict_into_shards(meta, max_shard_size=max_shard_size)
    with ExitStack() as stack:
        writers = {
            file: stack.enter_context(safetensors_writer(folder / file, {name: announced[name] for name in names}))
            for file, names in split.filename_to_tensors.items()
        }
        for name, tensor in tensors:
            writers[split.tensor_to_filename[name]](name, tensor)
    if split.is_sharded:
        index = {"metadata": {**metadata, **split.metadata}, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [*split.filename_to_tensors, *[INDEX] * split.is_sharded]


class Entry(NamedTuple):
    """A tensor of an export: its name, dtype (of GGUF a type's name) and shape, and what makes it when its turn comes."""

    name: str
    dtype: Any
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


def rounded(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A tensor in `dtype`. Raises UserError where a number is too large for it."""
    result = tensor.to(dtype)
    if tensor.dtype != dtype and not bool(result.isfinite().all()):
        largest = float(tensor.abs().max())
        rule = f"{name} holds {largest:g}, more than {torch.finfo(dtype).max:g}, the largest number of"
        raise UserError(f"{rule} {str(dtype).removeprefix('torch.')}; give another --dtype, or --to dense")
    return result


class FolderFormat:
    """A format by what its module says of a tensor of the dense model, beside `read` and, where it has them, `write` and
    `load`:

    entries(source, tensor, options)  what is stored of it, where that is not the tensor in the dtype of `facts`
    settings(source, folder, options) what is written beside the weights; returns the changes of config.json
    stated(source, name, options)     where packed weights are not exact
    check(source, options)            where it has limits that its target does not say
    facts(source, options)            where it says more than the dtype
    """

    def __init__(self, name: str, module: Any):
        self._name, self._module, self.read = name, module, module.read
        own = ("entries", "stated", "check", "facts", "write", "load")  # in place of the methods here
        vars(self).update({key: getattr(module, key) for key in own if hasattr(module, key)})

    def entries(self, source: Compressed, tensor: DenseTensor, options: Options) -> Iterable[Entry]:
        return ()

    def check(self, source: Described, options: Options | None) -> None:
        """Its target says all."""

    def facts(self, source: Compressed, options: Options) -> dict[str, Any]:
        return {"dtype": options.dtype_name()}

    def _of(self, source: Compressed, tensor: DenseTensor, options: Options) -> list[Entry]:
        if entries := list(self.entries(source, tensor, options)):
            return entries
        dtype = source.dense_dtype(tensor.name, getattr(torch, self.facts(source, options)["dtype"]))
        return [Entry(tensor.name, dtype, tensor.shape, lambda: source.dense(tensor.name))]

    def _entries(self, source: Compressed, options: Options) -> list[Entry]:
        return [entry for tensor in source.tensors.values() for entry in self._of(source, tensor, options)]

    def needed_bytes(self, source: Compressed, options: Options) -> int:
        """Disk that the export takes, without the files' headers."""
        return sum(one.dtype.itemsize * torch.Size(one.shape).numel() for one in self._entries(source, options))

    def write(self, source: Compressed, folder: Path, options: Options, track: Track = no_progress) -> None:
        """Write the model, one tensor after another. Raises UserError for a number that is too large for its dtype."""
        entries = self._entries(source, options)
        announced = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        made = track(entries, f"writing {self._name}", len(entries))
        tensors = ((entry.name, rounded(entry.make(), entry.dtype, entry.name)) for entry in made)
        write_tensors(folder, announced, tensors)
        write_config(source.directory, folder, self._module.settings(source, folder, options))

    def stated(self, source: Compressed, name: str, options: Options) -> tuple[Tensor, Tensor]:
        """What is packed is exact, the rest is rounded to the dtype of its entry."""
        exact, entries = source.dense(name), self._of(source, source.tensors[name], options)
        return exact if len(entries) > 1 else exact.to(entries[0].dtype).float(), exact


def opened(folder: Path) -> tuple[dict[str, Any], TensorFiles]:
    """What config.json of an export says, and its tensors."""
    return read_json(folder / "config.json", remedy=EXPORT_AGAIN), TensorFiles(folder, remedy=EXPORT_AGAIN)


def read_packed(
    folder: Path, indices: str, table: str, decode: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """(name, float32 tensor) of the dense model, where a linear P stores `P.indices` and `P.table` for `decode`."""
    _, files = opened(folder)
    for name in files.tensors:
        path, _, leaf = name.rpartition(".")
        if leaf == indices:
            yield f"{path}.weight", decode(files.get(name), files.get(f"{path}.{table}"))
        elif leaf != table:
            yield name, files.get(name).float()


def in_memory(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], load: Callable[[Any], Any], *, trust_remote_code: bool = False
) -> Iterable[tuple[str, Tensor]]:
    """The `tensors` of files as transformers has them in memory. Of a family whose tensors it converts, as those of
    experts, they are those of the model that `load` gives, which gets it on the meta device."""
    config = read_config(folder, trust_remote_code=trust_remote_code)
    vars(config).pop("quantization_config", None)
    with torch.device("meta"):
        empty = build(config, trust_remote_code=trust_remote_code)
    if not is_converted(empty):
        return tensors
    model = load(empty)
    return ((name, tensor) for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys)


def is_converted(model: Any) -> bool:
    """Whether transformers has other tensors of this model in memory than in files."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(model, add_legacy=False))


def write_config(source: Path, folder: Path, changes: Mapping[str, Any]) -> None:
    """config.json of `source` without its quantization, with `changes`; and what else belongs to the model."""
    config = read_json(source / "config.json", remedy="copy or export the checkpoint again")
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)  # the older name of `dtype`
    text = json.dumps({**_with_older_names(config), **changes}, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    copy_beside(source, folder)


def _with_older_names(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration with what `rope_parameters` says by the names from before transformers 5, too: engines that read no
    others, as most families of mlx-lm, take a base of their own where they are missing, in silence."""
    rope, kinds = config.get("rope_parameters") or {}, config.get("layer_types") or []
    names: dict[str, Any] = {}
    if "rope_theta" not in rope and config.get("model_type") not in ("gemma3_text", "gemma3n_text", "olmo3"):
        rope = {}  # by kinds of layers, and younger than the older names: its class would take them for all layers
    if "sliding_attention" in rope:  # by the layers' kinds, as Gemma 3 has them
        names["sliding_window_pattern"] = [*kinds, "full_attention"].index("full_attention") + 1
        names["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope.get("full_attention", {})
    names |= {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if rope:
        kind = rope.get("rope_type", "default")
        names["rope_scaling"] = {**rope, "type": kind} if kind != "default" else None
        if config.get("model_type") == "gpt_neox":
            names |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope.get("partial_rotary_factor", 1.0)}
    if isinstance(inner := config.get("text_config"), dict):  # of a model that reads images, too
        names["text_config"] = _with_older_names(inner)
    return config | names


def copy_beside(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template, generation settings and the model's own Python files."""
    for pattern in BESIDE_WEIGHTS:
        for path in sorted(source.glob(pattern)):
            target = folder / path.relative_to(source)
            if path.is_file() and path.name != INDEX and not target.exists():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)


def read_model(folder: Path, tensors: Iterable[tuple[str, Tensor]], *, trust_remote_code: bool = False) -> Any:
    """The dense float32 causal LM that a folder's config.json describes, filled with `tensors` by name.

    Raises KeyError for a tensor that the model does not have, UserError where one of the model's is not among them: it
    would keep random numbers.
    """
    config = read_config(folder, trust_remote_code=trust_remote_code)
    config.quantization_config = None
    model = build(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    places = model.state_dict()
    missing = places.keys() - dict(model.all_tied_weights_keys).keys()
    with torch.no_grad():
        for name, tensor in tensors:
            places[name].copy_(tensor)
            missing.discard(name)
    if missing:
        raise UserError(f"{folder} must hold every tensor of its model, but lacks {min(missing)}; {EXPORT_AGAIN}")
    return model.eval()
