"""What no single setting of a configuration shows: those that do not go together."""

import math
from collections.abc import Mapping
from typing import Any

from edkm_cli.granularity import FREE, Granularity, Override, palette_faults
from edkm_cli.targets import TARGETS, misfits


def trains_whole_weights(config: Any) -> bool:
    """Whether weights train by themselves and in one piece, which the reconstructed start and held assignments need."""
    return config.mode == "straight-through" and config.sharding != "full"


def contradictions(config: Any) -> list[str]:
    """Settings that do not go together, each with what would."""
    found = []
    for name, value in (("start", "reconstructed"), ("assignments", "held")):
        if getattr(config, name) == value and not trains_whole_weights(config):
            found.append(f"{name} {value} is for mode straight-through without sharding; use {name} auto")
    if not config.distill and config.label_weight not in (None, 1.0):
        found.append(f"label_weight {config.label_weight:g} stands beside distillation; leave it or distill false out")
    if config.temperature_schedule != "constant" and 0 < config.temperature < config.temperature_end:
        found.append(
            f"temperature falls to temperature_end, but {config.temperature:g} is below {config.temperature_end:g}; give a "
            "lower temperature_end, or temperature_schedule constant"
        )
    found += unmeasured_best(config)
    if config.lut_scale is not None and math.frexp(config.lut_scale)[0] != 0.5:
        found.append(f"lut_scale must be a power of two, such as 0.0625, got {config.lut_scale:g}")
    if config.lut_scale is not None and config.lut_dtype != "float8_e4m3fn":
        found.append(f"lut_scale is for lut_dtype float8_e4m3fn, got {config.lut_dtype}; leave it out")
    found += palette_faults(config.palette, config.bits, Granularity.parse(config.granularity), config.lut_dtype)
    if config.palette != FREE and (config.mode != "straight-through" or config.method != "edkm"):
        found.append(f"palette {config.palette} is for mode straight-through and method edkm; leave both out")
    found += _about_bits(config)
    if config.target is not None and isinstance(config.bits, int):
        about = {name: getattr(config, name) for name in ("granularity", "lut_dtype", "palette", "lut_scale")}
        found += misfits(config.target, bits=config.bits, **about)
    if config.compare_dense and not config.steps:
        found.append("compare_dense trains the uncompressed model for as many steps, but steps is 0; give steps")
    if config.embedding_group and config.embedding_bits == 16:
        found.append("embedding_group is for compressed embeddings, but embedding_bits is 16; give embedding_bits")
    if not config.data:
        found.append("data must name at least one data set or file")
    twice = [name for name in dict.fromkeys(config.eval_data) if config.eval_data.count(name) > 1]
    found += [f"eval_data names {name} twice; give each text once" for name in twice]
    return found


def unmeasured_best(config: Any) -> list[str]:
    """A best step of none."""
    unmeasured = config.keep_best and not config.eval_every
    return ["keep_best chooses among measured steps, but eval_every is 0; give eval_every"] if unmeasured else []


def _about_bits(config: Any) -> list[str]:
    found, bits, target = [], config.bits, config.target
    if target is not None and (config.overrides or config.target_size):
        given = "overrides" if config.overrides else "target_size"
        found.append(f"target {target} says what its tables are; leave {given} out")
    for override in map(Override.parse, config.overrides):
        about = override.bits or bits, override.granularity or Granularity.parse(config.granularity)
        faults = palette_faults(config.palette, *about, config.lut_dtype)
        found += [f"overrides of {override.pattern}: {fault}" for fault in faults]
    if config.target_size and config.allocation == "uniform":
        found.append("target_size is met by an average number of bits; use allocation sensitivity")
    if config.allocation == "uniform" and not isinstance(bits, int):
        found.append(f"bits {bits:g} is an average; give a whole number, or allocation sensitivity")
    average = config.allocation == "sensitivity" or not isinstance(bits, int) or config.target_size
    if average and config.importance != "gradient":
        found.append(f"allocation sensitivity needs squared gradients, importance is {config.importance}; use gradient")
    if average and target is not None and TARGETS[target].mixes:
        if not 3 <= bits <= 4:  # others reach for 1 or 7 bits
            found.append(f"target {target} mixes 2 to 6 bits, 3 to 4 on average, got {bits:g}; use bits 3.5")
    elif average and target is not None:
        found.append(f"target {target} holds one number of bits for all matrices; use allocation uniform")
    return found


def too_long(architecture: Any, lengths: Mapping[str, int]) -> list[str]:
    """A warning for each option whose length in tokens is more than the positions that a model's configuration names."""
    positions = getattr(architecture.get_text_config(decoder=True), "max_position_embeddings", None)
    most = positions if isinstance(positions, int) else math.inf
    more = f"is more than the {most} positions that the model knows; give at most {most}"
    return [f"{option} {length} {more}" for option, length in lengths.items() if length > most]
