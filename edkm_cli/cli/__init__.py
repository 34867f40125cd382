"""The command line: parse, call one function, print. Nothing heavy is imported before a command runs."""

import gc
import os
import signal
import sys
from contextlib import suppress
from typing import Annotated

import typer

from edkm_cli import __version__
from edkm_cli.cli import checkpoint, runs
from edkm_cli.cli.options import first_process, rank
from edkm_cli.errors import PeerLost, Preempted, UserError, shortage

app = typer.Typer(
    name="edkm",
    help="Compress LLaMA-family models to lookup tables of about 3 bits per weight while fine-tuning them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_TOGETHER = ("compress", "finetune", "distill")  # what the processes of a launcher can share
bench_app = typer.Typer(help="Measurements as JSON and a table.", no_args_is_help=True)

app.command("compress")(runs.compress_command)
app.command("finetune")(runs.finetune_command)
app.command("distill", help="finetune --train tables --data self, towards the --reference.")(runs.distill_command)
app.command("merge")(runs.merge_command)
app.command("eval")(checkpoint.eval_command)
app.command("generate")(checkpoint.generate_command)
app.command("inspect")(checkpoint.inspect_command)
app.command("report")(checkpoint.report_command)
app.command("export")(runs.export_command)
app.command("compare")(runs.compare_command)
app.command("ablate")(runs.ablate_command)
app.add_typer(bench_app, name="bench")
bench_app.command("clustering")(runs.bench_clustering_command)
bench_app.command("runtime")(runs.bench_runtime_command)


def _version(value: bool) -> None:
    if value:
        print(f"edkm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""
    if rank() and (command := context.invoked_subcommand) not in _TOGETHER:
        from edkm_cli.distributed import launched

        if (processes := launched()) > 1:
            rule = f"edkm {command} is for one process, not {processes}"
            raise UserError(f"{rule}; start it without torchrun or accelerate launch", everywhere=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the application: 0 on success, 2 with one line on a user's error, 1 with a traceback on ours."""
    for name in ("HF_HUB_VERBOSITY", "TRANSFORMERS_VERBOSITY", "DATASETS_VERBOSITY"):
        os.environ.setdefault(name, "error")  # our own line says what went wrong
    gc.set_threshold(50_000)  # a fifth of a start was looking for garbage among a million imported objects
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is temporary is removed
    with suppress(AttributeError):  # standard output is closed, or no file
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]  # what is no UTF-8 is told by itself
    try:
        app(args=arguments)
    except PeerLost as error:
        print(f"edkm: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        os._exit(1)  # an orderly exit would wait for the lost process
    except Preempted as stop:
        if first_process():
            print(f"edkm: {stop}", file=sys.stderr)
        sys.exit(143)
    except Exception as error:
        known = error if isinstance(error, UserError) else shortage(error)
        if known is None:
            raise
        if not known.everywhere or first_process():
            speaker = "" if first_process() else f" (process {rank()})"
            print(f"edkm: error{speaker}: {' '.join(str(known).split())}", file=sys.stderr)
        sys.exit(2)


def main_compress() -> None:
    """The script `edkm-compress`."""
    main(["compress", *sys.argv[1:]])


def main_eval() -> None:
    """The script `edkm-eval`."""
    main(["eval", *sys.argv[1:]])
