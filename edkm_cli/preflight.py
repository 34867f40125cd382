"""What a configuration resolves to before anything costs: one plan, made once, for the run and for the dry run.

Every decision that a setting leaves open is taken here and nowhere else: what `auto` and defaults that depend on others
stand for (`resolve`), device and dtypes, what is swapped for what. Texts and the room that a run takes follow from it, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from edkm_cli import data, models
from edkm_cli.clustering.linear import trains_luts
from edkm_cli.config import CompressConfig, TrainingSettings, trains_whole_weights
from edkm_cli.distributed import World, processes_here
from edkm_cli.errors import UserError, explained
from edkm_cli.format import DENSE_BITS, QuantizationSpec, read_spec
from edkm_cli.granularity import Granularity, table_numbers
from edkm_cli.nn import allocation
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.hooks import decoder_layers, layers_form_a_chain
from edkm_cli.nn.swap import Swap, check_geometry, fall_back, plan_swaps
from edkm_cli.precision import multiplies_bfloat16
from edkm_cli.runtime.dispatch import forced_path
from edkm_cli.runtime.experts import is_expert
from edkm_cli.settings import parse_bytes, part_of
from edkm_cli.targets import check_model

_LONG_TEXT = 1024  # of compensation alone and of the methods that are compared
_TEXT_LENGTH = 512  # shorter ones leave long contexts to chance, longer ones cost attention
_LEAST_CALIBRATION_TOKENS, _MOST_CALIBRATION_TOKENS = 8192, 32_768
_LEAST_START_TOKENS, _MOST_START_TOKENS = 20_480, 61_440  # a start gets better with more, and slower


@dataclass(frozen=True)
class RunPlan:
    """A configuration on a machine, with nothing left to decide. `plan_run` makes it.

    Attributes:
        asked, config: the configuration as it was given, and with nothing left open: see `resolve`.
        skeleton: the dense model on the meta device, shapes without weights; shared, so copy it before a change.
        dense_dtype: of the uncompressed model. The clustered one's is `config.dtype`, which differs where sharded training
            keeps float32 master weights.
        allocated: whether the bits of each linear in `spec` are final; before, they only have the right sum.
    """

    asked: CompressConfig
    config: CompressConfig
    world: World
    texts: tuple[data.Source, ...]
    source: models.ModelSource
    architecture: Any
    skeleton: Any = field(repr=False, compare=False)
    swaps: tuple[Swap, ...]
    spec: QuantizationSpec
    dense_dtype: str
    average: float
    allocated: bool = False

    def with_bits(self, bits: Mapping[str, int]) -> "RunPlan":
        """The plan after the linears have been given their bits, by module path."""
        return replace(self, spec=self.spec.with_bits(bits), allocated=True)

    @property
    def resolved(self) -> dict[str, Any]:
        """What settings that were left open stand for."""
        asked = asdict(self.asked)
        return {name: value for name, value in asdict(self.config).items() if value != asked[name]}

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.skeleton.parameters())

    @property
    def clustered(self) -> list[Swap]:
        return [swap for swap in self.swaps if swap.clustered]

    @property
    def by_layer(self) -> bool:
        """Whether only the decoder layer that the start works on is dense: where every layer is reconstructed, then packed,
        since no weight trains afterwards."""
        config, inside = self.config, tuple(f"{path}." for path in decoder_layers(self.skeleton))
        packs = config.start == "reconstructed" and (config.assignments == "held" or not config.steps)
        return packs and not self.world.sharded and all(swap.name.startswith(inside) for swap in self.clustered)

    @property
    def streams(self) -> bool:
        """Whether each layer is read from the files when the start reaches it, which one of a packed model cannot be."""
        source = self.source
        whole = source.gguf_file and not source.architecture  # decoded in one piece, but an alias's
        return self.by_layer and not whole and not (self.config.dequantize and read_spec(source.location) is not None)

    @property
    def clustering(self) -> Clustering:
        return part_of(Clustering, self.config, bits=self.spec.bits)

    @property
    def average_bits(self) -> float | None:
        """What the linears' bits are to be on average, where they are still to be given by sensitivity."""
        return self.average if self.config.allocation == allocation.SENSITIVITY and not self.allocated else None

    @property
    def distills(self) -> bool:
        """Whether the uncompressed model teaches."""
        return bool(self.config.distill and self.config.steps)

    @property
    def writes_text(self) -> bool:
        """Whether the uncompressed model writes some of the training text itself."""
        return any(source.needs_model for source in self.texts)

    @property
    def needed_bytes(self) -> int:
        """Disk for the result (at most a byte a weight), for the start that training begins from, and for checkpoints (what
        trains, and two moments, in float32)."""
        config, spec, trained = self.config, self.spec, self.parameters
        kept = config.most_checkpoints * (2 if config.compare_dense else 1)
        if config.assignments == "held" and not config.compare_dense:
            tables = {one.name: spec.granularity_of(one.name).groups(*one.shape) for one in self.clustered}
            trained = sum(count * table_numbers(spec.palette, spec.bits_of(name)) for name, count in tables.items())
        size = getattr(torch, config.dtype).itemsize
        start = (1.1 if self.by_layer or config.assignments == "held" else size) * self.parameters
        # The states of the layer that a killed start goes on with, exact and compressed, beside the next one's.
        start += self.by_layer * 4 * self.width * size * (config.start_tokens or 0)
        return int(self.parameters * 1.1 + start + kept * 12 * trained)

    @property
    def waiting_bytes(self) -> int:
        """Temporary files of the start on this machine: what enters each layer in calibration, or all records of one layer
        in reconstruction: some states, and what enters and leaves its matrices."""
        weighed = self.config.calibration_tokens if self.config.importance != "none" else 0
        texts = len(decoder_layers(self.skeleton)) * (weighed or 0)
        widths = 8 * self.width + max((swap.shape[1] for swap in self.clustered), default=0)
        records = widths * processes_here() * (self.config.start_tokens or 0)
        return max(texts * self.width, records) * getattr(torch, self.config.dtype).itemsize * self.by_layer

    @property
    def width(self) -> int:
        """Numbers of a token's hidden state."""
        return self.skeleton.get_input_embeddings().weight.shape[1]

    @property
    def training_tokens(self) -> int:
        return self.config.trained_tokens(self.world.size)


def resolve(config: CompressConfig, world: World, texts: Sequence[data.Source]) -> CompressConfig:
    """The configuration with every open setting decided: no `auto`, and no None that stands for a choice.

    Only `device`, `memory`, `streaming`, `data_column` and `text_tokens` stay as they are, which are decided where they
    take effect, and `embedding_bits` and `lut_dtype`, for which `plan_run` looks at the model. Raises UserError for what was
    asked for and cannot be had where it runs.
    """
    # What divides the layers of many processes shall not change the result of one.
    try:
        config = replace(config, sharding="full" if world.sharded or config.sharding == "full" else "none")
    except UserError as error:
        raise UserError(str(error), everywhere=True) from error
    if config.text_tokens and not any(text.needs_model for text in texts):
        raise UserError("--text-tokens is how much --data self writes, but --data names no self; leave it out")
    start, start_tokens = _start(config), config.start_tokens or choose_start_tokens(config.trained_tokens(world.size))
    labels = choose_label_weight(config, texts) if config.distill else 1.0
    dtype = choose_dtype(config.dtype, world.device, master=world.sharded)
    rounds = dtype == "float32" and multiplies_bfloat16("cuda" if world.gpu else "cpu")
    # A weight that changes its entry jumps by the distance of two; a gradient of few tokens is too noisy to make up for
    # that, and the start chose the entries together.
    alone = not config.steps or (config.distill and not labels)  # nothing but the teacher is learnt
    holds = trains_whole_weights(config) and alone and start != "kmeans"
    held = holds if config.assignments == "auto" else config.assignments == "held"
    for name, idle in (("start_passes", start != "reconstructed"), ("weight_decay", held and config.steps)):
        if idle and getattr(config, name):
            rule = f"--{name.replace('_', '-')} does nothing here (start {start}, assignments {'held' if held else 'free'})"
            raise UserError(f"{rule}; leave it out", everywhere=True)
    # Each takes twice as long as a token of the start.
    calibration_tokens = min(max(2 * start_tokens // 5, _LEAST_CALIBRATION_TOKENS), _MOST_CALIBRATION_TOKENS)
    return replace(
        config,
        start=start,
        start_tokens=start_tokens,
        calibration_tokens=config.calibration_tokens or calibration_tokens,
        allocation=allocation.choose_allocation(config, start),
        label_weight=labels,
        assignments="held" if held else "free",
        dtype=dtype,
        gradient_checkpointing=held if config.gradient_checkpointing is None else config.gradient_checkpointing,
        mixed_precision=config.mixed_precision if config.mixed_precision != "auto" else "bf16" if rounds else "no",
    )


def choose_label_weight(config: TrainingSettings, texts: Sequence[data.Source]) -> float:
    """What `--label-weight` means beside a teacher: text that a model wrote has no labels to teach."""
    if config.label_weight is not None:
        return config.label_weight
    return 0.0 if texts and all(source.needs_model for source in texts) else 1.0


def choose_start_tokens(trained: int) -> int:
    """What `--start-tokens` means where so many tokens are trained on."""
    return min(max(trained, _LEAST_START_TOKENS), _MOST_START_TOKENS)


def _start(config: CompressConfig) -> str:
    """`auto` moves weights only where no unweighted iteration moves the tables that weights are fitted to. Reconstruction is
    for whole layers."""
    if config.start != "auto":
        return config.start
    weighted = config.centroid_weighting == "importance" and config.importance != "none"
    if not (trains_luts(config.mode, config.iterations) or weighted):
        return "kmeans"
    return "reconstructed" if trains_whole_weights(config) else "compensated"


def plan_run(config: CompressConfig, world: World, *, like: RunPlan | None = None) -> RunPlan:
    """Decide everything about a run. `like` is a plan of the same model with the same modules to swap, to save time.

    Raises UserError for an unknown model, a geometry that does not fit, or what sharding cannot do.
    """
    asked = config
    texts = like.texts if like and like.asked.data == config.data else tuple(data.parse_sources(config.data))
    config = resolve(asked, world, texts)
    if like is not None:
        source, architecture, skeleton, swaps = like.source, like.architecture, like.skeleton, like.swaps
    else:
        source = models.resolve(config.model, config.revision, trust_remote_code=config.trust_remote_code)
        source = replace(source, splits=config.experts == "compressed")
        compressed = source.is_local and source.gguf_file is None and read_spec(source.location) is not None
        if compressed and not config.dequantize:
            rule = f"--model {config.model} is compressed already"
            raise UserError(f"{rule}; give the uncompressed model, or --dequantize to start from what is left of it")
        architecture = models.load_config(source, dequantize=config.dequantize)
        skeleton = models.skeleton(source, architecture)
        bits = DENSE_BITS if config.embedding_bits == DENSE_BITS else 0
        planned = plan_swaps(skeleton, embedding_bits=bits, skip=config.skip)
        swaps = tuple(fall_back(planned, config.target, config.granularity, config.embedding_group))
    if config.start == "reconstructed" and not layers_form_a_chain(skeleton):
        if asked.start == "reconstructed":
            rule = "--start reconstructed is for models whose decoder layers get hidden states of a text and nothing"
            raise UserError(f"{rule} else, which {type(skeleton).__name__} is not known to be; use --start compensated")
        config = resolve(replace(asked, start="compensated"), world, texts)
    if world.sharded:
        _require_divisible(config, texts, swaps)
    check_geometry(swaps, Granularity.parse(config.granularity), config.overrides)
    if config.target is not None:
        shapes = {swap.name: swap.shape for swap in swaps if swap.clustered}
        experts = any(is_expert(swap.name) for swap in swaps)
        check_model(config.target, architecture, shapes, lut_scale=config.lut_scale or 1.0, experts=experts)
    dense_dtype = choose_dtype(asked.dtype, world.device)
    few = allocation.choose_embedding_bits(config, swaps)
    config = replace(config, lut_dtype=allocation.choose_lut_dtype(config, swaps, few))
    if config.target_size:
        size_of = models.dense_sizes(source, architecture, dense_dtype)
        size = parse_bytes(config.target_size)

        def average_beside(embedding_bits: int | str) -> float:
            sized = replace(config, embedding_bits=embedding_bits)
            return allocation.bits_for_size(sized, swaps, skeleton, size_of, target_bytes=size)

        few = allocation.choose_embedding_bits(config, swaps, average_beside)
        config = replace(config, bits=average_beside(few))
    config = replace(config, embedding_bits=few)
    spec, average = allocation.planned_spec(config, swaps, asked=asked)
    return RunPlan(asked, config, world, texts, source, architecture, skeleton, swaps, spec, dense_dtype, average)


def _require_divisible(config: CompressConfig, texts: Sequence[data.Source], swaps: Sequence[Swap]) -> None:
    """Raises UserError for what cannot be done with parameters that are divided over processes."""
    why = ""
    if config.dequantize:
        why = "--dequantize decodes a model that is whole, but --sharding full divides it; save the decoded model first"
    elif any(source.needs_model for source in texts):
        why = "--data self is written by a model that is whole, but --sharding full divides it; give other --data"
    elif any(is_expert(swap.name) for swap in swaps):
        why = "--sharding full needs layers that all processes call alike, but experts are not; use --experts dense"
    elif config.allocation == allocation.SENSITIVITY:
        whole = isinstance(config.bits, int) and not config.target_size
        uniform = "--allocation uniform" if whole else "a whole number of --bits"
        why = f"--allocation sensitivity compares matrices that are whole, but --sharding full divides them; use {uniform}"
    elif trains_luts(config.mode, config.iterations) and config.dtype != "float32":
        rule = "--sharding full trains weights and LUT entries in one group, so both must be float32"
        why = f"{rule}, but --dtype is {config.dtype}; leave --dtype out, or use --mode soft or hard with --iterations"
    if why:
        raise UserError(why, everywhere=True)


def choose_device(device: str) -> str:
    """`auto` is CUDA where there is one. Raises UserError for a device this machine lacks, or a path of products (dispatch)
    that is none."""
    forced_path()
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    with explained(f"--device must be auto, cpu, cuda or cuda:N, got {device!r}"):
        one = torch.device(device)
    if one.type not in ("cpu", "cuda") or (one.type == "cuda" and (one.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"--device must be one this machine has, but {device!r} is not available; use cpu or auto")
    if device.startswith("cuda:"):
        torch.cuda.set_device(device)  # kernels are started on the current GPU, wherever their tensors are
    return "cpu" if one.type == "cpu" else device


def choose_dtype(dtype: str, device: str, *, master: bool = False) -> str:
    """`auto` is float32 on a CPU, and on CUDA bfloat16, but float32 for the `master` weights of sharded training."""
    return dtype if dtype != "auto" else "bfloat16" if device.startswith("cuda") and not master else "float32"


def needed_tokens(plan: RunPlan, *, written: bool = False) -> int:
    """Training tokens of each source that a run has a use for, or of what is `written` for it, some more for sequences that
    are not filled."""
    config = plan.config
    trained, fitted = int(1.1 * plan.training_tokens), config.start_tokens or 0
    if written and config.text_tokens:
        trained = min(trained, config.text_tokens)
    return max(trained, config.calibration_tokens or 0, fitted) + config.sequence_length


def calibration_text(text: data.TrainingData, plan: RunPlan) -> list[Tensor]:
    """The texts, (1, length) each, that the importance is measured on."""
    config = plan.config
    if config.importance == "none":
        return []
    return text.calibration_batches(_TEXT_LENGTH, limit=config.calibration_tokens or 0, seed=config.seed)


def start_batches(text: data.TrainingData, plan: RunPlan) -> list[Tensor] | None:
    """The texts, (1, length) each, that weights are compensated or reconstructed on; None where they start as they are."""
    config = plan.config
    if config.start == "kmeans":
        return None
    length = _TEXT_LENGTH if config.start == "reconstructed" else _LONG_TEXT
    return text.calibration_batches(length, limit=config.start_tokens or 0, seed=config.seed)
