"""What follows from a configuration: device and dtypes, what is swapped for what, the texts, and the room it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edkm_cli import data, models
from edkm_cli.clustering.linear import trains_luts
from edkm_cli.config import CompressConfig, UserError
from edkm_cli.format import QuantizationSpec, read_spec
from edkm_cli.granularity import Granularity
from edkm_cli.nn.swap import LINEAR, Swap, check_geometry, plan_swaps

_CALIBRATION_LENGTH = 1024


def choose_device(device: str) -> str:
    """`auto` is CUDA where there is one. Raises UserError for a device this machine lacks."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"--device must be one this machine has, but {device!r} is not available; use cpu or auto")
    return device


def choose_dtype(dtype: str, device: str, *, master: bool = False) -> str:
    """`auto` is float32 on a CPU, and on CUDA bfloat16, but float32 for the `master` weights of sharded training."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.startswith("cuda") and not master else "float32"


def choose_mixed_precision(mixed_precision: str, dtype: str, device: str) -> str:
    """`auto` is bf16 where float32 weights train on a GPU: matrix products then run in bfloat16."""
    if mixed_precision != "auto":
        return mixed_precision
    return "bf16" if device.startswith("cuda") and dtype == "float32" else "no"


def meta_model(config: CompressConfig) -> Any:
    """The dense model on the meta device: shapes without weights. Raises UserError for an unknown model."""
    from transformers import AutoModelForCausalLM

    source = models.resolve(config.model)
    if source.is_local and source.gguf_file is None and read_spec(source.location) is not None:
        raise UserError(f"--model {config.model} is compressed already; give the uncompressed model")
    architecture = models.load_config(source, trust_remote_code=config.trust_remote_code)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(architecture, trust_remote_code=config.trust_remote_code)


def plan(config: CompressConfig) -> tuple[Any, list[Swap]]:
    """The meta model and what becomes of its modules. Raises UserError where the geometry does not fit."""
    model = meta_model(config)
    swaps = plan_swaps(model, embedding_bits=embedding_bits(config), skip=config.skip)
    check_geometry(swaps, config.granularity)
    return model, swaps


def embedding_bits(config: CompressConfig) -> int | None:
    """16 in the configuration means dense."""
    return None if config.embedding_bits == 16 else config.embedding_bits


def spec_of(config: CompressConfig, swaps: list[Swap]) -> QuantizationSpec:
    return QuantizationSpec(
        bits=config.bits,
        granularity=config.granularity,
        lut_dtype=config.lut_dtype,
        embedding_bits=embedding_bits(config),
        skipped=[swap.name for swap in swaps if swap.reason],
    )


def evaluation_tokens(config: CompressConfig, tokenizer: Any) -> Tensor:
    """What perplexities are measured on: --eval-data as a whole, or the held-out part of the first --data."""
    name = config.eval_data or config.data[0]
    split = data.measured_split(data.parse_source(name)) if config.eval_data else "test"
    return data.tokenize(data.load_documents(name, split, tokenizer=tokenizer), tokenizer)


def calibration_batches(tokens: Tensor, config: CompressConfig, limit: int | None = None) -> list[Tensor]:
    """The first blocks of a seeded shuffle, together at most `limit` tokens (`calibration_tokens` if None), at least
    one block."""
    limit = config.calibration_tokens if limit is None else limit
    length = min(_CALIBRATION_LENGTH, tokens.numel(), max(limit, 2))
    blocks = data.Blocks(tokens, length, seed=config.seed)
    count = max(1, min(len(blocks), limit // length))
    return [blocks.batch(index, 1) for index in range(count)]


def compensates(config: CompressConfig) -> bool:
    """Whether weights start compensated. `auto`: where no iteration moves the tables that weights were fitted to, and
    weights are free to move, which those under LoRA are not."""
    if config.start != "auto":
        return config.start == "compensated"
    return trains_luts(config.mode, config.iterations) and not config.lora_rank


def needed_bytes(config: CompressConfig, parameters: int, swaps: list[Swap]) -> int:
    """Disk for the result (at most a byte a weight) and for checkpoints (what trains, and two moments, in float32)."""
    kept = (config.keep + 1) if config.steps and config.save_every else 0
    trained = parameters
    if config.lora_rank:
        geometry, trained = Granularity.parse(config.granularity), 0
        for swap in swaps:
            if swap.role == LINEAR and not swap.reason:
                tile_rows, tile_columns = geometry.tile(*swap.shape)
                luts = swap.shape[0] // tile_rows * (swap.shape[1] // tile_columns)
                trained += config.lora_rank * sum(swap.shape) + luts * 2**config.bits
    return int(parameters * 1.1) + 50_000_000 + kept * 12 * trained
