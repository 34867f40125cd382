"""Commands on a model that exists: `edkm eval`, `inspect`, `report` and `generate`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from edkm_cli.cli.options import Device, Dtype, JsonFile, RemoteCode, check_json_target, configured, finish, stamped
from edkm_cli.errors import UserError
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.export.ownership import input_paths, replace_file
from edkm_cli.settings import OUTPUT

Model = Annotated[str, typer.Argument(help="Alias, hub id, directory or GGUF file; compressed or not.")]


@configured(EvalConfig)
def eval_command(
    settings: EvalConfig,
    model: Model,
    page: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the verdict as an HTML page, with --reference.", rich_help_panel=OUTPUT
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Perplexity, size, bits per weight and benchmark tasks of any causal LM."""
    inputs = [*input_paths("MODEL", model), *input_paths("--data", *settings.data)]
    inputs += [*input_paths("--task-path", settings.task_path), *input_paths("--reference", settings.reference)]
    check_json_target(json_file, inputs)
    if page is not None and settings.reference is None:
        raise UserError("--page shows a comparison with --reference, which is not given")
    check_json_target(page, inputs, "--page")
    from edkm_cli.evaluate.command import evaluate_model
    from edkm_cli.evaluate.limits import require_passed
    from edkm_cli.progress import Progress
    from edkm_cli.report.verdict import verdict_page
    from edkm_cli.summaries import evaluation_summary

    progress = Progress()
    result = evaluate_model(model, settings, track=progress.track, say=progress.say)
    if page is not None:
        replace_file(page, verdict_page(stamped(result)))
    finish(evaluation_summary(result), stamped(result), json_file)
    if settings.reference is not None:
        require_passed(result["verdict"])


def inspect_command(
    directory: Annotated[Path, typer.Argument(help="Directory of a compressed checkpoint.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read all tensors and compare them with what export recorded.")
    ] = False,
    trust_remote_code: RemoteCode = False,
    json_file: JsonFile = None,
) -> None:
    """What a compressed checkpoint holds: layers, bits, lookup tables, size."""
    check_json_target(json_file, input_paths("DIRECTORY", directory))
    from edkm_cli.report.inspection import format_inspection, inspect_checkpoint

    result = inspect_checkpoint(directory, trust_remote_code=trust_remote_code)
    text = format_inspection(result)
    if verify:
        from edkm_cli.report.verify import verify_checkpoint

        result["verified"] = verify_checkpoint(directory, trust_remote_code=trust_remote_code)
        text += f"\nverified: {result['verified']['tensors']} tensors are those that were exported"
    finish(text, stamped(result), json_file)


def report_command(
    directory: Annotated[Path, typer.Argument(help="What edkm compress wrote, or is writing.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File for the page; default: report.html in DIRECTORY.", show_default=False
        ),
    ] = None,
    weights: Annotated[
        bool,
        typer.Option("--weights/--no-weights", help="Compare the weights with those of the original model (slower)."),
    ] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    trust_remote_code: RemoteCode = False,
    json_file: JsonFile = None,
) -> None:
    """One self-contained HTML page about a run: perplexity, training curves, size, errors, weights and tables."""
    check_json_target(json_file, input_paths("DIRECTORY", directory))
    from edkm_cli.progress import Progress
    from edkm_cli.report.build import build_report

    result = build_report(
        directory, output=output, weights=weights, trust_remote_code=trust_remote_code, track=Progress().track
    )
    finish(result["page"], stamped(result), json_file)
    if open_page:
        import webbrowser

        webbrowser.open(Path(result["page"]).as_uri())


def generate_command(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; without it, a conversation in the terminal.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message.")] = False,
    system: Annotated[
        str | None, typer.Option(help="System message of a conversation, before the first message; implies --chat.")
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Choose tokens at random by their probabilities, not the likeliest one.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="Lower is closer to the likeliest token (0.7); implies --sample.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1.0, help="Choose among the likeliest tokens of this probability; implies --sample."
        ),
    ] = None,
    dequantize: Annotated[
        bool | None,
        typer.Option(
            "--dequantize/--packed",
            help="Decode the weights once, or compute from packed ones; default: packed where that is faster.",
        ),
    ] = None,
    dtype: Dtype = "bfloat16",
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of --sample.")] = 0,
    trust_remote_code: RemoteCode = False,
    json_file: JsonFile = None,
) -> None:
    """Continue a text, or talk, with a compressed or uncompressed model."""
    check_json_target(json_file, input_paths("MODEL", model))
    from edkm_cli.generate import Sampling, converse, generate_text, load_writer
    from edkm_cli.preflight import choose_device

    if prompt is not None and not prompt:
        raise UserError("the prompt must not be empty; give a text to continue")
    chosen = sample or temperature is not None or top_p is not None
    sampling = Sampling(temperature or 0.7, top_p or 1.0) if chosen else None
    talks = prompt is None or chat or system is not None
    writer = load_writer(
        model,
        chat=talks,
        dequantize=dequantize,
        dtype=dtype,
        device=choose_device(device),
        seed=seed,
        trust_remote_code=trust_remote_code,
    )
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling}
    options["emit"] = partial(typer.echo, nl=False)
    if prompt is None:
        result = converse(writer, system=system, ask=_ask, **options)
    else:
        result = generate_text(writer, prompt, chat=talks, system=system, **options)
    finish("", stamped(result), json_file)


def _ask() -> str | None:
    """The next message, or None at the end of input."""
    try:
        return input("> ")
    except EOFError:
        return None
