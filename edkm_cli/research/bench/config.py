"""The settings of `edkm bench` and `edkm ablate`. Nothing here imports torch."""

from dataclasses import dataclass

from edkm_cli.settings import COMPRESSION, DATA, DEVICE, SCALE, faults, refuse, setting

_TABLES = "Weights that share a lookup table: tensor, row:G or block:RxC."
_FLOATS = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class _Bench:
    device: str = setting("auto", DEVICE, SCALE)

    def __post_init__(self) -> None:
        refuse(faults(self))


@dataclass(frozen=True)
class ClusteringBench(_Bench):
    """What `edkm bench clustering` measures."""

    width: int = setting(4096, "Rows and columns of the weight.", COMPRESSION, minimum=1)
    tokens: int = setting(2048, "Tokens that pass through the plain linear layer beside it.", DATA, minimum=1)
    bits: int = setting(3, "Bits per weight.", COMPRESSION, minimum=1, maximum=8)
    iterations: int = setting(3, "Clustering updates of the lookup tables.", COMPRESSION, minimum=1)
    granularity: tuple[str, ...] = setting(("tensor", "row:1", "block:8x64"), _TABLES, COMPRESSION)
    dtype: str = setting("bfloat16", "Number format of the weight.", SCALE, choices=_FLOATS)
    dense: bool = setting(True, "Measure the reference with an attention map, too (slow).", COMPRESSION)


@dataclass(frozen=True)
class RuntimeBench(_Bench):
    """What `edkm bench runtime` measures: all combinations."""

    shape: tuple[str, ...] = setting(("576x576", "1536x576", "4096x4096", "11008x4096"), "Shapes.", COMPRESSION)
    tokens: tuple[int, ...] = setting((1, 16, 512), "Tokens that are multiplied at once.", DATA, minimum=1)
    bits: tuple[int, ...] = setting((3, 4), "Bits per weight.", COMPRESSION, minimum=1, maximum=8)
    granularity: tuple[str, ...] = setting(("row:1",), _TABLES, COMPRESSION)
    dtype: tuple[str, ...] = setting(("bfloat16",), "Number format of activations.", SCALE, choices=_FLOATS)
    cold: bool = setting(False, "Go through matrices that no cache holds, or stay with one.", SCALE, "--cold/--warm")


@dataclass(frozen=True)
class Ablation(_Bench):
    """What `edkm ablate` measures."""

    width: int = setting(4096, "Rows and columns of the weight.", COMPRESSION, minimum=1, maximum=32768)
    bits: int = setting(3, "Bits per weight.", COMPRESSION, minimum=1, maximum=8)
    iterations: int = setting(1, "Clustering updates that gradients pass through.", COMPRESSION, minimum=1, maximum=64)
    learners: int = setting(8, "Number of processes, the paper's learners.", SCALE, minimum=1, maximum=256)
    dtype: str = setting("bfloat16", "Number format of the weight, of 16 bits.", SCALE, choices=_FLOATS[:2])
