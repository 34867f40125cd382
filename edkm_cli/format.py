"""The checkpoint's schema: what `quantization_config` holds and which tensors a module stores.

A compressed model is a standard Hugging Face directory. A palettized `Linear` stores `indices` (packed, uint8) and `lut`
(groups, 2**bits), and for float8 tables `lut_scale`; an embedding and the output embedding store `indices` and a
float32 `scale` for each row, or for each group of its columns, and may store a factor for each column. docs/format.md
specifies both to the byte.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from edkm_cli.errors import UserError
from edkm_cli.files import read_json
from edkm_cli.granularity import E3M4, FREE, LARGEST, LUT_DTYPES, SUPER_BLOCK, Granularity, table_faults, table_numbers
from edkm_cli.packing import MAX_BITS, MIN_BITS, Part, packed_width, parts_faults, parts_of, stored_dtype

QUANT_METHOD = "edkm"
FORMAT_VERSION = 1
SCALED_VERSION = 2  # of float8 tables: version 1 had no scale for them
MIXED_VERSION = 3  # where matrices differ in bits, or groups of an embedding's columns have scales of their own
PALETTE_VERSION = 4  # where tables are those of a palette: scales are stored in their place
EXPERTS_VERSION = 5  # where each expert's matrices are linears of their own, or matrices differ in tiles
FACTORS_VERSION = 6  # where columns of an embedding have factors
ROWS_VERSION = 7  # where rows of embeddings differ in bits
E3M4_VERSION = 8  # where tables are of E3M4
COLUMNS_VERSION = 9  # where those factors are any positive numbers, and scales of embeddings have signs
TABLES_VERSION = 10  # where each table of E3M4 has a scale: versions 8 and 9 had one for a matrix
MOST_FACTORED_BITS = 6  # of such an embedding: with more they gain little
DENSE_BITS = 16  # of embeddings that stay as they are
Stored = dict[str, tuple[torch.dtype, tuple]]  # name -> (dtype, shape)


@dataclass(frozen=True)
class QuantizationSpec:
    """The fields of `quantization_config`, checked. `skipped` names the linears and embeddings that stay dense.

    `embedding_bits` 16 stands for dense embeddings, for which the file has null. `embedding_group` columns of an embedding
    share a scale; None: a whole row. `module_bits` holds the bits of the linears that have others than `bits`.
    `module_granularity` likewise. `split_experts`: each expert's matrices are linears. `embedding_factors`: columns of an
    embedding have factors. `embedding_rows`: [end, bits] of rows with bits of their own; `embedding_bits` are those of the
    rows behind. `granularity` may be a text. `format_version` 0: the lowest that can hold the rest.
    """

    bits: int
    granularity: Granularity
    lut_dtype: str
    embedding_bits: int = DENSE_BITS
    skipped: list[str] = field(default_factory=list)
    format_version: int = 0
    embedding_group: int | None = None
    module_bits: dict[str, int] = field(default_factory=dict)
    palette: str = FREE
    split_experts: bool = False
    module_granularity: dict[str, str] = field(default_factory=dict)
    embedding_factors: bool = False
    embedding_rows: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        versions: tuple[int, ...] = (FORMAT_VERSION,)
        versions += (SCALED_VERSION,) if str(self.lut_dtype) in LARGEST else ()
        if self.palette != FREE or self.embedding_group is not None or self.module_bits:
            versions = (MIXED_VERSION if self.palette == FREE else PALETTE_VERSION,)
        versions = (EXPERTS_VERSION,) if self.split_experts or self.module_granularity else versions
        versions = (FACTORS_VERSION,) if self.embedding_factors else versions
        versions = (ROWS_VERSION,) if self.embedding_rows else versions
        versions = (E3M4_VERSION,) if self.lut_dtype == E3M4 else versions
        versions += (COLUMNS_VERSION,) if self.embedding_factors else ()
        versions += (TABLES_VERSION,) if self.lut_dtype == E3M4 else ()
        if self.format_version == 0 and _is_within(self.format_version, 0, 0):
            object.__setattr__(self, "format_version", versions[-1])
        faults = []
        if not _is_within(self.bits, MIN_BITS, MAX_BITS):
            faults.append(f"bits must be {MIN_BITS} to {MAX_BITS}, got {self.bits!r}")
        if not _is_within(self.embedding_bits, 2, DENSE_BITS) or MAX_BITS < self.embedding_bits < DENSE_BITS:
            faults.append(f"embedding_bits must be 2 to {MAX_BITS} or null, got {self.embedding_bits!r}")
        if not isinstance(self.lut_dtype, str) or self.lut_dtype not in LUT_DTYPES:
            faults.append(f"lut_dtype must be one of {', '.join(LUT_DTYPES)}, got {self.lut_dtype!r}")
        if not isinstance(self.skipped, list) or not all(isinstance(name, str) for name in self.skipped):
            faults.append("skipped must be a list of module names")
        if not _is_within(self.format_version, 1) or self.format_version not in versions:
            rule = f"format_version must be {' or '.join(map(str, versions))}"
            faults.append(f"{rule}, got {self.format_version!r}: update edkm-cli")
        group = self.embedding_group
        if group is not None and (not _is_within(group, 1) or not self.packs_embeddings):
            faults.append(f"embedding_group must be a positive number, with embedding_bits, got {group!r}")
        faults += _module_bits_faults(self.module_bits)
        most = MOST_FACTORED_BITS if self.embedding_factors else MAX_BITS
        ends = self.embedding_rows if isinstance(self.embedding_rows, list) else [self.embedding_rows]
        faults += parts_faults(ends, most if self.packs_embeddings else 0)
        if self.embedding_rows and (group is not None or self.palette != FREE):
            faults.append("embedding_rows is for palette free without embedding_group")
        for name in ("split_experts", "embedding_factors"):
            faults += [] if getattr(self, name) in (True, False) else [f"{name} must be true or false"]
        if self.embedding_factors and not faults and self.embedding_bits > MOST_FACTORED_BITS:
            given = self.embedding_bits if self.packs_embeddings else None
            faults.append(f"embedding_factors needs embedding_bits of at most {MOST_FACTORED_BITS}, got {given}")
        try:
            object.__setattr__(self, "granularity", Granularity.parse(self.granularity))
            if not isinstance(self.module_granularity, dict):
                raise UserError("module_granularity must map module names to tiles")
            tiles = {self.granularity, *map(Granularity.parse, self.module_granularity.values())}
            for bits, granularity in product({self.bits, *self.module_bits.values()}, tiles) if not faults else ():
                faults += table_faults(self.palette, bits, granularity, self.lut_dtype)
        except UserError as error:
            faults.append(str(error))
        if faults:
            raise UserError("quantization_config: " + "; ".join(faults))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> "QuantizationSpec":
        """Read the `quantization_config` of a config.json. Raises UserError listing every fault."""
        values: dict[str, Any] = {key: value for key, value in mapping.items() if key != "quant_method"}
        known = set(cls.__dataclass_fields__)
        unknown, missing = sorted(set(values) - known), sorted(known - _OPTIONAL - set(values))
        if mapping.get("quant_method") != QUANT_METHOD or unknown or missing:
            raise UserError(
                f"quantization_config must have quant_method {QUANT_METHOD!r} and the keys {', '.join(sorted(known))}; "
                f"got quant_method {mapping.get('quant_method')!r}, unknown keys {unknown}, missing keys {missing}"
            )
        if values["format_version"] == 0:
            values["format_version"] = None  # 0 means today's only inside the program
        if values["embedding_bits"] == DENSE_BITS:
            raise UserError(f"quantization_config: embedding_bits must be 2 to {MAX_BITS} or null, got {DENSE_BITS}")
        embedding_bits = values.pop("embedding_bits")
        return cls(embedding_bits=DENSE_BITS if embedding_bits is None else embedding_bits, **values)

    def to_mapping(self) -> dict[str, Any]:
        """As config.json has it: what a version does not know is left out of it."""
        mapping = {"quant_method": QUANT_METHOD, **asdict(self), "granularity": str(self.granularity)}
        mapping["embedding_bits"] = self.embedding_bits if self.packs_embeddings else None
        return {key: value for key, value in mapping.items() if _SINCE.get(key, 0) <= self.format_version}

    def with_bits(self, bits: Mapping[str, int]) -> "QuantizationSpec":
        """The same, with these bits of linears by module path, in the lowest version that can hold them."""
        others = {name: count for name, count in bits.items() if count != self.bits}
        return replace(self, module_bits=others, format_version=0) if others or self.module_bits else self

    def bits_of(self, name: str) -> int:
        """Bits of an index of the linear `name`."""
        return self.module_bits.get(name, self.bits)

    def granularity_of(self, name: str) -> Granularity:
        """Which weights of the linear `name` share a table."""
        return Granularity.parse(self.module_granularity.get(name, self.granularity))

    @property
    def packs_embeddings(self) -> bool:
        return self.embedding_bits != DENSE_BITS

    @property
    def embedding_widths(self) -> str:
        """Bits of an embedding's indices as people read them: `8`, or `4 to 6`."""
        widths = {self.embedding_bits, *(bits for _, bits in self.embedding_rows)}
        return f"{min(widths)} to {max(widths)}" if len(widths) > 1 else f"{self.embedding_bits}"

    @property
    def torch_lut_dtype(self) -> torch.dtype:
        return stored_dtype(self.lut_dtype)

    @property
    def embedding_scale_dtype(self) -> torch.dtype:
        """What an embedding's float32 scales are rounded to: other engines, whose palettes these are, hold 16 bits."""
        half = torch.bfloat16 if self.lut_dtype == "bfloat16" else torch.float16
        return torch.float32 if self.palette == FREE else half

    def linear_bits(self, out_features: int, in_features: int, bits: int, *, layer: str = "") -> float:
        """Bits of a palettized linear with `bits` bits for each index, LUTs included."""
        tile_rows, tile_columns = self.granularity_of(layer).tile(out_features, in_features)
        lut_bits = 8 * (table_numbers(self.palette, bits) * self.torch_lut_dtype.itemsize + self.scales_tables)
        per_weight = bits + lut_bits / (tile_rows * tile_columns)
        numbers = table_numbers(self.palette, bits) if self.lut_dtype == "int8" else 0
        return out_features * in_features * (per_weight + 16 * numbers / SUPER_BLOCK)

    @property
    def scales_luts(self) -> bool:
        """Whether the tables of a linear have a scale beside them."""
        return self.lut_dtype in LARGEST and self.format_version >= SCALED_VERSION

    @property
    def scales_tables(self) -> bool:
        """Whether each of them has its own, as float8_e8m0fnu."""
        return self.lut_dtype == E3M4 and self.format_version >= TABLES_VERSION

    def linear_tensors(self, out_features: int, in_features: int, *, layer: str) -> Stored:
        """What a palettized linear stores."""
        groups, bits = self.granularity_of(layer).groups(out_features, in_features, layer=layer), self.bits_of(layer)
        tensors: Stored = {"indices": (torch.uint8, (out_features, packed_width(in_features, bits)))}
        shape = (groups, 2**bits) if self.palette == FREE else (out_features, groups // out_features)
        names = ("lut",) if self.palette == FREE else ("scales", "offsets")[: table_numbers(self.palette, bits)]
        tensors |= dict.fromkeys(names, (self.torch_lut_dtype, shape))
        if self.scales_luts:
            tensors["lut_scale"] = (torch.float8_e8m0fnu, (groups,)) if self.scales_tables else (torch.float32, (1,))
        if self.lut_dtype == "int8":
            tensors["lut_scale"] = (torch.float16, (out_features, in_features // SUPER_BLOCK, len(names)))
        return tensors

    @property
    def signs_scales(self) -> bool:
        """Whether embeddings use index 0, the level without an opposite, and scales have the sign that it is needed with."""
        return self.embedding_factors and self.format_version >= COLUMNS_VERSION

    def embedding_parts(self, rows: int) -> list[Part]:
        """The parts of an embedding's rows. Raises UserError where one begins behind the last row."""
        if self.embedding_rows and self.embedding_rows[-1][0] >= rows:
            rule = f"quantization_config: embedding_rows must end before row {rows}"
            raise UserError(f"{rule}, got {self.embedding_rows}")
        return parts_of(rows, self.embedding_rows, self.embedding_bits)

    def embedding_tensors(self, rows: int, columns: int) -> Stored:
        """Name -> (dtype, shape) of what a palettized embedding or output embedding stores.

        Raises UserError for groups of columns that do not divide a row.
        """
        if columns % (group := self.embedding_group or columns):
            fits = max(size for size in range(1, min(group, columns + 1)) if columns % size == 0) if group > 1 else 1
            raise UserError(f"--embedding-group must divide the embeddings' {columns} columns, got {group}; use {fits}")
        stored: Stored = {
            part.leaf: (torch.uint8, (part.end - part.first, packed_width(columns, part.bits)))
            for part in self.embedding_parts(rows)
        }
        stored["scale"] = (torch.float32, (rows, columns // group))
        of_factors = torch.bfloat16 if self.signs_scales else torch.uint8
        return stored | ({"factors": (of_factors, (columns,))} if self.embedding_factors else {})


_SINCE = {"embedding_group": MIXED_VERSION, "module_bits": MIXED_VERSION, "palette": PALETTE_VERSION}
_SINCE |= {"split_experts": EXPERTS_VERSION, "module_granularity": EXPERTS_VERSION}
_SINCE |= {"embedding_factors": FACTORS_VERSION, "embedding_rows": ROWS_VERSION}
_OPTIONAL = {"skipped", *_SINCE}


def _module_bits_faults(value: Any) -> list[str]:
    pairs = value.items() if isinstance(value, dict) else [(value, None)]
    wrong = [pair for pair in pairs if not (isinstance(pair[0], str) and _is_within(pair[1], MIN_BITS, MAX_BITS))]
    return [f"module_bits must map module names to {MIN_BITS} to {MAX_BITS}, got {wrong!r:.100}"] if wrong else []


def _is_within(value: object, low: int, high: int | None = None) -> bool:
    """Whether a value of a file is a whole number in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= (value if high is None else high)


def read_spec(directory: str | Path) -> QuantizationSpec | None:
    """The spec of a checkpoint directory, or None where it is no edkm checkpoint. Raises UserError if it is broken."""
    if not (path := Path(directory) / "config.json").is_file():
        return None
    mapping = read_json(path, remedy="export the model again").get("quantization_config")
    if not isinstance(mapping, dict) or mapping.get("quant_method") != QUANT_METHOD:
        return None
    return QuantizationSpec.from_mapping(mapping)
