"""Benchmarks (piqa, hellaswag, mmlu ...) through lm-evaluation-harness, the extra `eval`, for any loaded model.

Prompts, answers and metrics are the harness's, so that figures compare with everybody else's. This file finds the tasks
(docs/evaluation.md, "Tasks"), passes the model and turns the result into a plain map. A task file is a program: its
templates and its `!function` lines run on this machine. Code from the hub is not run: the datasets library reads data
only, and a metric that the harness would fetch as code is refused unless `trust_remote_code` allows it.
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from difflib import get_close_matches
from importlib import metadata
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from edkm_cli.errors import UserError, explained, named
from edkm_cli.evaluate.config import EvalConfig
from edkm_cli.nn.hooks import changed, hooked
from edkm_cli.summaries import metrics_of

_INSTALL = "pip install 'edkm-cli[eval]'"
_SEED = 1234  # the harness's own default for the choice of few-shot examples
Results = dict[str, dict[str, Any]]  # task -> what is known of it
Scores = dict[str, dict[str, dict[int, Any]]]
"""Task -> metric -> document -> score, whatever the metric gives for one document."""


def load_tasks(settings: EvalConfig) -> dict[str, Any]:
    """Find tasks, groups or tags by name and fetch their data; `run_tasks` takes the result.

    Names are as in the harness's list, or in the files under `task_path`, which come before the harness's. `num_fewshot`
    None: as many examples as each task says, else none; as in the harness, a task that fixes zero keeps zero. With
    `trust_remote_code` the harness may fetch and run metrics that are code on the hub.

    Raises UserError if the harness is not installed, for an unknown task, or files and data that cannot be used.
    """
    names, folder = settings.benchmarks, _check_task_path(settings.task_path)
    manager = _manager(names, folder)
    loaded = {}
    for name in dict.fromkeys(names):
        if name not in manager.all_tasks:
            close = get_close_matches(name, manager.all_tasks, n=1)
            places = f"lm-evaluation-harness {harness_version()}" + (f" or {folder}" if folder else "")
            remedy = f"did you mean {close[0]!r}?" if close else "see `lm-eval ls tasks`, or give --task-path"
            raise UserError(f"--tasks must name tasks of {places}, got {name!r}; {remedy}")
        with chdir(folder) if folder else nullcontext(), _hub_metrics(settings.trust_remote_code) as refused:
            try:
                loaded[name] = manager.load([name])
            except Exception as error:
                if not refused:
                    raise _loading_error(name, manager, folder, error) from error
        if refused:
            rule = f"--tasks {name} needs the metric {refused[0]!r}, which is code on the hub"
            raise UserError(f"{rule}; give --trust-remote-code to run it, or choose another task")
        if not loaded[name]["tasks"]:
            raise UserError(f"--tasks {name} is a group with no tasks; choose another")
        for task in loaded[name]["tasks"].values():  # the number of examples by the harness's rule, and their seed
            if (fixed := task.get_config("num_fewshot")) is None or (fixed != 0 and settings.num_fewshot is not None):
                task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
            if getattr(task, "UNSAFE_CODE", False) or getattr(task, "MULTIMODAL", False):
                raise UserError(f"--tasks {name} runs code that a model writes, or shows images; choose another")
            with explained(f"--tasks {name} does not fit its data", "; check it"):
                _check_answers(task, settings.limit)
    return loaded


def run_tasks(
    model: Any, tokenizer: Any, loaded: dict[str, Any], *, limit: int | None = None, batch_size: int = 1
) -> tuple[Results, Scores]:
    """Run loaded tasks on a causal LM: task -> its metrics, `..._stderr`, `samples`, `num_fewshot`, `version`; and the
    scores of single documents, for `compared`.

    A group brings an entry of its own and one for each of its tasks. `limit`: the first so many documents of each task.
    A standard error is None where there is none (a single document).

    Raises UserError where a task does not fit its data or the model.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    subject = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
    results: Results = {}
    scores: Scores = {}
    for name, tasks in loaded.items():
        for task in tasks["tasks"].values():  # anew: a run before has drawn other examples
            task.set_fewshot_seed(seed=_SEED)
        try:
            with hooked([model], _require_numbers, after=True):
                outcome = evaluate(subject, tasks, limit=limit, log_samples=True)
        except (UserError, RuntimeError, MemoryError):  # the machine's trouble, not the task's
            raise
        except Exception as error:
            raise UserError(f"--tasks {name} does not fit data or model ({named(error)}); check it") from error
        for task, metrics in outcome["results"].items():
            facts = {"num_fewshot": outcome["n-shot"].get(task), "version": outcome["versions"].get(task)}
            results[task] = {**_metrics(metrics), "samples": metrics.get("sample_len"), **facts}
        for task, samples in outcome["samples"].items():
            several = len({sample["filter"] for sample in samples}) > 1
            for sample in samples:
                for metric in sample["metrics"]:
                    key = f"{metric},{sample['filter']}" if several else metric
                    scores.setdefault(task, {}).setdefault(key, {})[sample["doc_id"]] = sample[metric]
    return results, scores


def _require_numbers(model: Any, args: Any, output: Any) -> None:
    if bool(output.logits[:, -1].isnan().any()):  # what is padded, to the left, may be
        raise UserError("--tasks need logits that are numbers, but some are NaN; use --dtype float32 or bfloat16")


def compared(ours: Results, our_scores: Scores, theirs: Results, their_scores: Scores) -> Results:
    """What a model keeps of a reference: task -> metric -> `model`, `reference`, their `model_stderr` and
    `reference_stderr`, the `recovery` (model by reference), and of metrics that are right or wrong `lost` and `won`: the
    share of answers that were right and are wrong, and the reverse (flips, arXiv 2407.09141)."""
    tables: Results = {}
    for task, metric, value, error in metrics_of(ours):
        if (before := theirs[task].get(metric)) is None:
            continue
        _, _, _, their_error = next(row for row in metrics_of({task: theirs[task]}) if row[1] == metric)
        row = {"model": value, "reference": before, "recovery": value / before if before else None}
        row |= {"model_stderr": error, "reference_stderr": their_error}
        mine, other = (some.get(task, {}).get(metric, {}) for some in (our_scores, their_scores))
        if mine and all(score in (0, 1) for score in (*mine.values(), *other.values())):
            row["lost"] = sum(other[place] > score for place, score in mine.items()) / len(mine)
            row["won"] = sum(other[place] < score for place, score in mine.items()) / len(mine)
        tables.setdefault(task, {})[metric] = row
    return tables


def harness_version() -> str:
    """The installed harness, whose prompts decide the figures."""
    return metadata.version("lm_eval")


def _check_task_path(task_path: str | Path | None) -> Path | None:
    """The directory, absolute, if every task file in it is YAML: the harness itself skips broken files silently."""
    if task_path is None:
        return None
    if not (folder := Path(task_path).expanduser().absolute()).is_dir():
        raise UserError(f"--task-path must be a directory with task files (*.yaml), but {folder} is not a directory")
    if not (files := sorted(folder.rglob("*.yaml"))):
        raise UserError(f"--task-path must hold task files (*.yaml), but {folder} holds none")
    for file in files:
        try:
            node = yaml.compose(file.read_text(encoding="utf-8"))  # syntax only: nothing is constructed or run
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise UserError(f"--task-path file {file} is not YAML ({named(error)}); correct it") from error
        if not isinstance(node, yaml.MappingNode):
            raise UserError(f"--task-path file {file} must hold a mapping with 'task' or 'group'; correct or remove it")
    return folder


def _manager(names: Sequence[str], folder: Path | None) -> Any:
    """The harness's index of tasks. Reading its own 15,000 takes many seconds: left out where local files suffice."""
    if find_spec("lm_eval") is None:
        raise UserError(f"--tasks needs lm-evaluation-harness, which is not installed; {_INSTALL}")
    with explained(f"--tasks needs lm-eval 0.4.12 or newer, but version {harness_version()} is not", f"; {_INSTALL}"):
        import datasets
        from lm_eval.tasks import TaskManager

        TaskManager.load  # noqa: B018 - since 0.4.12
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    if folder is not None:
        local = TaskManager(include_path=str(folder), include_defaults=False)
        if set(names) <= set(local.all_subtasks):  # groups may refer to the harness's tasks
            return local
    return TaskManager(include_path=str(folder) if folder else None)


@contextmanager
def _hub_metrics(allowed: bool) -> Iterator[list[str]]:
    """While this is open, metrics that the harness would fetch as code from the hub are listed, not loaded."""
    import evaluate

    refused: list[str] = []

    def refuse(path: str, *arguments: Any, **options: Any) -> None:
        refused.append(path)
        raise PermissionError(f"the metric {path} is code on the hub")

    with nullcontext() if allowed else changed(evaluate, load=refuse):
        yield refused


def _check_answers(task: Any, limit: int | None) -> None:
    """Raises UserError for a question whose answer is not among its choices: the harness would count it as wrong."""
    from lm_eval.api.task import ConfigurableTask

    if not isinstance(task, ConfigurableTask) or task.OUTPUT_TYPE != "multiple_choice":
        return
    for number, document in enumerate(islice(task.eval_docs, limit)):
        choices = task.doc_to_choice(document)
        given = task.doc_to_text(document) if task.multiple_input else task.doc_to_target(document)
        for answer in given if isinstance(given, list) else [given]:
            if answer not in (range(len(choices)) if isinstance(answer, int) else choices):
                raise UserError(
                    f"--tasks {task.task_name}: the answer must be one of the choices, by its number from 0 or its text, "
                    f"but document {number} has {answer!r} for {choices!r}; correct the task's doc_to_target or its data"
                )


def _metrics(outcome: dict[str, Any]) -> dict[str, Any]:
    """The harness's "metric,filter" keys as "metric" where a metric has one filter only; "N/A" and NaN become None."""
    metrics = {key: key.partition(",")[0] for key in outcome if "," in key}
    filters, plain = Counter(metrics.values()), {}
    for key, metric in metrics.items():
        usable = isinstance(outcome[key], (int, float)) and math.isfinite(outcome[key])
        plain[metric if filters[metric] == 1 else key] = float(outcome[key]) if usable else None
    return plain


def _loading_error(name: str, manager: Any, folder: Path | None, error: Exception) -> UserError:
    file = getattr(manager.task_index.get(name), "yaml_path", None)
    if folder is not None and file is not None and Path(file).is_relative_to(folder):
        return UserError(f"--tasks {name}: {file} cannot be used ({named(error)}); correct the file or its data")
    rule = f"--tasks {name}: its data could not be loaded from the Hugging Face hub ({named(error)})"
    return UserError(f"{rule}; check the network, or give --task-path with a task file whose data is local")
