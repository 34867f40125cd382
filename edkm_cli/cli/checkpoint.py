"""Commands on a model that exists: `edkm eval`, `inspect`, `report` and `generate`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from edkm_cli.cli.options import JsonFile, RemoteCode, check_target, configured, finish, option, progress, stamped, tell
from edkm_cli.errors import UserError
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.export.ownership import input_paths, replace_file, run_paths
from edkm_cli.settings import DEVICE, DTYPES, OUTPUT, REMOTE_CODE, setting

Model = Annotated[str, typer.Argument(help="Alias, hub id, directory or GGUF file; compressed or not.")]
_PAGE = "File for the page; default: DIRECTORY/report.html or DIRECTORY.partial.html."


@configured(EvalConfig)
def eval_command(
    settings: EvalConfig,
    model: Model,
    page: Annotated[
        Path | None, option(OUTPUT, "Write the verdict as an HTML page, with --reference.", metavar="FILE")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Perplexity, size, bits per weight and benchmark tasks of any causal LM."""
    inputs = run_paths(settings, "MODEL", model)
    check_target(json_file, inputs)
    if page is not None and settings.reference is None:
        raise UserError("--page shows a comparison with --reference, which is not given")
    check_target(page, [*inputs, ("--json", json_file)], "--page")
    from edkm_cli.evaluate.command import evaluate_model
    from edkm_cli.evaluate.limits import require_passed
    from edkm_cli.report.verdict import verdict_page

    watch = progress()
    result = evaluate_model(model, settings, track=watch.track, say=watch.say)
    try:
        tell("eval", result, json_file)
    finally:  # also where nobody reads what is printed
        if page is not None:
            replace_file(page, verdict_page(stamped(result)))
    if settings.reference is not None:
        require_passed(result["verdict"])


def inspect_command(
    directory: Annotated[Path, typer.Argument(help="Directory of a compressed checkpoint.")],
    verify: Annotated[
        bool, option(None, "Read all tensors and compare them with what export recorded.", "--verify")
    ] = False,
    trust_remote_code: RemoteCode = False,
    json_file: JsonFile = None,
) -> None:
    """What a compressed checkpoint holds: layers, bits, lookup tables, size."""
    check_target(json_file, input_paths("DIRECTORY", directory))
    from edkm_cli.export.source import Compressed
    from edkm_cli.report import inspection
    from edkm_cli.summaries import summary

    source = Compressed(directory, trust_remote_code=trust_remote_code)
    result = inspection.describe(source)
    text = summary("inspect", result)
    if verify:
        result["verified"] = inspection.verify(source)
        text += f"\nverified: {result['verified']['tensors']} tensors are those that were exported"
    finish(text, stamped(result), json_file)


def report_command(
    directory: Annotated[Path, typer.Argument(help="What edkm compress wrote, or is writing.")],
    output: Annotated[Path | None, option(None, _PAGE, "--output", "-o", metavar="FILE")] = None,
    weights: Annotated[
        bool, option(None, "Compare the weights with those of the original model (slower).", "--weights/--no-weights")
    ] = True,
    open_page: Annotated[bool, option(None, "Open the page in a browser.", "--open")] = False,
    trust_remote_code: RemoteCode = False,
    json_file: JsonFile = None,
) -> None:
    """One self-contained HTML page about a run: perplexity, training curves, size, errors, weights and tables."""
    check_target(json_file, [*input_paths("DIRECTORY", directory), ("--output", output)])
    from edkm_cli.report.document import build_report

    result = build_report(
        directory, output=output, weights=weights, trust_remote_code=trust_remote_code, track=progress().track
    )
    finish(result["page"], stamped(result), json_file)
    if open_page:
        import webbrowser

        webbrowser.open(Path(result["page"]).as_uri())


@dataclass(frozen=True)
class _Writing:
    """How `edkm generate` writes."""

    # fmt: off
    max_new_tokens: int = setting(256, "Most tokens of an answer; it ends where the model's positions do, too.", "",
        minimum=1)
    chat: bool = setting(False, "Treat the prompt as a user's message.", "")
    system: str | None = setting(None, "System message of a conversation, before the first message; implies --chat.",
        "")
    sample: bool = setting(False, "Choose tokens at random by their probabilities, not the likeliest one.", "")
    temperature: float | None = setting(None, "Lower is closer to the likeliest token (0.7); implies --sample.", "",
        minimum=0.01)
    top_p: float | None = setting(None, "Choose among the likeliest tokens of this probability; implies --sample.", "",
        minimum=0.01, maximum=1)
    dequantize: bool | None = setting(None,
        "Decode the weights once, or compute from packed ones; default: packed where that is faster.", "",
        "--dequantize/--packed")
    dtype: str = setting("bfloat16", "Number format of the weights.", "", choices=DTYPES)
    device: str = setting("auto", DEVICE, "")
    seed: int = setting(0, "Seed of --sample.", "")
    trust_remote_code: bool = setting(False, REMOTE_CODE, "")
    # fmt: on


@configured(_Writing)
def generate_command(
    settings: _Writing,
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="The text to continue; without it, a conversation in the terminal.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Continue a text, or talk, with a compressed or uncompressed model."""
    check_target(json_file, input_paths("MODEL", model))
    from edkm_cli.generate import Manner, converse, generate_text, load_writer
    from edkm_cli.models import resolve
    from edkm_cli.preflight import choose_device

    if prompt is not None and not prompt:
        raise UserError("the prompt must not be empty; give a text to continue")
    chosen = settings.sample or settings.temperature is not None or settings.top_p is not None
    talks = prompt is None or settings.chat or settings.system is not None
    how = {name: getattr(settings, name) for name in ("dequantize", "dtype", "seed")}
    source = resolve(model, trust_remote_code=settings.trust_remote_code)
    writer = load_writer(source, chat=talks, device=choose_device(settings.device), **how)
    sampling = settings.temperature or 0.7 if chosen else None, settings.top_p or 1.0
    manner = Manner(settings.max_new_tokens, *sampling, settings.system, partial(typer.echo, nl=False))
    result = converse(writer, manner, ask=_ask) if prompt is None else generate_text(writer, prompt, manner, chat=talks)
    finish("", stamped(result), json_file)


def _ask() -> str | None:
    """The next message, or None at the end of input or Ctrl-C."""
    try:
        return input("> ")
    except (EOFError, KeyboardInterrupt):
        return None
