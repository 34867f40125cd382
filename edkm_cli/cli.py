"""The command line: parse, call one function, print. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from edkm_cli import __version__
from edkm_cli.allocator import return_large_blocks
from edkm_cli.compare.config import METHODS, CompareConfig, build_compare_config
from edkm_cli.config import CompressConfig, UserError, build_config
from edkm_cli.errors import PeerLost, Preempted

app = typer.Typer(
    name="edkm",
    help="Compress LLaMA-family models to 3-bit palettized weights while fine-tuning them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_D, _C = CompressConfig(), CompareConfig()
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the machine-readable result to this file.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def _option(text: str, name: str, *flags: str, of: Any = _D) -> Any:
    """An option whose default is the configuration's, so that a --config file can set it."""
    default = getattr(of, name)
    shown = " ".join(default) if isinstance(default, tuple) else default
    suffix = "" if default in (None, "", ()) else f" (default: {shown})"
    return typer.Option(*flags, help=text + suffix, show_default=False)


@app.command("compress")
def compress_command(
    model: Annotated[str | None, _option("Alias, hub id, directory or GGUF file.", "model")] = None,
    output: Annotated[str | None, _option("Directory for the compressed model.", "output", "--output", "-o")] = None,
    bits: Annotated[int | None, _option("Bits of an index, 1 to 8.", "bits")] = None,
    granularity: Annotated[
        str | None, _option("Weights that share a LUT: tensor, row:G, block:RxC.", "granularity")
    ] = None,
    lut_dtype: Annotated[str | None, _option("float16, bfloat16, float32, float8_e4m3fn.", "lut_dtype")] = None,
    embedding_bits: Annotated[int | None, _option("2 to 8; 16 leaves embeddings dense.", "embedding_bits")] = None,
    skip: Annotated[list[str] | None, _option("Module path or pattern to leave dense (repeatable).", "skip")] = None,
    method: Annotated[str | None, _option("edkm (closed form) or dkm (dense reference).", "method")] = None,
    mode: Annotated[str | None, _option("straight-through, hard or soft forward in training.", "mode")] = None,
    iterations: Annotated[
        int | None, _option("Centroid updates a step (soft, hard); 0: trained by gradient.", "iterations")
    ] = None,
    temperature: Annotated[float | None, _option("Relative temperature (soft, hard).", "temperature")] = None,
    temperature_end: Annotated[float | None, _option("Last temperature of a schedule.", "temperature_end")] = None,
    temperature_schedule: Annotated[
        str | None, _option("constant, linear, cosine, exponential.", "temperature_schedule")
    ] = None,
    importance: Annotated[str | None, _option("Weighs the start: gradient, activation, none.", "importance")] = None,
    calibration_tokens: Annotated[int | None, _option("Tokens for the importance.", "calibration_tokens")] = None,
    start: Annotated[
        str | None, _option("kmeans; compensated: weights make up for one another's errors; auto.", "start")
    ] = None,
    start_tokens: Annotated[int | None, _option("Tokens for the compensation.", "start_tokens")] = None,
    data: Annotated[list[str] | None, _option("wikitext2, alpaca, builtin or a file (repeatable).", "data")] = None,
    eval_data: Annotated[
        str | None, _option("Text for perplexities; default: what is held out of the first --data.", "eval_data")
    ] = None,
    eval_windows: Annotated[int | None, _option("Windows of each perplexity.", "eval_windows")] = None,
    context: Annotated[int | None, _option("Tokens in a window.", "context")] = None,
    steps: Annotated[int | None, _option("Optimizer steps; 0: clustering only.", "steps")] = None,
    learning_rate: Annotated[
        float | None, _option("Peak for weights.", "learning_rate", "--learning-rate", "--lr")
    ] = None,
    lut_learning_rate: Annotated[float | None, _option("Peak for LUT entries.", "lut_learning_rate")] = None,
    warmup: Annotated[float | None, _option("Fraction of the steps.", "warmup")] = None,
    weight_decay: Annotated[float | None, _option("AdamW's, on clustered weights.", "weight_decay")] = None,
    max_grad_norm: Annotated[float | None, _option("Gradient clipping.", "max_grad_norm")] = None,
    optimizer: Annotated[str | None, _option("adamw, adamw-8bit (bitsandbytes), sgd.", "optimizer")] = None,
    lora_rank: Annotated[
        int | None, _option("Train low-rank updates of this rank; 0: the weights.", "lora_rank")
    ] = None,
    lora_alpha: Annotated[
        float | None, _option("Scale of the updates: alpha / rank; default: twice the rank.", "lora_alpha")
    ] = None,
    batch_size: Annotated[int | None, _option("Sequences in a micro-batch, a process.", "batch_size")] = None,
    sequence_length: Annotated[int | None, _option("Tokens in a sequence.", "sequence_length")] = None,
    gradient_accumulation: Annotated[int | None, _option("Micro-batches a step.", "gradient_accumulation")] = None,
    distill: Annotated[
        bool | None,
        _option("KL from the uncompressed model, or plain fine-tuning.", "distill", "--distill/--no-distill"),
    ] = None,
    label_weight: Annotated[
        float | None, _option("Of the next-token loss beside distillation; 0: the teacher only.", "label_weight")
    ] = None,
    hidden_weight: Annotated[
        float | None, _option("Of the decoder layers' outputs in distillation; 0: logits only.", "hidden_weight")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        _option(
            "Recompute activations.", "gradient_checkpointing", "--gradient-checkpointing/--no-gradient-checkpointing"
        ),
    ] = None,
    offload: Annotated[str | None, _option("none; cpu: saved tensors go to host memory.", "offload")] = None,
    memory: Annotated[
        str | None,
        _option(
            "On a CPU: speed; small: freed memory goes back at once; auto: small where speed does not fit.", "memory"
        ),
    ] = None,
    dtype: Annotated[str | None, _option("float32, bfloat16, float16; auto: by device.", "dtype")] = None,
    mixed_precision: Annotated[
        str | None, _option("no, bf16; auto: bf16 where float32 weights train on a GPU.", "mixed_precision")
    ] = None,
    device: Annotated[str | None, _option("auto, cpu, cuda or cuda:N.", "device")] = None,
    sharding: Annotated[
        str | None,
        _option("Over processes: none (data parallel), full (FSDP2); auto: as accelerate says.", "sharding"),
    ] = None,
    timeout_minutes: Annotated[
        int | None, _option("How long processes wait for one another.", "timeout_minutes")
    ] = None,
    seed: Annotated[int | None, _option("Of shuffles and initialisation.", "seed")] = None,
    save_every: Annotated[int | None, _option("Steps between checkpoints; 0: none.", "save_every")] = None,
    keep: Annotated[int | None, _option("Checkpoints to keep.", "keep")] = None,
    log_with: Annotated[
        list[str] | None, _option("tensorboard, wandb (repeatable); metrics.jsonl is always written.", "log_with")
    ] = None,
    trust_remote_code: Annotated[
        bool | None, _option("Run code that comes with a hub model.", "trust_remote_code", "--trust-remote-code")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with these settings; flags override it.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what --output holds, once the new is whole.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the unfinished run of --output, if there is one.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan: modules, sizes, memory.")] = False,
    gpu_memory: Annotated[
        str | None, typer.Option(help="With --dry-run: plan for GPUs of this memory each, such as 24GiB.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="With --dry-run: plan for so many GPUs.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Train-time clustering and export to a checkpoint that transformers loads."""
    local = dict(locals())
    flags = {name: local[name] or None if isinstance(local[name], list) else local[name] for name in _fields()}
    settings = build_config(config, flags)
    if not settings.model:
        raise UserError("--model is required: an alias (smollm2-135m, llama-7b), a hub id, a directory or a GGUF file")
    _check_json_target(json_file)
    if dry_run:
        from edkm_cli.dryrun.plan import dry_run as plan
        from edkm_cli.summaries import plan_summary

        result = plan(settings, gpu_memory=gpu_memory, gpus=gpus)
        _finish(plan_summary(result), result, json_file)
        return
    if gpu_memory is not None or gpus is not None:
        raise UserError("--gpu-memory and --gpus plan for a machine, but --dry-run is not given; add it")
    from edkm_cli.compress import compress
    from edkm_cli.dryrun.plan import choose_memory
    from edkm_cli.progress import Observer, Progress
    from edkm_cli.summaries import summary

    if choose_memory(settings) == "small":
        return_large_blocks()

    progress = Progress()
    result = compress(
        settings,
        overwrite=overwrite,
        resume=resume,
        observer=Observer(progress.track, progress.show, progress.say),
    )
    if _RANK in ("", "0"):
        _finish(summary(result), result, json_file)


def _fields(of: Any = _D) -> list[str]:
    return list(of.__dataclass_fields__)


@app.command("eval")
def eval_command(
    model: Annotated[str, typer.Argument(help="Alias, hub id, directory or GGUF file; compressed or not.")],
    data: Annotated[
        str | None, typer.Option(help="wikitext2, builtin or a local file. [default: wikitext2; none with --tasks]")
    ] = None,
    context: Annotated[int, typer.Option(min=2, help="Tokens in a window.")] = 2048,
    max_windows: Annotated[int | None, typer.Option(min=1, help="The first so many windows; default: all.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Device = "auto",
    speed: Annotated[bool, typer.Option("--speed", help="Measure tokens per second as well.")] = False,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness, with commas: piqa,hellaswag,mmlu ...")
    ] = None,
    task_path: Annotated[
        Path | None, typer.Option(help="Directory with task files (*.yaml) of your own; they are run as programs.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="The first so many documents of a task.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples in a task's prompt.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Of tasks.")] = 1,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run a hub model's code.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Perplexity, size, bits per weight and benchmark tasks of any causal LM."""
    _check_json_target(json_file)
    from edkm_cli.evaluate.command import evaluate_model
    from edkm_cli.preflight import choose_device
    from edkm_cli.progress import Progress
    from edkm_cli.summaries import evaluation_summary

    names = [name.strip() for name in tasks.split(",") if name.strip()] if tasks is not None else []
    if tasks is not None and not names:
        raise UserError("--tasks must name at least one task, for example piqa,hellaswag; got nothing")
    result = evaluate_model(
        model,
        data=data or (None if names else "wikitext2"),
        context=context,
        max_windows=max_windows,
        dtype=dtype,
        device=choose_device(device),
        speed=speed,
        trust_remote_code=trust_remote_code,
        benchmarks=names,
        task_path=task_path,
        limit=limit,
        num_fewshot=num_fewshot,
        batch_size=batch_size,
        track=Progress().track,
    )
    _finish(evaluation_summary(result), result, json_file)


@app.command("inspect")
def inspect_command(
    directory: Annotated[Path, typer.Argument(help="A compressed checkpoint.")], json_file: JsonFile = None
) -> None:
    """What a compressed checkpoint holds: layers, bits, LUTs, size."""
    _check_json_target(json_file)
    from edkm_cli.report.inspection import format_inspection, inspect_checkpoint

    result = inspect_checkpoint(directory)
    _finish(format_inspection(result), result, json_file)


@app.command("report")
def report_command(
    directory: Annotated[Path, typer.Argument(help="What edkm compress wrote, or is writing.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page. [default: DIR/report.html]", show_default=False)
    ] = None,
    weights: Annotated[
        bool, typer.Option("--weights/--no-weights", help="Compare the weights with the original's (takes its time).")
    ] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    json_file: JsonFile = None,
) -> None:
    """One self-contained HTML page about a run: perplexity, training curves, size, errors, weights and tables."""
    _check_json_target(json_file)
    from edkm_cli.progress import Progress
    from edkm_cli.report.build import build_report

    result = build_report(directory, output=output, weights=weights, track=Progress().track)
    _finish(result["page"], result, json_file)
    if open_page:
        import webbrowser

        webbrowser.open(Path(result["page"]).as_uri())


@app.command("generate")
def generate_command(
    model: Annotated[str, typer.Argument(help="Alias, hub id, directory or GGUF file; compressed or not.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message.")] = False,
    sample: Annotated[bool, typer.Option("--sample", help="Sample instead of greedy decoding.")] = False,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of sampling.")] = 0.7,
    dequantize: Annotated[
        bool,
        typer.Option("--dequantize/--packed", help="Decode the weights once (faster), or keep them packed (smaller)."),
    ] = True,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
    json_file: JsonFile = None,
) -> None:
    """Text from a checkpoint."""
    _check_json_target(json_file)
    from edkm_cli.generate import generate_text
    from edkm_cli.preflight import choose_device

    result = generate_text(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        chat=chat,
        temperature=temperature if sample else None,
        dequantize=dequantize,
        dtype=dtype,
        device=choose_device(device),
        seed=seed,
    )
    _finish(result["text"], result, json_file)


bench_app = typer.Typer(help="Measurements as JSON and a table.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.command("clustering")
def bench_clustering_command(
    width: Annotated[int, typer.Option(min=1, help="The layer is width x width.")] = 4096,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the layer's own linear.")] = 2048,
    bits: Annotated[int, typer.Option(min=1, max=8, help="Bits of an index.")] = 3,
    iterations: Annotated[int, typer.Option(min=1, help="Centroid updates.")] = 3,
    dtype: Annotated[str, typer.Option(help="Of the weight: bfloat16, float16 or float32.")] = "bfloat16",
    device: Device = "auto",
    granularity: Annotated[
        list[str] | None, typer.Option(help="Geometry of a fused row (repeatable); default: one of each kind.")
    ] = None,
    dense: Annotated[bool, typer.Option("--dense/--no-dense", help="Measure the dense reference, too (slow).")] = True,
    json_file: JsonFile = None,
) -> None:
    """The clustering engine against the dense reference, the layer's own linear and, where installed, coremltools."""
    _check_json_target(json_file)
    from edkm_cli.bench.clustering import GRANULARITIES, bench_clustering, format_table
    from edkm_cli.preflight import choose_device
    from edkm_cli.progress import Progress

    result = bench_clustering(
        width=width,
        tokens=tokens,
        bits=bits,
        iterations=iterations,
        dtype=dtype,
        device=choose_device(device),
        granularities=tuple(granularity or GRANULARITIES),
        dense=dense,
        log=Progress().say,
    )
    _finish(format_table(result), result, json_file)


@app.command("compare")
def compare_command(
    model: Annotated[str | None, _option("Alias, hub id, directory or GGUF file.", "model", of=_C)] = None,
    methods: Annotated[
        str | None,
        _option(f"Of {', '.join(METHODS)}, by commas, with options: name:option=value.", "methods", of=_C),
    ] = None,
    output: Annotated[
        str | None, _option("Directory for results; finished ones are reused.", "output", "--output", "-o", of=_C)
    ] = None,
    bits: Annotated[int | None, _option("Bits of a weight.", "bits", of=_C)] = None,
    group_size: Annotated[
        int | None, _option("Weights of a row that share a scale; 0: row.", "group_size", of=_C)
    ] = None,
    data: Annotated[list[str] | None, _option("Text to calibrate and train on (repeatable).", "data", of=_C)] = None,
    eval_data: Annotated[
        str | None, _option("Text for perplexities; default: what is held out of the first --data.", "eval_data", of=_C)
    ] = None,
    context: Annotated[int | None, _option("Tokens in a window.", "context", of=_C)] = None,
    eval_windows: Annotated[int | None, _option("Windows of each perplexity.", "eval_windows", of=_C)] = None,
    calibration_samples: Annotated[
        int | None, _option("Sequences that baselines calibrate on.", "calibration_samples", of=_C)
    ] = None,
    sequence_length: Annotated[int | None, _option("Tokens in a sequence.", "sequence_length", of=_C)] = None,
    steps: Annotated[int | None, _option("Optimizer steps of the methods that train.", "steps", of=_C)] = None,
    device: Annotated[str | None, _option("auto, cpu, cuda or cuda:N.", "device", of=_C)] = None,
    seed: Annotated[int | None, _option("Of calibration samples and training.", "seed", of=_C)] = None,
    trust_remote_code: Annotated[
        bool | None, _option("Run a hub model's code.", "trust_remote_code", "--trust-remote-code", of=_C)
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML with these settings; flags override it.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure again what is finished.")] = False,
    json_file: JsonFile = None,
) -> None:
    """One model, many methods, one evaluator: a table, a JSON file and a figure."""
    local = dict(locals())
    flags = {name: local[name] or None if name == "data" else local[name] for name in _fields(_C)}
    settings = build_compare_config(config, flags)
    if not settings.model:
        raise UserError("--model is required: an alias (smollm2-135m, llama-7b), a hub id, a directory or a GGUF file")
    _check_json_target(json_file)
    from edkm_cli.compare.command import compare, format_table
    from edkm_cli.progress import Progress

    result = compare(settings, overwrite=overwrite, say=Progress().say)
    _finish(format_table(result), result, json_file)


@app.command("ablate")
def ablate_command(
    width: Annotated[int, typer.Option(help="The projection is width x width; LLaMA-7B's is 4096.")] = 4096,
    learners: Annotated[int, typer.Option(help="Processes to start.")] = 8,
    bits: Annotated[int, typer.Option(help="Bits of an index.")] = 3,
    iterations: Annotated[int, typer.Option(help="Differentiated centroid updates.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float16.")] = "bfloat16",
    device: Device = "auto",
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Write a figure to this file (.png, .svg).")] = None,
    json_file: JsonFile = None,
) -> None:
    """The paper's memory ablation on this machine: marshaling, uniquification, sharding, and the closed form."""
    _check_json_target(json_file)
    from edkm_cli.bench.ablate import format_table, plot, run
    from edkm_cli.preflight import choose_device
    from edkm_cli.progress import Progress

    result = run(
        width=width,
        learners=learners,
        bits=bits,
        iterations=iterations,
        dtype=dtype,
        device=choose_device(device),
        log=Progress().say,
    )
    if plot_file is not None:
        plot(result, plot_file)
    _finish(format_table(result), result, json_file)


def _check_json_target(json_file: Path | None) -> None:
    """Fail before the work, not after it."""
    if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
        raise UserError(
            f"--json must name a file in a directory that exists, got {json_file}; make the directory first"
        )


def _finish(text: str, result: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        from edkm_cli.format import write_json

        write_json(json_file, result)
    print(text, flush=True)


def _version(value: bool) -> None:
    if value:
        print(f"edkm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""


_RANK = os.environ.get("RANK", "")


def _speaker() -> str:
    return f" (process {_RANK})" if _RANK not in ("", "0") else ""


def main(arguments: list[str] | None = None) -> None:
    """Run the application: 0 on success, 2 with one line on a user's error, 1 with a traceback on ours."""
    for name in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")  # our own line says what went wrong
    try:
        app(args=arguments)
    except UserError as error:
        if not error.everywhere or _RANK in ("", "0"):
            print(f"edkm: error{_speaker()}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except PeerLost as error:
        print(f"edkm: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(1)  # an orderly exit would wait for the lost process
    except Preempted as stop:
        if _RANK in ("", "0"):
            print(f"edkm: {stop}", file=sys.stderr)
        sys.exit(143)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt:
        print("edkm: interrupted", file=sys.stderr)
        sys.exit(130)


def main_compress() -> None:
    """The script `edkm-compress`."""
    main(["compress", *sys.argv[1:]])


def main_eval() -> None:
    """The script `edkm-eval`."""
    main(["eval", *sys.argv[1:]])
