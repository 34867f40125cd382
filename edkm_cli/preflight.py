"""What a configuration resolves to before anything costs: one plan, made once, for the run and for the dry run.

Device and dtypes, what is swapped for what, and everything that `auto` stands for. Texts and the room that a run takes
follow from it, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from edkm_cli import data, models
from edkm_cli.clustering.linear import trains_luts
from edkm_cli.config import CompressConfig
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec, read_spec
from edkm_cli.granularity import Granularity
from edkm_cli.nn.clustered import Clustering, lut_layers
from edkm_cli.nn.swap import Swap, check_geometry, decoder_bits_per_weight, plan_swaps
from edkm_cli.targets import check_model
from edkm_cli.widths import allots_bits, embedding_bits, planned_spec

_CALIBRATION_LENGTH = 1024
_LONGEST_TOKEN = 20  # characters, on average over any text
_RECONSTRUCTION_LENGTH = 512  # shorter ones leave long contexts to chance, longer ones cost attention


@dataclass(frozen=True)
class Setting:
    """Where a run takes place: on `device` (`cpu`, `cuda` or `cuda:N`), by so many processes, each with as many threads;
    parameters sharded over the processes, or whole on each."""

    device: str = "cpu"
    processes: int = 1
    sharded: bool = False
    threads: int = 1

    @property
    def gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def share(self) -> float:
        """What one process keeps of a parameter."""
        return 1 / self.processes if self.sharded else 1.0


@dataclass(frozen=True)
class RunPlan:
    """A configuration on a machine, with nothing left to decide. `plan_run` makes it.

    Attributes:
        config, setting: what is asked for, and where it runs.
        source: where the model is.
        architecture: the model's Hugging Face configuration.
        parameters: of the dense model; tied ones once.
        swaps: what becomes of its linears and embeddings.
        spec: the checkpoint's `quantization_config`.
        dense_dtype: of the uncompressed model (`float32`, `bfloat16`, `float16`).
        dtype: of the clustered model; differs where sharded training keeps float32 master weights.
        mixed_precision: `no` or `bf16`.
        start: how weights start: `kmeans`, `compensated` or `reconstructed`.
        average: bits of a linear, on average.
        allotted: whether the bits of each linear in `spec` are final; before, they only have the right sum.
    """

    config: CompressConfig
    setting: Setting
    source: models.ModelSource
    architecture: Any
    parameters: int
    swaps: tuple[Swap, ...]
    spec: QuantizationSpec
    dense_dtype: str
    dtype: str
    mixed_precision: str
    start: str
    average: float
    allotted: bool = False

    def with_bits(self, bits: Mapping[str, int]) -> RunPlan:
        """The plan after the linears have been given their bits, by module path."""
        return replace(self, spec=self.spec.with_bits(bits), allotted=True)

    def after_start(self, model: Any) -> RunPlan:
        """The plan with the bits that the linears of the clustered model have."""
        return self.with_bits({name: layer.clustering.bits for name, layer in lut_layers(model).items()})

    def skeleton(self) -> Any:
        """The dense model on the meta device: shapes without weights."""
        return models.skeleton(self.source, self.architecture, trust_remote_code=self.config.trust_remote_code)

    @property
    def clustered(self) -> list[Swap]:
        """The linears that are clustered."""
        return [swap for swap in self.swaps if swap.clustered]

    @property
    def clustering(self) -> Clustering:
        config = self.config
        return Clustering(
            bits=self.spec.bits,
            granularity=self.spec.granularity,
            lut_dtype=config.lut_dtype,
            method=config.method,
            mode=config.mode,
            iterations=config.iterations,
            lut_scale=config.lut_scale,
        )

    @property
    def by_sensitivity(self) -> bool:
        """Whether the linears get bits by sensitivity."""
        return allots_bits(self.config, self.start)

    @property
    def average_bits(self) -> float | None:
        """What the linears' bits are to be on average, where they are still to be given by sensitivity."""
        return self.average if self.by_sensitivity and not self.allotted else None

    @property
    def decoder_bits_per_weight(self) -> float:
        return decoder_bits_per_weight(self.swaps, self.spec)

    @property
    def distills(self) -> bool:
        """Whether the uncompressed model teaches: beside a trained one it is a copy, under LoRA it is within."""
        return bool(self.config.distill and self.config.steps)

    @property
    def writes_text(self) -> bool:
        """Whether the uncompressed model writes some of the training text itself."""
        return any(source.needs_model for source in data.parse_sources(list(self.config.data)))

    @property
    def copies_teacher(self) -> bool:
        return self.distills and not self.config.lora_rank

    @property
    def step_sequences(self) -> int:
        """Sequences that one optimizer step sees, over all processes."""
        return self.config.batch_size * self.config.gradient_accumulation * self.setting.processes

    @property
    def training_tokens(self) -> int:
        return self.config.steps * self.step_sequences * self.config.sequence_length


def plan_run(config: CompressConfig, setting: Setting, *, like: RunPlan | None = None) -> RunPlan:
    """Decide everything about a run. `like` is a plan of the same model with the same modules to swap, to save time.

    Raises UserError for an unknown model, a geometry that does not fit, or dtypes that sharding cannot train.
    """
    start = choose_start(config, sharded=setting.sharded)
    if like is not None:
        source, architecture, parameters, swaps = like.source, like.architecture, like.parameters, like.swaps
    else:
        source = models.resolve(config.model)
        own = source.is_local and source.gguf_file is None and read_spec(source.location) is not None
        if own and not config.dequantize:
            raise UserError(
                f"--model {config.model} is compressed already; give the uncompressed model, or --dequantize to start "
                "from what is left of it"
            )
        architecture = models.load_config(
            source, trust_remote_code=config.trust_remote_code, dequantize=config.dequantize
        )
        skeleton = models.skeleton(source, architecture, trust_remote_code=config.trust_remote_code)
        parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        swaps = tuple(plan_swaps(skeleton, embedding_bits=embedding_bits(config, start), skip=config.skip))
    if setting.sharded and config.dequantize:
        raise UserError(
            "--dequantize decodes a model that is whole, but --sharding full divides it; save the decoded model first",
            everywhere=True,
        )
    if setting.sharded and any(source.needs_model for source in data.parse_sources(list(config.data))):
        raise UserError(
            "--data self is written by a model that is whole, but --sharding full divides it; give other --data",
            everywhere=True,
        )
    if setting.sharded and allots_bits(config, start):
        raise UserError(
            "--allocation sensitivity compares matrices that are whole, but --sharding full divides them; use "
            "--allocation uniform",
            everywhere=True,
        )
    granularity = Granularity.parse(config.granularity)
    check_geometry(swaps, granularity)
    if config.target is not None:
        shapes = {swap.name: swap.shape for swap in swaps if swap.clustered}
        check_model(config.target, architecture, shapes, lut_scale=config.lut_scale or 1.0)
    dense_dtype = choose_dtype(config.dtype, setting.device)
    dtype = choose_dtype(config.dtype, setting.device, master=setting.sharded and not config.lora_rank)
    tables_train_beside_weights = trains_luts(config.mode, config.iterations) and not config.lora_rank
    if setting.sharded and tables_train_beside_weights and dtype != "float32":
        raise UserError(
            "--sharding full trains weights and LUT entries in one group, so both must be float32, but --dtype is "
            f"{dtype}; leave --dtype out, or use --lora-rank, or --mode soft or hard with --iterations",
            everywhere=True,
        )
    if config.optimizer == "adamw-8bit" and config.steps and dtype != "float32" and not config.lora_rank:
        raise UserError(
            f"--optimizer adamw-8bit rounds the updates of {dtype} weights away; give --dtype float32 (with "
            "--mixed-precision bf16), --optimizer adamw, or --lora-rank",
            everywhere=True,
        )
    spec, average = planned_spec(config, granularity, swaps, start)
    return RunPlan(
        config=config,
        setting=setting,
        source=source,
        architecture=architecture,
        parameters=parameters,
        swaps=swaps,
        spec=spec,
        dense_dtype=dense_dtype,
        dtype=dtype,
        mixed_precision=choose_mixed_precision(config.mixed_precision, dtype, setting.device),
        start=start,
        average=average,
    )


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


def data_options(config: CompressConfig) -> data.DataOptions:
    """How training data are read and laid out."""
    return data.DataOptions(
        column=config.data_column,
        streaming=config.streaming,
        train_on=config.train_on,
        packing=config.packing,
        long_records=config.long_records,
        workers=config.data_workers,
        rebuild=config.rebuild_cache,
    )


def needed_tokens(plan: RunPlan) -> int:
    """Training tokens that a run has a use for, some more for sequences that are not filled."""
    config = plan.config
    return (
        max(int(1.1 * plan.training_tokens), config.calibration_tokens, config.fitted_tokens) + config.sequence_length
    )


def named_sources(config: CompressConfig) -> list[data.Source]:
    """All that is trained on or measured."""
    return [*data.parse_sources(config.data), *data.parse_sources(config.eval_data, "--eval-data")]


def evaluation_names(config: CompressConfig) -> dict[str, str]:
    """What the measured texts are called in reports -> the source that they are or are held out of: each --eval-data, or
    a part of the first --data. A text that the model is yet to write cannot be measured on: `builtin` takes its place."""
    own = data.parse_source(config.data[0]).needs_model
    names = config.eval_data or ((data.BUILTIN,) if own else ())
    return {name: name for name in names} or {f"held-out part of {config.data[0]}": config.data[0]}


def evaluation_documents(config: CompressConfig, tokenizer: Any) -> dict[str, data.Documents]:
    """The texts that are measured, by name. Raises UserError where one cannot be had, or is trained on."""
    trained = data.parse_sources(list(config.data))
    needed = _LONGEST_TOKEN * config.eval_windows * config.context  # of a text that is not read as a whole
    found = {}
    for name, text in evaluation_names(config).items():
        held_out = name != text
        source = data.parse_source(text, "--data" if held_out else "--eval-data")
        if not held_out:
            data.require_apart(trained, source)
        found[name] = data.load_documents(
            source,
            "test" if held_out else None,
            tokenizer=tokenizer,
            options=data_options(config),
            characters=needed,
        )
    return found


def start_batches(tokens: Tensor | data.TrainingData, plan: RunPlan) -> list[Tensor] | None:
    """The texts, (1, length) each, that weights are compensated or reconstructed on; None where they start as they are."""
    if plan.start == "kmeans":
        return None
    length = _RECONSTRUCTION_LENGTH if plan.start == "reconstructed" else _CALIBRATION_LENGTH
    return calibration_batches(tokens, plan.config, plan.config.fitted_tokens, length=length)


def calibration_batches(
    tokens: Tensor | data.TrainingData,
    config: CompressConfig,
    limit: int | None = None,
    *,
    length: int = _CALIBRATION_LENGTH,
) -> list[Tensor]:
    """The first blocks of a seeded shuffle, together at most `limit` tokens (`calibration_tokens` if None), at least
    one block; of `length` tokens each where there are so many."""
    limit = config.calibration_tokens if limit is None else limit
    if isinstance(tokens, data.TrainingData):
        return tokens.calibration_batches(length, limit=limit, seed=config.seed)
    count = tokens.numel()
    length = min(length, count, max(limit, 2))
    if tokens.is_meta:  # a rehearsal, which knows shapes only
        return [tokens[:length][None]] * max(1, min(count // length, limit // length))
    blocks = data.Blocks(tokens, length, seed=config.seed)
    count = max(1, min(len(blocks), limit // length))
    return [blocks.batch(index, 1) for index in range(count)]


def choose_start(config: CompressConfig, *, sharded: bool) -> str:
    """`kmeans`, `compensated` or `reconstructed`. Raises UserError for a start that sharded parameters cannot have.

    `auto` moves weights only where they are free to move, which those under LoRA are not, and where no unweighted
    iteration moves the tables that weights are fitted to. Reconstruction is for layers that are whole.
    """
    if config.start == "reconstructed" and sharded:
        raise UserError(
            "--start reconstructed needs layers that are whole, but --sharding full divides them; use --start compensated",
            everywhere=True,
        )
    if config.start != "auto":
        return config.start
    weighted = config.centroid_weighting == "importance" and config.importance != "none"
    if config.lora_rank or not (trains_luts(config.mode, config.iterations) or weighted):
        return "kmeans"
    # What divides the layers of many processes shall not change the result of one.
    whole = config.mode == "straight-through" and not sharded and config.sharding != "full"
    return "reconstructed" if whole else "compensated"


def needed_bytes(plan: RunPlan) -> int:
    """Disk for the result (at most a byte a weight), for the start that training begins from, and for checkpoints (what
    trains, and two moments, in float32)."""
    config = plan.config
    kept = (config.keep + 1) if config.steps and config.save_every else 0
    kept += 2 if config.steps and config.keep_best else 0
    kept *= 2 if config.compare_dense else 1
    trained = plan.parameters
    if config.lora_rank:
        updates = sum(config.lora_rank * sum(swap.shape) for swap in plan.clustered)
        luts = sum(
            plan.spec.granularity.groups(*swap.shape) * 2 ** plan.spec.bits_of(swap.name) for swap in plan.clustered
        )
        trained = updates + luts
    start = getattr(torch, plan.dtype).itemsize * plan.parameters
    return int(plan.parameters * 1.1) + 50_000_000 + start + kept * 12 * trained
