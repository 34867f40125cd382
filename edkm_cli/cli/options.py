"""The options of a command, made from the fields of its configuration; and what all commands have in common."""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from edkm_cli import __version__
from edkm_cli.errors import UserError
from edkm_cli.export import ownership
from edkm_cli.settings import MODEL, OUTPUT, PANELS, REMOTE_CODE, from_mapping, setting_of

_Config = TypeVar("_Config")


def option(panel: str | None, help: str, *flags: str, metavar: str = "") -> Any:
    """What `Annotated` takes for an option of a command, under the heading `panel` of its help; a switch has no metavar."""
    words = help.replace("[", r"\[")  # which rich reads as markup
    return typer.Option(*flags, metavar=metavar, help=words, rich_help_panel=panel, show_default=False)


JsonFile = Annotated[Path | None, option(OUTPUT, "Write the result as JSON to this file.", "--json", metavar="FILE")]
RemoteCode = Annotated[bool, option(None, REMOTE_CODE, "--trust-remote-code")]
Overwrite = Annotated[bool, option(OUTPUT, "Replace what --output holds, once the result is whole.", "--overwrite")]
Resume = Annotated[bool, option(OUTPUT, "Continue the unfinished run of --output, if there is one.", "--resume")]
_CONFIG = Annotated[Path | None, option(MODEL, "YAML file with these settings; flags override it.", metavar="FILE")]
_METAVARS = {int: "N", float: "X", str: "TEXT", bool: ""}


def configured(
    kind: type[_Config], build: Callable[[Path | None, Mapping[str, Any]], _Config] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: a command whose first parameter is a configuration gets an option for each field.

    Args:
        kind: the configuration, a dataclass of `edkm_cli.settings.setting` fields.
        build: makes one from the file of `--config` and the flags that were given; the others are None. Without it there
            is no `--config`.
        defaults: where `build` has others than the fields.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def parsed(**values: Any) -> None:
            flags = {of.name: _given(values, of) for of in fields(kind)}  # type: ignore[arg-type]
            if build is None:
                given = {name: value for name, value in flags.items() if value is not None}
                return command(from_mapping(kind, given), **values)
            config = values.pop("config")
            settings = build(config, flags)
            ownership.require_apart("--output", Path(settings.output), ownership.input_paths("--config", config))  # type: ignore[attr-defined]
            return command(settings, **values)

        arguments = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        file = [] if build is None else [_parameter("config", _CONFIG)]
        parameters = [one.replace(kind=one.KEYWORD_ONLY) for one in (*_options(kind, defaults), *file, *arguments)]
        panels = {one.name: get_args(one.annotation)[1].rich_help_panel for one in parameters}
        parameters.sort(key=lambda one: PANELS.index(panels[one.name]) if panels[one.name] else 0)
        parsed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        parsed.__annotations__ = {one.name: one.annotation for one in parameters}
        parsed.__doc__, parsed.__name__ = command.__doc__, command.__name__
        return parsed

    return decorate


def _given(values: dict[str, Any], of: Field[Any]) -> Any:
    """Take a field's value out of what typer parsed; None where no flag gave one."""
    value = values.pop(of.name)
    return False if values.pop(f"no_{of.name}", None) else None if value == [] else value


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _options(kind: type[Any], defaults: Mapping[str, Any]) -> Iterator[inspect.Parameter]:
    """The parameters for each field. All default to None, so that a --config file can set what no flag does.

    A switch that is off by default shows only `--name`; `--no-name`, which overrides a file, would take half the width.
    """
    hints = get_type_hints(kind)
    for of in fields(kind):
        about, hint = setting_of(of), hints[of.name]
        repeats = get_origin(hint) is tuple
        kinds = [one for one in get_args(hint) if one is not type(None)] or [hint]
        single = str if str in kinds else kinds[0]
        flags, name = about.flags, of.name.replace("_", "-")
        if of.default is False:
            flags = flags or (f"--{name}",)
            off = typer.Option(f"--no-{name}", hidden=True, rich_help_panel=about.panel)
            yield _parameter(f"no_{of.name}", Annotated[bool | None, off])
        words = _help_text(of, defaults.get(of.name, of.default))
        shown = option(about.panel, words, *flags, metavar=_METAVARS[single])
        yield _parameter(of.name, Annotated[(list[single] if repeats else single) | None, shown])  # type: ignore[valid-type]


def _help_text(of: Field[Any], default: Any) -> str:
    """Help, choices, whether the option may be repeated, and the default."""
    about, parts = setting_of(of), []
    if about.choices and any(about.choices.values()):
        explained = [f"{choice}: {text}" if text else str(choice) for choice, text in about.choices.items()]
        parts.append("; ".join(explained) + ".")
    elif about.choices:
        parts.append(f"One of {', '.join(map(str, about.choices))}.")
    if isinstance(of.default, tuple):
        parts.append("Repeatable.")
    if default is not False and default not in (None, "", ()):
        default = ",".join(map(str, default)) if isinstance(default, tuple) else default
        parts.append(f"(default: {'on' if default is True else default})")
    return " ".join([about.help, *parts])


def first_process() -> bool:
    """Whether this process speaks to the user: the only one, or the first of those that torchrun started."""
    return rank() in ("", "0")


def rank() -> str:
    """Number of this process among those of torchrun, and an empty string without it. Read at each call: a process
    forked from one that imported this module has a number of its own."""
    return os.environ.get("RANK", "")


def check_target(
    json_file: Path | None, inputs: Iterable[tuple[str, Any]] = (), option: str = "--json", *, output: Any = None
) -> None:
    """Fail before the work, not after it. `inputs` are (option, path or None) of what else is named, `output` --output."""
    if json_file is None or ownership.is_stream(json_file):
        return
    target = Path(os.path.realpath(json_file))  # what a link leads to is written, the link stays
    if output is not None and str(target).removesuffix(".partial") == os.path.realpath(Path(output).expanduser()):
        raise UserError(f"{option} must name another file than --output {output}; choose another")
    if target.is_dir() or not target.parent.is_dir():
        raise UserError(f"{option} must name a file in a directory that exists, got {json_file}; make that first")
    places = [place for place in (target, target.parent) if place.exists()]  # what is written takes its place
    if not all(os.access(place, os.W_OK) for place in places) or os.path.ismount(target):
        raise UserError(f"{option} must name a file that can be written, but {json_file} cannot; choose another")
    ownership.require_apart(option, target, [one for one in (*inputs, *ownership.cache_paths()) if one[1] is not None])
    ownership.require_replaceable(option, target)


def stamped(result: dict[str, Any]) -> dict[str, Any]:
    """A result that says what wrote it, by which its file is known as ours."""
    from edkm_cli.environment import versions

    return {**result, "versions": result.get("versions") or versions() | {"edkm-cli": __version__}}


def tell(command: str, result: dict[str, Any], json_file: Path | None) -> None:
    """`finish` with what the command prints of its result."""
    from edkm_cli.summaries import summary

    finish(summary(command, result), stamped(result), json_file)


def progress() -> Any:
    """The `Observer` of a command, which is not imported for `--help`."""
    from edkm_cli.progress import Progress

    return Progress()


def finish(text: str, result: dict[str, Any], json_file: Path | None) -> None:
    """Print the result, and write it as JSON where asked; of several processes the first does.

    Raises UserError, after printing, where the file cannot be written.
    """
    if not first_process():
        return
    from edkm_cli.files import json_text

    try:
        print(text, flush=True)
    finally:  # it is written even where nobody reads what is printed
        try:
            if json_file is not None:
                ownership.replace_file(json_file, json_text(result))
        except BrokenPipeError:
            raise
        except OSError as error:
            raise UserError(f"--json {json_file} cannot be written ({error}); the result is printed above") from error
