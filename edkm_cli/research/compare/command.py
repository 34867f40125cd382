"""`edkm compare`: many methods on one model, by one evaluator, as a table, a JSON file and a figure.

The comparison is fair: all methods get the same calibration text, and their perplexities are of the same windows in
float32. Every stored bit is counted (scales, zero points, tables), and columns say what trained and on how much. Each
method runs in a process of its own and leaves `DIR/<method>.json` with its settings. A second run reuses results with
the same settings, continues what was interrupted, and measures the rest. If a method fails, the table gives the reason.
"""

import inspect
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

from safetensors.torch import save_file

from edkm_cli import __version__, models
from edkm_cli.config import TextSettings, build_config
from edkm_cli.data import parse_source, parse_sources, tokenize
from edkm_cli.data.cache import Say
from edkm_cli.data.training import require_held_out, source_identity, training_tokens
from edkm_cli.environment import hardware, versions
from edkm_cli.errors import Preempted, UserError
from edkm_cli.export.ownership import cache_paths, read_object, require_apart, require_replaceable, run_paths
from edkm_cli.export.run import evaluation_documents, evaluation_names
from edkm_cli.files import digest, write_json
from edkm_cli.granularity import Granularity
from edkm_cli.model_files import files_state
from edkm_cli.preflight import choose_device
from edkm_cli.report.charts import save
from edkm_cli.research.baselines import SHARED, load
from edkm_cli.research.baselines.outcome import check_at_least, check_bits
from edkm_cli.research.compare.config import FILES, OURS, PREDICTIONS, TOKENS, UNCOMPRESSED, CompareConfig, Entry
from edkm_cli.research.compare.table import draw
from edkm_cli.research.compare.worker import facts_of
from edkm_cli.settings import coerce, command_line, part_of
from edkm_cli.train.loop import preemption

_CALIBRATION = ("calibration_samples", "sequence_length")
_SHARED = ("model", "output", "eval_data", "device", "trust_remote_code")
_NOTHING: dict[str, Any] = dict.fromkeys((  # the row of a method that failed
    "training", "bits", "granularity", "decoder_bits_per_weight", "weights_bytes", "texts", "perplexity", "kl_per_token",
    "top1_agreement", "windows", "context", "calibration_tokens", "training_tokens", "seconds", "evaluation_seconds",
    "peak_memory_bytes", "note",
))  # fmt: skip


def compare(config: CompareConfig, *, overwrite: bool = False, say: Say = lambda text: None) -> dict[str, Any]:
    """Measure what is missing, and return all rows: what `DIR/compare.json` and `--json` hold.

    Returns:
        `rows` (their keys: docs/results.md), `command`, `setting`, `versions`, `hardware`. `seconds` is what the method
        took, without loading and evaluation; `peak_memory_bytes` is that of its whole process.

    Raises UserError, before the first method runs, for settings, a model or texts that cannot be had; afterwards only if
    no method succeeded. Raises Preempted after SIGTERM.
    """
    settings = [settings_of(entry, config) for entry in config.entries()]
    inputs = run_paths(config, "--model", config.model)
    require_apart("--output", Path(config.output), [*inputs, *cache_paths()])
    directory = Path(config.output).expanduser()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output must be a writable directory, not {directory} ({error}); choose another") from error
    for name in (*(f"{entry.slug}.json" for entry in config.entries()), "compare.json", "compare.svg"):
        require_replaceable("--output", directory / name)
        require_replaceable("--output", directory / f"{name}.tmp")
    rows = []
    with tempfile.TemporaryDirectory(prefix="edkm-compare-") as folder:
        fingerprint = _tokenize(config, Path(folder) / TOKENS)
        for index, (entry, setting) in enumerate(zip(config.entries(), settings, strict=True)):
            say(f"[{index + 1}/{len(settings)}] {entry.label}")
            path = directory / f"{entry.slug}.json"
            result = _result(path, setting | fingerprint, Path(folder), overwrite=overwrite, say=say)
            named = {"method": entry.method, "label": entry.label, "options": dict(entry.options)}
            rows.append({**named, **_NOTHING, **result.get("row", {}), "error": result.get("error")})
    if all(row["error"] for row in rows):
        raise UserError(f"no method succeeded; the first ended with: {rows[0]['error']}")
    result = {
        "command": command_line("edkm compare", config, "model", "bits"),
        "setting": asdict(config),
        "rows": rows,
        "versions": versions(),
        "hardware": hardware(choose_device(config.device)),
    }
    write_json(directory / "compare.json", result)
    save(draw(result), directory / "compare.svg")
    return result


def _tokenize(config: CompareConfig, path: Path) -> dict[str, str]:
    """Tokenize all texts once for all methods, into `path`; returns their digest, which belongs to the settings."""
    tokenizer = models.load_tokenizer(models.resolve(config.model, trust_remote_code=config.trust_remote_code))
    sources = parse_sources(config.data)
    measured = evaluation_documents(part_of(TextSettings, config), sources, tokenizer)
    tokens = {"training": training_tokens(sources, tokenizer)}
    tokens |= {f"evaluation.{index}": tokenize(text, tokenizer) for index, text in enumerate(measured.values())}
    save_file(tokens, path)
    return {"tokens_sha256": digest(tokens.items())}


def settings_of(entry: Entry, config: CompareConfig) -> dict[str, Any]:
    """All settings that a row depends on, as JSON: the worker reads them, and a later run compares them.

    Raises UserError for options that the method does not have.
    """
    shared = ("model", "data", "context", "eval_windows", "trust_remote_code")
    settings = {name: getattr(config, name) for name in shared} | {
        "edkm_version": __version__,
        "method": entry.method,
        "model_files": files_state(models.resolve(config.model).path),
        "texts": list(evaluation_names(part_of(TextSettings, config), parse_sources(config.data))),
        "device": choose_device(config.device),
    }
    if entry.method == OURS:
        settings["arguments"] = _our_arguments(entry, config)
        if "data" in dict(entry.options):  # the row's own, which the others' tokens do not tell
            own = parse_sources(settings["arguments"]["data"])
            for text in config.eval_data:
                require_held_out(own, parse_source(text, "--eval-data"))
            settings["own_data"] = [source_identity(source) for source in own]
    elif entry.method == UNCOMPRESSED:
        if entry.options:
            raise UserError(f"{UNCOMPRESSED} has no options, got {entry.label!r}")
    elif entry.method in FILES:
        path, facts = facts_of(entry)
        settings |= {"file": str(path), "file_state": files_state(models.resolve(str(path)).path), "facts": facts}
    else:
        settings |= _baseline_settings(entry, config)
    return json.loads(json.dumps(settings))


def _our_arguments(entry: Entry, config: CompareConfig) -> dict[str, Any]:
    """The configuration of `edkm compress`; its own perplexities are of what it holds out of the training text."""
    options = dict(entry.options)
    for name in _SHARED:
        if name in options:
            raise UserError(f"{name} is the same for all methods, got {entry.label!r}; give --{name.replace('_', '-')}")
    shared = ["model", "data", "steps", "sequence_length", "context", "device", "seed", "trust_remote_code"]
    shared += [] if options.keys() & {"target_size", "target"} else ["bits"]
    try:
        arguments = build_config(None, {**{name: getattr(config, name) for name in shared}, **options})
    except UserError as error:
        raise UserError(f"methods, {entry.label!r}: {str(error).removeprefix('configuration: ')}") from error
    chosen = {name: value for name, value in asdict(arguments).items() if name != "output"}
    return {name: "inf" if value == float("inf") else value for name, value in chosen.items()}  # JSON has none


def _baseline_settings(entry: Entry, config: CompareConfig) -> dict[str, Any]:
    """`arguments` of the method's `quantize`, `calibration` text, and `granularity` for the table."""
    quantize = load(entry.method).quantize
    parameters = inspect.signature(quantize).parameters.values()
    own = {one.name: one.default for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    defaults = {name: None for name in SHARED if name != "group_size" or "granularity" not in own} | own
    hints = get_type_hints(quantize) | SHARED
    kinds = {name: hints[name] for name in defaults} | dict.fromkeys(_CALIBRATION, int)
    given = {name: getattr(config, name) for name in (*SHARED, "steps", *_CALIBRATION)}
    if not dict(entry.options).keys() <= kinds.keys():
        raise UserError(f"{entry.method} has the options {', '.join(kinds)}, got {entry.label!r}")
    try:
        given |= {name: coerce(name, value, kinds[name]) for name, value in entry.options}
        arguments = {name: given.get(name, default) for name, default in defaults.items()}
        for name, low in {**dict(zip(_CALIBRATION, (1, 2), strict=True)), "group_size": 0}.items():
            check_at_least(low, **{name: given[name]})
        check_bits(bits=given["bits"] if "bits" in dict(entry.options) else 2)  # else its row says so
        Granularity.parse(arguments.get("granularity") or "row:1")
    except (UserError, ValueError) as error:
        raise UserError(f"methods, {entry.label!r}: {error}") from error
    groups = f"group:{arguments['group_size']}" if arguments.get("group_size") else "row:1"
    return {
        "arguments": arguments,
        "calibration": {"samples": given["calibration_samples"], "sequence_length": given["sequence_length"]},
        "granularity": str(arguments.get("granularity", groups)),
    }


def _result(path: Path, settings: dict[str, Any], folder: Path, *, overwrite: bool, say: Say) -> dict[str, Any]:
    """The file of an entry with its `row` or `error`: read where it is of these settings, else measured now. The `folder`
    is the workers' own."""
    predictions, stored = folder / PREDICTIONS, read_object(path)
    same = stored.get("settings") == settings and not overwrite
    if same and "row" in stored:
        say(f"  measured before: perplexity {stored['row']['perplexity']:,.3f}")
        return stored
    write_json(path, {"settings": settings})
    flags = ["--resume", "--overwrite"] if same else ["--overwrite"] if "settings" in stored or overwrite else []
    if not predictions.exists():  # once, and only if there is something to measure
        predictions.mkdir()
        say("  the uncompressed model's predictions, for the KL of all rows")
        if status := _worker(path, folder, "--remember"):
            say(f"  none: the process ended with status {status}")
            shutil.rmtree(predictions)  # what there is of them is of no use
            predictions.mkdir()
    status = _worker(path, folder, *flags)
    result = read_object(path)
    if not {"row", "error"} & set(result):
        cause = f"signal {-status} (9 is often lack of memory)" if status < 0 else f"exit status {status}"
        result = {"settings": settings, "error": f"its process ended with {cause}"}
        write_json(path, result)
    say(f"  {result['error']}" if "error" in result else f"  perplexity {result['row']['perplexity']:,.3f}")
    return result


def _worker(*arguments: str | Path) -> int:
    """Run a worker to its end; what it prints goes to standard error. SIGTERM is passed on to it."""
    with preemption() as stop:
        program = [sys.executable, "-m", "edkm_cli.research.compare.worker"]
        process = subprocess.Popen([*program, *map(str, arguments)], stdout=2)
        try:
            while process.poll() is None:
                if stop.is_set():
                    process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()
    if stop.is_set():
        raise Preempted("SIGTERM: finished methods are kept; the same command goes on")
    return process.returncode
