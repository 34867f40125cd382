"""What each export format can hold, so that `edkm compress --target` makes what `edkm export` writes without loss.

The same rules refuse a combination before training and before an export. Nothing here imports torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edkm_cli.errors import UserError
from edkm_cli.granularity import AFFINE, FREE, LARGEST, LUT_DTYPES, MULTIPLES, SUPER_BLOCK, Granularity

ALL_BITS = tuple(range(1, 9))
# Families in which a scale of all decoder linears moves exactly into norms, embeddings and `rms_norm_eps`.
SCALED_FAMILIES = ("llama", "mistral", "mixtral", "qwen2")
# transformers' model type -> llama.cpp's architecture
GGUF_FAMILIES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
# What mlx-lm was seen to open, and to compute as transformers does; of GLM (not 4) it rotates all of a head, say.
MLX_FAMILIES = (
    "llama", "mistral", "ministral3", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gemma4_text", "phi", "phi3",
    "olmo2", "olmo3", "cohere", "cohere2", "granite", "stablelm", "smollm3", "helium", "glm4", "starcoder2", "nemotron",
    "exaone4", "seed_oss", "hunyuan_v1_dense", "ernie4_5", "lfm2",
)  # fmt: skip
# Form -> families that it is known for, and kinds of rotary angles, which do not depend on the sequence.
KNOWN = {
    "coreml": (("llama", "mistral", "qwen2"), ("default", "linear", "llama3", "yarn")),
    "gguf": (tuple(GGUF_FAMILIES), ("default", "linear", "llama3")),
    "mlx": (MLX_FAMILIES, ("default", "linear", "llama3", "yarn", "proportional")),
}
# How many of these kinds an engine has for a family, where not all: of others it takes the base alone, in silence.
_BASE_ALONE = (
    "gemma", "gemma2", "phi", "cohere", "cohere2", "stablelm", "helium", "glm4", "starcoder2", "hunyuan_v1_dense",
    "ernie4_5", "lfm2",
)  # fmt: skip
_KINDS = {
    "gguf": {"qwen2": 2, "qwen3": 2, "gemma3_text": 2},
    "mlx": {"phi3": 2, "nemotron": 2, **dict.fromkeys(_BASE_ALONE, 1)},
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as configurations call their number
_IN_LAYER = re.compile(r"^(\w+)\.(\w+)\.(\d+)\.(.+)$")


@dataclass(frozen=True)
class Target:
    """A format's limits.

    Attributes:
        settings: fields of `CompressConfig` that `--target` sets.
        bits, lut_dtypes, palettes: what the format holds.
        granularities: tiles that share a table; empty: whole rows, `tensor` or `row:G`.
        columns: number that the columns of each compressed matrix must be a multiple of; `rows` likewise.
        fallback: what a matrix is stored as whose columns are no multiple of the tile's; "": it is refused.
        mixes: whether matrices may differ in bits.
        form: the export format that writes it; "": the one of its name.
        lut_scale: the scale that float8 tables have; None: any, of all matrices the same where `settings` name one.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    bits: tuple[int, ...] = ALL_BITS
    lut_dtypes: tuple[str, ...] = LUT_DTYPES
    granularities: tuple[str, ...] = ()
    columns: int = 1
    rows: int = 1
    palettes: tuple[str, ...] = (FREE,)
    fallback: str = ""
    mixes: bool = False
    form: str = ""
    lut_scale: float | None = None


def _grid(palette: str, bits: int, tile: int, lut_dtype: str, more: Mapping[str, float], /, **limits: Any) -> Target:
    """A format whose tables are of a palette, in tiles of one row; of other bits and tiles than these if `limits` say so."""
    geometry = f"block:1x{tile}"
    settings = {"bits": bits, "palette": palette, "granularity": geometry, "lut_dtype": lut_dtype, **more}
    usual: dict[str, Any] = {"bits": (bits,), "lut_dtypes": (lut_dtype,), "granularities": (geometry,)}
    return Target(settings, palettes=(palette,), **{**usual, **limits})


_ROWS = {"bits": 3, "granularity": "row:1", "lut_dtype": "float16"}
# One scale for all matrices: the draft has none, so that the export has to put it elsewhere.
_LUT_B = {"bits": 3, "granularity": "block:8x64", "lut_dtype": "float8_e4m3fn", "lut_scale": 2.0**-4}
_MLX_BITS = (2, 3, 4, 5, 6, 8)
# Of MLX and compressed-tensors.
_MLX: dict[str, Any] = {"form": "mlx", "fallback": "bfloat16", "bits": _MLX_BITS, "mixes": True}
_COMPRESSED: dict[str, Any] = {"form": "compressed-tensors", "fallback": "bfloat16"}
_GROUPS = {"lut_dtypes": ("bfloat16", "float16"), "granularities": ("block:1x32", "block:1x64", "block:1x128")}
_PLAIN, _GROUPED = {"embedding_bits": 16}, {"embedding_group": 64}
_E8M0, _E4M3 = ("e2m1", 4, 32, "float8_e8m0fnu"), ("e2m1", 4, 16, "float8_e4m3fn")  # FP4 of the MX formats and NVIDIA's


def _gguf(palette: str, bits: int, tile: int, lut_dtype: str = "float16") -> Target:
    columns = SUPER_BLOCK if lut_dtype == "int8" else 1
    return _grid(palette, bits, tile, lut_dtype, {"embedding_group": 32}, columns=columns, form="gguf", fallback="F16")


TARGETS: dict[str, Target] = {
    "squeezellm": Target(_ROWS, bits=(3, 4), columns=32),
    "any-precision": Target(_ROWS, bits=(3, 4, 5, 6, 7, 8), lut_dtypes=("float16", *LARGEST), columns=32, rows=16),
    "coreml": Target(_ROWS, bits=(1, 2, 3, 4, 6, 8), lut_dtypes=("float16", *LARGEST)),
    "lut-b": Target(_LUT_B, (3,), ("float8_e4m3fn",), ("block:8x64",), columns=64, rows=8),
    **{f"mlx:{bits}": _grid(AFFINE, bits, 64, "bfloat16", _GROUPED, **_GROUPS, **_MLX) for bits in _MLX_BITS},
    "mlx:mxfp4": _grid(*_E8M0, _GROUPED, form="mlx", fallback="float16"),
    "mlx:nvfp4": _grid(*_E4M3, {"lut_scale": 1.0, **_GROUPED}, lut_scale=1.0, form="mlx", fallback="float16"),
    "gguf:q4_0": _gguf("integers", 4, 32),
    "gguf:q8_0": _gguf("integers", 8, 32),
    "gguf:iq4_nl": _gguf("iq4_nl", 4, 32),
    "gguf:mxfp4": _gguf(*_E8M0),
    **{f"gguf:q{bits}_k": _gguf(palette, bits, tile, "int8") for (palette, bits), (tile, *_) in MULTIPLES.items()},
    **{f"w{b}a16": _grid("integers", b, 64, "bfloat16", _PLAIN, **_GROUPS, **_COMPRESSED) for b in (2, 3, 4)},
    "mxfp4": _grid(*_E8M0, _PLAIN, **_COMPRESSED),
    "nvfp4": _grid(*_E4M3, {"lut_scale": 2.0**-8, **_PLAIN}, **_COMPRESSED),
}


def closest(form: str, *, bits: float, lut_dtype: str, palette: str) -> str:
    """The target of an export format that holds such tables; where none does, the one that says best why."""

    def fit(name: str) -> tuple[float, ...]:
        target = TARGETS[name]
        distance = abs(target.settings["bits"] - bits)
        return palette in target.palettes, lut_dtype in target.lut_dtypes, bits in target.bits, -distance

    return max((name for name, target in TARGETS.items() if (target.form or name) == form), key=fit)


def misfits(
    name: str, *, bits: float, granularity: str | Granularity, lut_dtype: str, palette: str, lut_scale: float | None
) -> list[str]:
    """One sentence for each setting that the target cannot hold, with what would fit. `lut_scale` is that of all float8
    tables; None: they have several."""
    target, geometry, found = TARGETS[name], Granularity.parse(granularity), []
    if palette not in target.palettes:
        best = target.palettes[0]
        found.append(f"{name} holds {best} tables, got {palette}; use --palette {best}")
    if bits not in target.bits and not (target.mixes and min(target.bits) < bits < max(target.bits)):
        nearest = min(target.bits, key=lambda one: (abs(one - bits), one))
        found.append(f"{name} holds {_listed(target.bits)} bits, got {bits}; use --bits {nearest}")
    if target.granularities and str(geometry) not in target.granularities:
        use = f"use --granularity {target.settings['granularity']}"
        found.append(f"{name} holds tables of {_listed(target.granularities)}, got {geometry}; {use}")
    elif not target.granularities and geometry.columns is not None:
        found.append(f"{name} holds tables of whole rows, got {geometry}; use --granularity row:1 or tensor")
    if lut_dtype not in ("auto", *target.lut_dtypes):
        best = target.settings["lut_dtype"]
        found.append(f"{name} holds tables of {_listed(target.lut_dtypes)}, got {lut_dtype}; use --lut-dtype {best}")
    needed = target.settings.get("lut_scale")
    if needed is not None and (lut_scale is None or lut_scale != (target.lut_scale or lut_scale)):
        which = "one scale for all matrices" if target.lut_scale is None else f"scale {needed:g}"
        given = "several" if lut_scale is None else f"{lut_scale:g}"
        found.append(f"{name}: tables must have {which}, got {given}; use --lut-scale {needed:g}")
    return found


def check_model(
    name: str, architecture: Any, layers: Mapping[str, tuple[int, ...]], *, lut_scale: float, experts: bool = False
) -> None:
    """Raises UserError for a model that the target cannot hold.

    Args:
        layers: module path -> (rows, columns) of each compressed linear.
        lut_scale: the one scale of its float8 tables; 1 without.
        experts: whether some of these linears are experts.
    """
    form, facts = TARGETS[name].form or name, list[tuple[str, tuple[Any, ...], Any]]()
    if experts and name != "lut-b":
        rule = f"{name} holds no packed experts, but the model has some"
        raise UserError(f"{rule}; compress with --experts dense, or --to dense")
    counts = (getattr(architecture.get_text_config(decoder=True), one, None) or 0 for one in _EXPERTS)
    # Engines have names of their own for the experts of each family.
    if form in ("mlx", "compressed-tensors") and max(counts) > 1:
        raise UserError(f"{name} holds no experts, but the model has some; choose --to dense")
    if architecture.get_text_config(decoder=True) is not architecture and form != "compressed-tensors":
        rule = f"{name} holds language models alone, but {architecture.model_type} reads images, too"
        raise UserError(f"{rule}; choose compressed-tensors, or --to dense")
    for layer, shape in layers.items():
        for what, side, unit in (("columns", 1, TARGETS[name].columns), ("rows", 0, TARGETS[name].rows)):
            if shape[side] % unit:
                rule = f"{name} holds matrices whose {what} are a multiple of {unit}, but {layer} has {shape[side]}"
                raise UserError(f"{rule}; leave it uncompressed with --skip {layer}, or choose another format")
    if name == "any-precision" and len(repeated_layers([*layers])[2]) * architecture.num_hidden_layers != len(layers):
        raise UserError("any-precision needs the same linears compressed in all decoder layers, but some have none")
    if form in KNOWN:
        rope = getattr(architecture, "rope_parameters", None) or {}
        (families, rotary), kind = KNOWN[form], rope.get("full_attention", rope).get("rope_type", "default")
        rotary = rotary[: _KINDS.get(form, {}).get(architecture.model_type)]
        facts += [
            ("decoders of", families, architecture.model_type),
            (f"rotary angles of {architecture.model_type}:", rotary, kind),
        ]
    if form in KNOWN and architecture.model_type in GGUF_FAMILIES:  # these engines have one for each family
        used = getattr(architecture, "hidden_activation", None) or getattr(architecture, "hidden_act", "silu")
        gemma = architecture.model_type == "gemma3_text"
        used = "silu" if used == "swish" else used  # the same by another name
        facts.append(("activation", ("gelu_pytorch_tanh" if gemma else "silu",), used))
        usual: dict[str, Any] = {"attention_bias": False} if architecture.model_type in ("qwen3", "gemma3_text") else {}
        if gemma and form == "gguf":
            usual |= {"query_pre_attn_scalar": gemma_scalar(architecture), "final_logit_softcapping": None}
        facts += [(name, (value,), getattr(architecture, name, value)) for name, value in usual.items()]
        kinds = getattr(architecture, "layer_types", None) or []
        every = 6 if form == "gguf" or not gemma else [*kinds, "full_attention"].index("full_attention") + 1
        in_turn = [f"{'sliding' if gemma and n % every else 'full'}_attention" for n in range(1, len(kinds) + 1)]
        whose = "of the family's own layers"
        facts.append(("sliding windows", (whose,), whose if list(kinds) == in_turn else "of others"))
    for what, known, found in facts:
        if found not in known:
            raise UserError(f"{form} knows {what} {_listed(known)}, got {found}; choose another format")
    if name == "lut-b" and lut_scale != 1.0 and architecture.model_type not in SCALED_FAMILIES:
        rule = f"lut-b has no scale, which moves into other weights of {_listed(SCALED_FAMILIES)}, not"
        raise UserError(f"{rule} of {architecture.model_type}; compress with --lut-scale 1")


def full_positions(architecture: Any, *, by_layer: bool = False) -> int | None:
    """Positions in which attention to all is the model's: what engines are told that know no sliding windows. `by_layer`:
    the engine knows those of models that list kinds of layers, but for Gemma 2."""
    known = by_layer and getattr(architecture, "layer_types", None) and architecture.model_type != "gemma2"
    slides = not known and getattr(architecture, "use_sliding_window", True)
    window = getattr(architecture, "sliding_window", None) if slides else None
    return min(filter(None, (getattr(architecture, "max_position_embeddings", None), window)), default=None)


def gemma_scalar(architecture: Any) -> int:
    """`query_pre_attn_scalar` of Gemma 2 and 3 in llama.cpp, whose files do not say it: the largest models' is the width of
    a head, which is not the size there."""
    widest = architecture.num_hidden_layers == (46 if architecture.model_type == "gemma2" else 62)
    return architecture.hidden_size // architecture.num_attention_heads if widest else architecture.head_dim


def falls_back(name: str | None, columns: int, width: int | None, *, linear: bool = True) -> str:
    """Why a target stores a matrix with rows of so many columns otherwise than in tiles of `width`; "" where it does not."""
    target = TARGETS.get(name or "")
    if target is None or not target.fallback or not width:
        return ""
    if columns % (width := max(width, target.columns if linear else 1)) == 0:
        return ""
    return f"rows of {columns} are no multiple of {width}: {name} stores it as {target.fallback}"


def repeated_layers(modules: list[str]) -> tuple[str, str, list[str]]:
    """(the decoder's module, its list of layers, the linears in each layer) of module paths.

    Raises UserError where layers differ, or a path is in no decoder layer: Any-Precision replaces the same linears in each.

    >>> repeated_layers(["model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"])
    ('model', 'layers', ['mlp.up_proj'])
    """
    layers: dict[tuple[str, str, str], list[str]] = {}
    for path in modules:
        if (match := _IN_LAYER.match(path)) is None:
            raise UserError(f"any-precision holds the decoder's linears, but {path} is none; add --skip {path}")
        layers.setdefault((match[1], match[2], match[3]), []).append(match[4])
    (model, name, _), names = next(iter(layers.items()))
    for (other, list_name, number), found in layers.items():
        if (other, list_name) != (model, name) or sorted(found) != sorted(names):
            rule = "any-precision needs the same linears compressed in all decoder layers"
            which = f"{other}.{list_name}.{number} differs from the first"
            raise UserError(f"{rule}, but {which}; compress with a --skip that says the same of all")
    return model, name, names


def _listed(values: tuple[Any, ...]) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
