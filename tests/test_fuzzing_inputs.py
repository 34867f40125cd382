"""Mutated data files, settings, reports and metrics: each is read, or refused in one line; quickly, and in little memory.

`make fuzz` draws more of them; EDKM_FUZZ is the number of checkpoints, of which these are shares.
"""

import random
import resource
import signal
from pathlib import Path

import pytest

from edkm_cli.config import build_config
from edkm_cli.data import load_documents, open_training_data, parse_source, parse_sources
from edkm_cli.errors import UserError
from edkm_cli.report.document import build_report
from edkm_cli.research.compare.config import build_compare_config
from edkm_cli.settings import configs_directory
from edkm_cli.train.loop import keep_metrics
from edkm_cli.train.state import BestStep
from fuzzing import COUNT
from fuzzing_text import data_files, mutated
from helpers import byte_tokenizer

RESULTS = Path(__file__).parent.parent / "docs" / "results"
SECONDS = 20
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"


@pytest.fixture
def attempts():
    """Calls functions; fails for anything but a result or one line, for one that takes long, and for much memory."""

    def late(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    failed, counts = [], {"read": 0, "refused": 0}
    former = signal.signal(signal.SIGALRM, late)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def attempt(name, what):
        signal.alarm(SECONDS)
        try:
            what()
            counts["read"] += 1
        except UserError as error:
            counts["refused"] += 1
            if "\n" in str(error).strip() or len(str(error)) > 2000:
                failed.append(f"{name}: {str(error)[:300]}")
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        finally:
            signal.alarm(0)

    yield attempt
    signal.signal(signal.SIGALRM, former)
    print(counts)
    assert not failed, "\n".join(failed[:20])
    assert min(counts.values()) > 0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 2**30


def test_mutated_data_files_are_read_or_refused(attempts, tmp_path):
    draw, files, tokenizer = random.Random(0), data_files(), byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    for number in range(COUNT // 4):
        name = draw.choice(sorted(files))
        path = tmp_path / name
        path.write_bytes(mutated(draw, files[name]))
        attempts(
            f"{number} {name} measured",
            lambda path=path: "".join(load_documents(parse_source(str(path)), "all", tokenizer=tokenizer)),
        )
        attempts(
            f"{number} {name} trained",
            lambda path=path: open_training_data(parse_sources([str(path)]), tokenizer).blocks(8, seed=0),
        )


@pytest.mark.parametrize(("name", "share"), [("smollm2_chat.yaml", 10), ("compare_smollm2.yaml", 20)])
def test_mutated_settings_are_read_or_refused(attempts, tmp_path, name, share):
    draw, whole = random.Random(1), (configs_directory() / name).read_bytes()
    build = build_compare_config if name.startswith("compare") else build_config
    path = tmp_path / "settings.yaml"
    for number in range(COUNT // share):
        path.write_bytes(mutated(draw, whole, yaml=True))
        attempts(f"{number} {name}", lambda: build(path, {}))


def test_mutated_reports_and_metrics_are_shown_or_refused(attempts, tmp_path):
    draw = random.Random(2)
    run = "smollm2-135m-3bit-row1-100steps_xeon-2.80ghz_2026-11-21.json"
    files = {
        "report.json": (RESULTS / f"compress_{run}").read_bytes(),
        "metrics.jsonl": b"".join((RESULTS / f"metrics_{run}l").read_bytes().splitlines(keepends=True)[:6]),
    }
    for number in range(COUNT // 10):
        changed = draw.choice(sorted(files))
        for name, data in files.items():
            (tmp_path / name).write_bytes(mutated(draw, data) if name == changed else data)
        attempts(f"{number} {changed}", lambda: build_report(tmp_path, weights=False))


def test_mutated_metrics_of_an_unfinished_run_are_kept_or_refused(attempts, tmp_path):
    draw, path = random.Random(3), tmp_path / "metrics.jsonl"
    whole = b"".join(b'{"step": %d, "loss": 2.5, "perplexity": {"a": %d.5}}\n' % (i, 9 - i) for i in range(1, 6))

    def resumed():
        BestStep(tmp_path, 4)
        keep_metrics(path, 4)

    for _ in range(COUNT // 5):
        data = mutated(draw, whole)
        path.write_bytes(data)
        attempts(repr(data[:200]), resumed)
