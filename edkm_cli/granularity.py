"""LUT geometry: which weights of a matrix share one lookup table.

`tensor` is one LUT for the whole matrix, `row:G` one for every G output rows, `block:RxC` one for every tile of R rows
by C columns. All three are tiles: `tensor` is a tile of (out, in), `row:G` a tile of (G, in). Groups are numbered tile
row by tile row, left to right. LUT_DTYPES are the number formats that entries may have, by torch's names, and by ml_dtypes'
the one that torch lacks, E3M4. The last two are for scales of PALETTES alone: powers of two, and whole multiples of a number
(MULTIPLES). PALETTES say what entries a table may hold: any (`free`), or a template of other engines' formats times a scale
(`edkm_cli.clustering.grids`).
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, NamedTuple

from edkm_cli.errors import UserError

E3M4, E4M3 = "float8_e3m4", "float8_e4m3fn"
LARGEST = {E3M4: 15.5, E4M3: 448.0}  # of number formats so narrow that tables in them have a scale beside them
LUT_DTYPES = ("float16", "bfloat16", "float32", *LARGEST, "float8_e8m0fnu", "int8")
SUPER_BLOCK = 256  # neighbouring columns whose `int8` scales are multiples of one float16 number
FREE, AFFINE = "free", "affine"
PALETTES = {
    FREE: "any entries",
    AFFINE: "scale * j + offset",
    "integers": "scale * (j - 2^(bits - 1))",
    "iq4_nl": "scale * llama.cpp's 16 levels",
    "e2m1": "scale * the 16 numbers of FP4",
}
FOURS = ("iq4_nl", "e2m1")  # palettes of 16 entries
# (palette, bits) -> (tile's columns, least, largest multiple) of llama.cpp's super-blocks: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.
MULTIPLES = {
    (AFFINE, 2): (16, 0, 15),
    ("integers", 3): (16, -32, 31),
    (AFFINE, 4): (32, 0, 63),
    (AFFINE, 5): (32, 0, 63),
    ("integers", 6): (16, -128, 127),
}
_PATTERN = re.compile(r"(?:tensor|row:(?P<rows>[1-9]\d{0,6})|block:(?P<R>[1-9]\d{0,6})x(?P<C>[1-9]\d{0,6}))$")


def table_numbers(palette: str, bits: int) -> int:
    """Numbers that a table is stored as: its entries, a scale, or a scale and an offset.

    >>> [table_numbers(palette, 3) for palette in ("free", "affine", "integers")]
    [8, 2, 1]
    """
    return 2**bits if palette == FREE else 2 if palette == AFFINE else 1


def table_faults(palette: str, bits: float, granularity: "Granularity", lut_dtype: str) -> list[str]:
    """What keeps tables of a palette from being stored: one sentence each."""
    if not isinstance(palette, str) or palette not in PALETTES:
        return [f"palette must be one of {', '.join(PALETTES)}, got {palette!r:.60}"]
    faults = []
    if palette in FOURS and bits != 4:
        faults.append(f"palette {palette} has 4 bits, got {bits}; use bits 4")
    if palette != FREE and granularity.rows != 1:
        faults.append(f"palette {palette} is for tiles of one row, got {granularity}; use block:1x32 or row:1")
    if lut_dtype == "float8_e8m0fnu" and palette != "e2m1":
        faults.append(f"lut_dtype {lut_dtype} is for palette e2m1, got {palette}; use float16")
    if lut_dtype == E3M4 and palette != FREE:
        faults.append(f"lut_dtype {lut_dtype} is for palette {FREE}, got {palette}; use float16")
    tiles = {key: held[0] for key, held in MULTIPLES.items()}
    if lut_dtype == "int8" and ((palette, bits) not in tiles or tiles[palette, int(bits)] != granularity.columns):
        held = "; ".join(f"{name} with {count} bits in block:1x{width}" for (name, count), width in tiles.items())
        faults.append(f"lut_dtype int8 is for {held}; got {palette} with {bits} bits in {granularity}; use float16")
    return faults


class Override(NamedTuple):
    """Bits and geometry of the linears whose module paths match a shell pattern; None: those of all."""

    pattern: str
    bits: int | None = None
    granularity: "Granularity | None" = None

    @classmethod
    def parse(cls, text: str) -> "Override":
        """Read `PATTERN: bits=4, granularity=row:1`. Raises UserError for anything else.

        >>> Override.parse("*.down_proj: bits=4")
        Override(pattern='*.down_proj', bits=4, granularity=None)
        """
        pattern, _, rest = text.partition(":")
        given = dict(part.strip().partition("=")[::2] for part in rest.split(","))
        bits, granularity = given.pop("bits", None), given.pop("granularity", None)
        if given or not pattern.strip() or bits not in (None, *"12345678"):
            raise UserError(f"overrides must be PATTERN: bits=N, granularity=G (or one, N 1 to 8), got {text!r:.100}")
        geometry = None if granularity is None else Granularity.parse(granularity)
        return cls(pattern.strip(), None if bits is None else int(bits), geometry)

    @classmethod
    def of(cls, texts: Iterable[str], name: str) -> "Override":
        """What overrides say of the module `name`: where several match, what the last of them says."""
        bits = granularity = None
        for override in map(cls.parse, texts):
            if fnmatch(name, override.pattern):
                bits, granularity = override.bits or bits, override.granularity or granularity
        return cls(name, bits, granularity)


def override_texts(value: Any) -> Any:
    """A YAML mapping of patterns to settings as the texts that `Override.parse` reads; anything else as it is."""
    if not isinstance(value, dict):
        return value
    return [
        f"{pattern}: {', '.join(f'{key}={one}' for key, one in about.items()) if isinstance(about, dict) else about}"
        for pattern, about in value.items()
    ]


def _nearest_divisor(length: int, wanted: int) -> int:
    return min((d for d in range(1, length + 1) if length % d == 0), key=lambda d: (abs(d - wanted), d))


@dataclass(frozen=True)
class Granularity:
    """A LUT geometry. `rows` and `columns` are the tile's size; None means "all of them"."""

    rows: int | None = None
    columns: int | None = None

    @classmethod
    def parse(cls, text: "str | Granularity") -> "Granularity":
        """Read `tensor`, `row:G` or `block:RxC`. Raises UserError for anything else.

        >>> Granularity.parse("block:8x64")
        Granularity(rows=8, columns=64)
        >>> str(Granularity.parse("row:1"))
        'row:1'
        """
        if isinstance(text, Granularity):
            return text
        if (match := _PATTERN.match(str(text).strip())) is None:
            raise UserError(f"granularity must be 'tensor', 'row:G' or 'block:RxC' (row:1, block:8x64), got {text!r}")
        sides = {"rows": match["rows"] or match["R"], "columns": match["C"]}
        return cls(**{side: int(size) for side, size in sides.items() if size})

    def __str__(self) -> str:
        if self.rows is None:
            return "tensor"
        return f"row:{self.rows}" if self.columns is None else f"block:{self.rows}x{self.columns}"

    def tile(self, out_features: int, in_features: int, *, layer: str = "weight") -> tuple[int, int]:
        """The tile (R, C) on a matrix of this shape. Raises UserError, naming `layer`, if tiles do not divide it.

        >>> Granularity.parse("row:4").tile(576, 1536)
        (4, 1536)
        """
        tile_rows = out_features if self.rows is None else self.rows
        tile_columns = in_features if self.columns is None else self.columns
        if tile_rows < 1 or tile_columns < 1 or out_features % tile_rows or in_features % tile_columns:
            columns = None if self.columns is None else _nearest_divisor(in_features, tile_columns)
            nearest = Granularity(_nearest_divisor(out_features, tile_rows), columns)
            rule = f"granularity {self} does not divide {layer} of shape ({out_features}, {in_features})"
            raise UserError(f"{rule}; the nearest that fits is {nearest}")
        return tile_rows, tile_columns

    def groups(self, out_features: int, in_features: int, *, layer: str = "weight") -> int:
        """Number of LUTs of a matrix of this shape.

        >>> [Granularity.parse(text).groups(576, 1536) for text in ("tensor", "row:1", "block:8x64")]
        [1, 576, 1728]
        """
        tile_rows, tile_columns = self.tile(out_features, in_features, layer=layer)
        return (out_features // tile_rows) * (in_features // tile_columns)
