"""The configuration of `edkm compress`: a frozen dataclass read from YAML and flags.

Each field is the declaration of an option, with its default, help, panel, choices and range (`edkm_cli.settings`),
laid out as a table: the default stands beside the name, the rest below. Nothing here imports torch, so `--help` and the
checks of a configuration are instant.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edkm_cli import settings
from edkm_cli.granularity import FOURS, FREE, LUT_DTYPES, PALETTES, Granularity, Override, override_texts, table_faults
from edkm_cli.settings import COMPRESSION, DATA, DTYPES, MODEL, OUTPUT, SCALE, TRAINING, faults, refuse, setting
from edkm_cli.targets import TARGETS, misfits

CHECKPOINTS = "checkpoints"  # of training, in the unfinished result


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
        rule = f"temperature falls to temperature_end, but {config.temperature:g} is below {config.temperature_end:g}"
        found.append(f"{rule}; give a lower temperature_end, or temperature_schedule constant")
    found += unmeasured_best(config)
    if config.lut_scale is not None and math.frexp(config.lut_scale)[0] != 0.5:
        found.append(f"lut_scale must be a power of two, such as 0.0625, got {config.lut_scale:g}")
    if config.lut_scale is not None and config.lut_dtype != "float8_e4m3fn":
        found.append(f"lut_scale is for lut_dtype float8_e4m3fn, got {config.lut_dtype}; leave it out")
    if config.lut_dtype == "int8" and config.target is None:
        found.append("lut_dtype int8 is of targets gguf:q2_k to gguf:q6_k; give one of them in its place")
    if (config.palette, config.lut_dtype, config.lut_scale) == ("affine", "float8_e4m3fn", None):
        found.append("palette affine with lut_dtype float8_e4m3fn has no scale for offsets; use lut_dtype float16")
    found += table_faults(config.palette, config.bits, Granularity.parse(config.granularity), config.lut_dtype)
    if config.palette != FREE and (config.mode != "straight-through" or config.method != "edkm"):
        found.append(f"palette {config.palette} is for mode straight-through and method edkm; leave both out")
    found += _about_bits(config)
    if config.target is not None:
        about = {name: getattr(config, name) for name in ("granularity", "lut_dtype", "palette", "lut_scale")}
        found += misfits(config.target, bits=config.bits, **about)
    if config.compare_dense and not config.steps:
        found.append("compare_dense trains the uncompressed model for as many steps, but steps is 0; give steps")
    if config.embedding_group and config.embedding_bits == 16:
        found.append("embedding_group is for compressed embeddings, but embedding_bits is 16; give embedding_bits")
    if str(config.embedding_bits).endswith("+") and (config.embedding_group or config.palette != FREE):
        rule = f"embedding_bits {config.embedding_bits} is for palette free without embedding_group"
        found.append(f"{rule}; give a number")
    if not config.data:
        found.append("data must name at least one data set or file")
    twice = [name for name in dict.fromkeys(config.eval_data) if config.eval_data.count(name) > 1]
    found += [f"eval_data names {name} twice; give each text once" for name in twice]
    return found


def unmeasured_best(config: Any) -> list[str]:
    """The fault of `keep_best` without `eval_every`."""
    unmeasured = config.keep_best and not config.eval_every
    return ["keep_best chooses among measured steps, but eval_every is 0; give eval_every"] if unmeasured else []


def _about_bits(config: Any) -> list[str]:
    found, bits, target = [], config.bits, config.target
    if target is not None and (config.overrides or config.target_size):
        given = "overrides" if config.overrides else "target_size"
        found.append(f"target {target} says what its tables are; leave {given} out")
    plain = TARGETS[target].settings.get("embedding_bits") if target in TARGETS else None
    if plain and config.embedding_bits not in ("auto", plain):  # what was rounded would be stored in full
        found.append(f"target {target} stores embeddings uncompressed, got {config.embedding_bits} bits; leave it out")
    for override in map(Override.parse, config.overrides):
        about = override.bits or bits, override.granularity or Granularity.parse(config.granularity)
        faults = table_faults(config.palette, *about, config.lut_dtype)
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
    elif average and (target is not None or config.palette in FOURS):
        kind = f"target {target} holds" if target else f"palette {config.palette} has"
        found.append(f"{kind} one number of bits for all matrices; use allocation uniform")
    return found


def known_positions(architecture: Any) -> int | None:
    """The most tokens that a model's configuration has positions for; None where it names no number."""
    positions = getattr(architecture.get_text_config(decoder=True), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def head_size(config: Any) -> int:
    """Channels of an attention head."""
    config = (getattr(config, "per_layer_config", None) or [config])[0]  # Gemma 4's differ
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def lengths_of(config: Any) -> dict[str, int]:
    """What `too_long` asks of a command that trains and measures."""
    return {"--sequence-length": config.sequence_length * (config.steps > 0), "--context": config.context}


def too_long(architecture: Any, lengths: Mapping[str, int]) -> list[str]:
    """A warning for each option whose length in tokens is more than the positions that a model's configuration names."""
    most = known_positions(architecture) or math.inf
    more = f"is more than the {most} positions that the model knows; give at most {most}"
    return [f"{option} {length} {more}" for option, length in lengths.items() if length > most]


@dataclass(frozen=True)
class TextSettings:
    """The texts of a run: what is trained on, how it is laid out, and what is measured."""

    # fmt: off
    data: tuple[str, ...] = setting(("self",),
        "Training data: self (text that the model writes), builtin (Python's documentation), builtin-prose (everyday "
        "English, small), wikitext2, alpaca, c4, fineweb-edu, a data set of the hub as owner/name[:config][@split], "
        "or a file, glob or directory; NAME=WEIGHT gives it a share of the sequences.", DATA)
    data_column: str | None = setting(None,
        "Field of the records that holds the text or the messages; default: seen from the fields.", DATA)
    streaming: bool | None = setting(None,
        "Read hub data sets as they arrive, no further than needed; default: all but wikitext2 and alpaca.", DATA)
    train_on: str = setting("completions", "What of a record with an answer is learnt.", DATA,
        choices={"completions": "the answers", "all": "the whole text"})
    packing: bool = setting(False,
        "Pack whole documents into sequences, with attention within each, instead of cutting the text.", DATA)
    long_records: str = setting("split", "What becomes of a record of more tokens than a sequence.", DATA,
        choices={"split": "it is in several sequences", "drop": "it is left out, and counted"})
    data_workers: int = setting(0, "Processes that tokenize large data; 0: one for each core.", DATA, minimum=0)
    rebuild_cache: bool = setting(False, "Tokenize large data again, even where their tokens are cached.", DATA)
    eval_data: tuple[str, ...] = setting((),
        "Text on which perplexity, and the distance from the uncompressed model, are measured; default: a part held "
        "out of the first --data; with self, builtin.", DATA)
    eval_windows: int = setting(4, "Number of windows on which perplexity is measured.", DATA, minimum=1)
    context: int = setting(1024, "Tokens in a window on which perplexity is measured.", DATA, minimum=2)
    # fmt: on


@dataclass(frozen=True)
class TrainingSettings:
    """What the training loop is told (`edkm_cli.train.loop`), and where and how long it runs."""

    # fmt: off
    output: str = setting("out", "Directory for the compressed model.", OUTPUT, "--output", "-o")
    steps: int = setting(100, "Optimizer steps; 0 compresses without training.", TRAINING, minimum=0)
    learning_rate: float | None = setting(None, "Highest learning rate of weights, norms and biases; default: 2e-4, for "
        "a matrix whose root mean square is below 0.15 less in proportion.", TRAINING, "--learning-rate", "--lr",
        positive=True, maximum=1e30)
    lut_learning_rate: float | None = setting(None, "Highest learning rate of the lookup tables; default: 2e-4, for "
        "entries whose root mean square is below 0.25 (without labels k/32 of k) less in proportion.", TRAINING,
        positive=True, maximum=1e30)
    warmup: float = setting(0.1, "Fraction of the steps in which the learning rate rises.", TRAINING, minimum=0,
        maximum=1)
    weight_decay: float = setting(0.0, "Weight decay of the compressed weights.", TRAINING, minimum=0)
    max_grad_norm: float = setting(1.0, "Largest norm of a gradient; larger ones are scaled down, with inf none.",
        TRAINING, positive=True, finite=False)
    batch_size: int = setting(1, "Sequences in a forward pass of each process.", TRAINING, minimum=1)
    sequence_length: int = setting(1024, "Tokens in a training sequence.", TRAINING, minimum=2)
    gradient_accumulation: int = setting(1, "Forward and backward passes for each optimizer step.", TRAINING, minimum=1)
    label_weight: float | None = setting(None,
        "Weight of the next-token loss beside distillation; default: 1, or 0 (the teacher only) with --data self.",
        TRAINING, minimum=0)
    eval_every: int = setting(0,
        "Steps between measurements of perplexity while training; 0 measures before and after.", DATA, minimum=0)
    keep_best: bool = setting(False,
        "End training with the weights of the step with the lowest perplexity; needs --eval-every.", DATA)
    gradient_checkpointing: bool | None = setting(None,
        "Save memory: compute activations again in the backward pass; default: where assignments are held.", SCALE)
    offload: str = setting("none", "Where tensors wait for the backward pass.", SCALE,
        choices={"none": "on the device", "cpu": "in host memory"})
    device: str = setting("auto", "Where to compute: auto, cpu, cuda or cuda:N.", SCALE)
    timeout_minutes: int = setting(30, "Minutes for which processes wait for one another.", SCALE, minimum=1)
    seed: int = setting(0, "Seed of the data's order, of written text and of random values.", TRAINING, minimum=0)
    save_every: int = setting(50, "Steps between checkpoints of training, for --resume; 0 saves none.", OUTPUT,
        minimum=0)
    keep: int = setting(2, "Number of training checkpoints to keep.", OUTPUT, minimum=1)
    log_with: tuple[str, ...] = setting((), "Send metrics to a tracker as well as to metrics.jsonl.", OUTPUT,
        choices=("tensorboard", "wandb"))
    # fmt: on

    def step_sequences(self, processes: int = 1) -> int:
        """Sequences that one optimizer step sees, over all processes."""
        return self.batch_size * self.gradient_accumulation * processes

    def trained_tokens(self, processes: int = 1) -> int:
        """Tokens of all steps, over all processes."""
        return self.steps * self.step_sequences(processes) * self.sequence_length

    @property
    def most_checkpoints(self) -> int:
        """Checkpoints of training on the disk at once: those kept, one being written, and the best step's."""
        return bool(self.steps) * ((self.keep + 1) * bool(self.save_every) + 2 * self.keep_best)


@dataclass(frozen=True)
class CompressConfig(TrainingSettings, TextSettings):
    """Everything that decides a compression run. Each field is a flag of `edkm compress` and a key of its YAML."""

    # fmt: off
    model: str = setting("", "Model to compress: an alias, a hub id, a directory or a GGUF file.", MODEL)
    revision: str | None = setting(None, "Branch, tag or commit of a model on the hub.", MODEL)
    bits: float = setting(3,
        "Bits per weight, 1 to 8: a lookup table has 2^bits entries. With --allocation sensitivity an average, such "
        "as 3.5.", COMPRESSION, minimum=1, maximum=8)
    allocation: str = setting("auto", "Which matrices get how many bits.", COMPRESSION,
        choices={
            "auto": "sensitivity up to 4 bits, reconstructed, by importance gradient, where no target asks for one number",
            "uniform": "all as many as --bits says",
            "sensitivity": "more where errors raise the loss most, fewer elsewhere, the model no larger than with "
                "uniform",
        })
    granularity: str = setting("row:1",
        "Weights that share a lookup table: tensor (the whole matrix), row:G (G rows) or block:RxC (R rows by C "
        "columns).", COMPRESSION, check=Granularity.parse)
    lut_dtype: str = setting("auto",
        "Number format of the lookup tables' entries; auto: float16, and with bits by sensitivity float8_e3m4 where rows "
        "are so short that smaller tables are worth more than exact ones.", COMPRESSION, choices=("auto", *LUT_DTYPES))
    lut_scale: float | None = setting(None, "Scale of float8_e4m3fn tables, a power of two; default: one for each matrix.",
        COMPRESSION, positive=True)
    palette: str = setting(FREE, "What a lookup table may hold; all but free are for tiles of one row.", COMPRESSION,
        choices=PALETTES)
    target: str | None = setting(None,
        "Format that edkm export shall write without loss: sets bits, granularity and number format of the tables.",
        COMPRESSION, choices=tuple(TARGETS))
    embedding_bits: int | str = setting("auto",
        "Bits per weight of embeddings and output head; 16 leaves them uncompressed; 4+ is 4 for rare tokens, up to 6 for "
        "frequent ones; auto: 8, and with bits by sensitivity 3+ to 5+, so that the linears get the room.", COMPRESSION,
        choices=("auto", *range(2, 9), 16, "2+", "3+", "4+", "5+"))
    embedding_group: int = setting(0, "Neighbouring columns of an embedding that share a scale; 0: all of a row.",
        COMPRESSION, minimum=0)
    skip: tuple[str, ...] = setting((), "Module to leave uncompressed: a path or a pattern such as *.q_proj.",
        COMPRESSION)
    overrides: tuple[str, ...] = setting((),
        "Other bits or tables for some matrices, as PATTERN: bits=4, granularity=row:1; the rest shares the room.",
        COMPRESSION, "--override", check=Override.parse)
    target_size: str | None = setting(None, "Size of all tensors, such as 2.5GiB: sets --bits to the average that fits.",
        COMPRESSION, check=settings.parse_bytes)
    experts: str = setting("compressed", "What becomes of the experts of a mixture-of-experts model.", COMPRESSION,
        choices={"compressed": "tables for each of their matrices", "dense": "nothing, for --sharding full or vLLM"})
    method: str = setting("edkm", "How clustering is computed.", COMPRESSION,
        choices={"edkm": "fast, and without an attention map in memory", "dkm": "the reference, which keeps that map"})
    mode: str = setting("straight-through", "Which weights the model computes with while it trains.", COMPRESSION,
        choices={
            "straight-through": "table entries; the gradient passes to the weights and to the tables",
            "hard": "table entries, with the gradient of soft",
            "soft": "mixtures of table entries (DKM)",
        })
    iterations: int = setting(1,
        "Clustering updates of the lookup tables in each step of modes hard and soft; 0 trains the tables by gradient.",
        COMPRESSION, minimum=0)
    temperature: float = setting(0.02,
        "Softness of modes hard and soft at the first step, relative to the variance of the weights that share a "
        "table.", COMPRESSION, positive=True)
    temperature_end: float = setting(0.0005, "Temperature of the last step, if --temperature-schedule is not constant.",
        COMPRESSION, positive=True)
    temperature_schedule: str = setting("exponential",
        "How the temperature goes from --temperature to --temperature-end.", COMPRESSION,
        choices=("constant", "linear", "cosine", "exponential"))
    importance: str = setting("gradient", "What weighs each weight's error when the first lookup tables are fitted.",
        COMPRESSION,
        choices={"gradient": "squared gradients of the loss", "activation": "squared inputs", "none": "nothing"})
    centroid_weighting: str = setting("importance",
        "What weighs each weight in the clustering updates (--iterations) of modes hard and soft.", COMPRESSION,
        choices={"importance": "what --importance measures", "uniform": "nothing, as in the papers"})
    calibration_tokens: int | None = setting(None,
        "Training tokens used to measure the importance; default: two fifths of --start-tokens, 8192 to 32768.",
        COMPRESSION, minimum=2)
    start: str = setting("auto", "How weights are set before training.", COMPRESSION,
        choices={
            "auto": "reconstructed in mode straight-through without sharding; compensated where lookup tables are "
                "trained by gradient otherwise, or updated by importance; else kmeans",
            "kmeans": "as they are; each is represented by its nearest table entry",
            "compensated": "changed column by column to make up for the errors of the columns before",
            "reconstructed": "compensated, and making up for the errors of the layers before, too",
        })
    start_tokens: int | None = setting(None,
        "Training tokens used for --start compensated and reconstructed; default: as many as train, 20480 to 61440.",
        COMPRESSION, minimum=2)
    text_tokens: int | None = setting(None,
        "Most tokens that --data self writes: more steps pass over them again; default: as many as train.", DATA, minimum=2)
    start_passes: int = setting(0, "How often --start reconstructed also trains each decoder layer on its tokens.",
        COMPRESSION, minimum=0)
    assignments: str = setting("auto", "Whether weights may leave the table entries that the start gave them.",
        TRAINING,
        choices={
            "auto": "held where the teacher alone is learnt, straight-through, unsharded, not from kmeans; else free",
            "free": "weights train, and change their entries",
            "held": "only tables, norms and biases train",
        })
    distill: bool = setting(True, "Train to predict what the uncompressed model predicts; without it, only the text.",
        TRAINING)
    compare_dense: bool = setting(False,
        "Train the uncompressed model equally, after the compressed one, and report what compression costs: the ratio "
        "of their perplexities. Takes as long again.", TRAINING)
    dense_learning_rate: float | None = setting(None, "Highest learning rate of the uncompressed model under "
        "--compare-dense; default: 1e-4, as --learning-rate less for small matrices.", TRAINING, positive=True, maximum=1e30)
    memory: str = setting("auto", "What a run on a CPU does with memory it has freed.", SCALE,
        choices={
            "auto": "speed, or small where only that fits this machine",
            "speed": "keep it for reuse",
            "small": "give it back at once, which takes time",
        })
    dtype: str = setting("auto", "Number format of the weights in training.", SCALE,
        choices={"auto": "bfloat16 on a GPU unless sharded, else float32", **dict.fromkeys(DTYPES, "")})
    mixed_precision: str = setting("auto", "Number format of matrix products in training.", SCALE,
        choices={"auto": "bf16 for float32 weights where that is faster", "no": "that of the weights", "bf16": "bfloat16"})
    sharding: str = setting("auto", "What several processes divide.", SCALE,
        choices={
            "auto": "as accelerate is configured",
            "none": "the data (data parallel)",
            "full": "data, weights and optimizer (FSDP2)",
        })
    max_perplexity_ratio: float = setting(0.0,
        "Fail, with the result left in DIR.partial, where the exported perplexity on a measured text is more than "
        "this many times the original's; 0 allows any.", OUTPUT, minimum=0)
    trust_remote_code: bool = setting(False, "Run code that comes with a hub model.", MODEL)
    dequantize: bool = setting(False,
        "Decode a model that is quantized already (by edkm, FP8 in blocks, MXFP4 of gpt-oss), and start from that.", MODEL)
    # fmt: on

    def __post_init__(self) -> None:
        if isinstance(self.bits, float) and self.bits.is_integer():
            object.__setattr__(self, "bits", int(self.bits))
        for name in ("data", "eval_data"):  # a single text is a list of one
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        refuse([*faults(self), *contradictions(self)])


def as_in_compress(name: str, default: Any = MISSING, **changes: Any) -> Any:
    """A dataclass field that declares the option `name` of `edkm compress`, with what is different here."""
    of = next(of for of in fields(CompressConfig) if of.name == name)
    about = replace(settings.setting_of(of), **changes)
    return field(default=of.default if default is MISSING else default, metadata={"setting": about})


def build_config(file: str | Path | None, flags: Mapping[str, Any]) -> CompressConfig:
    """Defaults, overridden by the file, overridden by the flags that are not None.

    Raises UserError that lists all faults at once: unknown keys with what they may have meant, wrong types, bad values.
    """
    values = settings.given_values(file, flags)
    if values.get("target_size") and (flags if flags.get("target_size") else values).get("bits"):
        refuse(["target_size says how many bits there are on average; leave bits or target_size out"])
    if "overrides" in values:
        values["overrides"] = override_texts(values["overrides"])
    if values.get("target") in [*TARGETS]:  # which a list that a file holds may be asked of, too
        dense = {"embedding_group": 0} if str(values.get("embedding_bits")) == "16" else {}  # not the target's
        chosen = {name: value for name, value in values.items() if value != "auto"}
        values = {**TARGETS[values["target"]].settings, **dense, **chosen}
    return settings.from_mapping(CompressConfig, values)
