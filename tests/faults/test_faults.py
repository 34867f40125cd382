"""Faults in the middle of the real command: nothing is lost or half-written, and a resumed run ends the same.

Each point is a run in a process of its own with one fault at a moment drawn by chance. Then: what it said is one line or
nothing; the output is absent or whole; and the same command with --resume, once the cause is gone, ends with the very
files of a run that nothing happened to. `make faults` draws 100 points, `make test` a few (EDKM_FAULTS is the number);
EDKM_FAULTS_JSON names a file for the table.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from faulty import Fault, command

from edkm_cli.environment import hardware, versions
from edkm_cli.export.source import Compressed
from edkm_cli.report.inspection import verify
from helpers import assert_same_run, settings, weights_of
from processes import PATIENCE_SECONDS, children, together, wait_for_steps

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="counts changes as Linux does them")]
# Of 100 points; `make test` has a share of them, the first kinds before the later ones.
POINTS = {
    "kill -9": 20,
    "SIGTERM": 12,
    "full disk": 10,
    "read-only output": 8,
    "truncated model": 8,
    "data file changes": 8,
    "data file changes, then kill -9": 6,
    "no memory in a step": 6,
    "loss that is no number": 6,
    "two jobs": 6,
    "clock jumps": 6,
    "a process of two dies": 4,
}
COUNT = int(os.environ.get("EDKM_FAULTS", "10"))
STEPS = 4


def arguments(model, text, output):
    return ["compress", "--model", model, "--data", text, "-o", output, "--steps", STEPS, "--save-every", 1,
            "--sequence-length", 32, "--context", 32, "--eval-windows", 1, "--importance", "none", "--start", "kmeans",
            "--no-distill", "--device", "cpu", "--resume"]  # fmt: skip


class Bench:
    """Runs commands in children, and keeps what a run without a fault gives."""

    def __init__(self, start, model, text, folder):
        self.start, self.model, self.folder = start, model, folder
        self.text = folder / "text.txt"
        shutil.copy(text, self.text)
        self.whole = folder / "whole"
        status, _ = self.run(self.whole, record=folder / "names.json")
        assert status == 0
        self.names = json.loads((folder / "names.json").read_text())
        self.rows = []

    def note(self, **row):
        """A row of the table, which is written at once."""
        self.rows.append(row)
        target = os.environ.get("EDKM_FAULTS_JSON")
        if target:
            held = sum(row["held"] for row in self.rows)
            facts = {"points": len(self.rows), "held": held, "versions": versions(), "hardware": hardware()}
            Path(target).write_text(json.dumps({**facts, "rows": self.rows}, indent=1) + "\n")

    def begin(self, output, fault=None, *, model=None, record=None):
        log = self.folder / f"{output.name}.log"
        child = self.start(
            command, arguments(model or self.model, self.text, output), str(log), fault, record and str(record)
        )
        return child, log

    def run(self, output, fault=None, **options):
        """(exit status, what was printed)."""
        child, log = self.begin(output, fault, **options)
        child.join(PATIENCE_SECONDS)
        return child.exitcode, log.read_text(encoding="utf-8")

    def moment(self, draw, after=""):
        """A number of a change, from the first whose name contains `after`."""
        first = next(place for place, name in enumerate(self.names) if after in name)
        return draw.randint(1, len(self.names) - first)

    def check_stopped(self, output, status, said, statuses):
        """The state after a fault: how it ended, one line at most, the output absent or whole."""
        assert status in statuses, said[-2000:]
        assert "Traceback" not in said, said[-3000:]
        lines = [line for line in said.splitlines() if line.startswith("edkm: ")]
        assert len(lines) == (1 if status in (2, 143) else 0), said[-2000:]
        if output.exists():
            verify(Compressed(output))
        return lines[0] if lines else ""

    def check_resumed(self, output):
        status, said = self.run(output)
        assert status == 0, said[-3000:]
        assert_same_run(output, self.whole)
        left = {path.name for path in output.parent.iterdir() if path.name.strip(".").startswith(output.name)}
        assert left <= {output.name, f"{output.name}.log", f".{output.name}.lock"}, left


@pytest.fixture(scope="module")
def everyone(fork_server):
    with children() as begin:
        yield begin


@pytest.fixture(scope="module")
def bench(everyone, model_directory, text_file, tmp_path_factory):
    return Bench(everyone, model_directory, text_file, tmp_path_factory.mktemp("faults"))


def drawn():
    """(kind, number within the kind) of this call's points: one of each kind first, then by their shares."""
    points = [(number / total, kind, number) for kind, total in POINTS.items() for number in range(total)]
    order = list(POINTS)
    points.sort(key=lambda point: (point[0], order.index(point[1])))
    return [(kind, number) for _, kind, number in points[:COUNT]]


@pytest.mark.parametrize(("kind", "number"), drawn(), ids=lambda value: str(value).replace(" ", "-"))
def test_a_fault_loses_nothing_and_a_resumed_run_ends_the_same(bench, tmp_path, kind, number):
    draw = random.Random(f"{kind} {number}")
    output = bench.folder / f"{list(POINTS).index(kind)}-{number}"
    inject = globals()["_" + "_".join(kind.replace(",", "").replace("-", " ").split())]
    try:
        status, line = inject(bench, output, draw, number)
    except AssertionError as error:
        bench.note(fault=kind, number=number, held=False, line=str(error)[-1000:])
        raise
    bench.note(fault=kind, number=number, held=True, exit_status=status, line=line.replace(str(bench.folder), ""))


def _simple(bench, output, fault, statuses):
    status, said = bench.run(output, fault)
    line = bench.check_stopped(output, status, said, statuses)
    bench.check_resumed(output)
    return status, line


def _kill_9(bench, output, draw, number):
    after = ("", "step-", "model.safetensors")[number % 3]
    return _simple(bench, output, Fault("kill", bench.moment(draw, after), after), {-9})


def _SIGTERM(bench, output, draw, number):
    """143: saved, and told; -15: before or after training, where there is nothing to save."""
    after = ("step-", "", "metrics")[number % 3]
    return _simple(bench, output, Fault("terminate", bench.moment(draw, after), after), {143, -15, 0})


@contextmanager
def _disk(folder):
    """A disk of 64 MB where this user may mount one; else None."""
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    try:
        yield folder if made.returncode == 0 else None
    finally:
        if made.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def _full_disk(bench, output, draw, number):
    """A real disk, filled up at the moment. The lock is there by then."""
    with _disk(output.with_name(f"disk-{number}")) as disk:
        if disk is None:
            pytest.skip("no right to mount a small disk")
        after = ("edkm-run", "model.safetensors")[number % 2]
        fault = Fault("fill", bench.moment(draw, after), after, place=str(disk))
        place = disk / output.name
        status, said = bench.run(place, fault)
        line = bench.check_stopped(place, status, said, {2, 0})
        assert status == 0 or "No space left on device" in line
        (disk / "filler").unlink()
        bench.check_resumed(place)
        return status, line


def _read_only_output(bench, output, draw, number):
    home = output.with_name(f"home-{number}")
    home.mkdir()
    fault = Fault("forbid", bench.moment(draw, "edkm-run"), "edkm-run", place=str(home))
    place = home / output.name
    status, said = bench.run(place, fault)
    line = bench.check_stopped(place, status, said, {2, 0})
    assert status == 0 or "Read-only file system" in line
    bench.check_resumed(place)
    return status, line


def _truncated_model(bench, output, draw, number):
    """A download that was cut: refused, and after it is whole the run is that of the whole model."""
    model = output.with_name(f"model-{number}")
    shutil.copytree(bench.model, model)
    file = model / ("model.safetensors", "config.json", "model.safetensors", "tokenizer.json")[number % 4]
    os.truncate(file, draw.randrange(file.stat().st_size - 1))
    status, said = bench.run(output, model=model)
    line = bench.check_stopped(output, status, said, {2})
    assert not output.exists()
    shutil.copy(bench.model / file.name, file)
    bench.check_resumed(output)
    return status, line


def _data_file_changes(bench, output, draw, number):
    """Before it is read, it is another run; while it is read, an error; after, it changes nothing."""
    kept = bench.text.read_text(encoding="utf-8")
    try:
        after = ("", "edkm-run")[number % 2]
        status, said = bench.run(output, Fault("rewrite", bench.moment(draw, after), after, place=str(bench.text)))
        line = bench.check_stopped(output, status, said, {0, 2})
        assert status == 0 or "changed while it was read" in line
    finally:
        bench.text.write_text(kept, encoding="utf-8")
    if status == 0 and weights_of(output) != weights_of(bench.whole):
        assert after == ""  # it was read after the change: the run of the other text
        shutil.rmtree(output)
    bench.check_resumed(output)
    return status, line


def _data_file_changes_then_kill_9(bench, output, draw, number):
    """The resumed run notices; with the former text it goes on."""
    kept = bench.text.read_text(encoding="utf-8")
    fault = Fault("rewrite_and_kill", draw.randint(1, 20), "step-", place=str(bench.text))
    try:
        status, said = bench.run(output, fault)
        bench.check_stopped(output, status, said, {-9})
        again, said = bench.run(output)
        line = bench.check_stopped(output, again, said, {2})
        assert "tokens_sha256" in line
    finally:
        bench.text.write_text(kept, encoding="utf-8")
    bench.check_resumed(output)
    return status, line


def _no_memory_in_a_step(bench, output, draw, number):
    fault = Fault(("allocate", "memory")[number % 2], step=draw.randint(1, STEPS))
    status, line = _simple(bench, output, fault, {2})
    assert "not enough memory" in line
    return status, line


def _loss_that_is_no_number(bench, output, draw, number):
    status, line = _simple(bench, output, Fault("diverge", step=draw.randint(1, STEPS)), {2})
    assert "must stay finite" in line
    return status, line


def _two_jobs(bench, output, draw, number):
    """The second is refused while the first one works, and takes nothing from it."""
    meeting = output.with_name(f"meeting-{number}")
    meeting.mkdir()
    before = next(place for place, name in enumerate(bench.names) if "edkm-run" in name)
    last = len(bench.names) - before - 2  # before the first one lets go
    first, log = bench.begin(output, Fault("wait", draw.randint(1, last), "edkm-run", place=str(meeting)))
    while not (meeting / "waits").exists():
        assert first.is_alive(), log.read_text()[-2000:]
        time.sleep(0.02)
    os.rename(log, f"{log}.first")
    status, said = bench.run(output)
    (meeting / "go").touch()
    first.join(PATIENCE_SECONDS)
    assert first.exitcode == 0, Path(f"{log}.first").read_text()[-2000:]
    assert status in (0, 2)
    line = next((line for line in said.splitlines() if line.startswith("edkm: ")), "")
    assert f"process {first.pid}" in line or status == 0, said  # 0: the first one had just been through
    os.unlink(f"{log}.first")
    bench.check_resumed(output)
    return status, line


def _clock_jumps(bench, output, draw, number):
    return _simple(bench, output, Fault("jump", bench.moment(draw)), {0})


def _a_process_of_two_dies(bench, output, draw, number):
    """The other one says so; both together go on to what two give that nothing happened to."""

    def configured(name):
        return settings(bench.model, bench.text, name, steps=20, save_every=2, sharding=("none", "full")[number % 2])

    whole, log = output.with_name(f"whole-{number}"), output.with_name(f"log-{number}")
    children = together(bench.start, [configured(output)], log)
    partial = output.with_name(f"{output.name}.partial")
    wait_for_steps(partial, draw.randint(1, 8), lambda: all(child.is_alive() for child in children))
    children[number // 2 % 2].kill()
    survivor = children[1 - number // 2 % 2]
    survivor.join(PATIENCE_SECONDS)
    assert survivor.exitcode == 1
    said = Path(f"{log}.{1 - number // 2 % 2}").read_text()
    assert "lost another one" in said
    assert not output.exists()
    for child in together(bench.start, [configured(output), configured(whole)], log, resume=True):
        child.join(PATIENCE_SECONDS)
        assert child.exitcode == 0
    assert weights_of(output) == weights_of(whole)
    with suppress(StopIteration):
        said = next(line for line in said.splitlines() if "lost another one" in line)
    return 1, said
