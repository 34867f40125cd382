"""The teacher passes over the text once: what is kept gives its predictions, survives kills, and is never another's."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier

import pytest
import torch
from filelock import FileLock

from edkm_cli.compress import compress
from edkm_cli.data import Batch, Blocks
from edkm_cli.data.cache import locked
from edkm_cli.distributed import ALONE
from edkm_cli.errors import UserError
from edkm_cli.models import cache_directory
from edkm_cli.train import teacher
from edkm_cli.train.losses import Beside, Objective
from edkm_cli.train.teacher import micro_batch, remember, require_place
from helpers import settings, tiny_llama, weights_of


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr("edkm_cli.train.teacher._PASS_TOKENS", 4 * Steps.sequence_length)
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path / "cache"))


class Steps:
    steps, batch_size, gradient_accumulation, sequence_length, mixed_precision = 3, 2, 2, 16, "no"


def blocks_of(seed=0, tokens=400):
    ids = torch.randint(0, 257, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Blocks(ids, Steps.sequence_length, seed=0)


def remembered(model, blocks, **options):
    return remember(model, blocks, Steps, world=ALONE, model_sha256="m", **options)


def files():
    return sorted(path.suffix for path in (cache_directory() / "teacher").iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_those_of_the_model_beside_and_rounding_costs_almost_nothing(dtype):
    teacher, student, blocks = tiny_llama().to(dtype), tiny_llama(seed=1), blocks_of()
    kept, beside = remembered(teacher, blocks), Beside(tiny_llama().to(dtype))
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.zero_()  # the model may change: head and states are copies
    for step in range(3):
        batch = micro_batch(blocks, Steps, ALONE, step, 1)
        ours, theirs = (Objective(t, label_weight=0.5).loss(student, batch) for t in (kept, beside))
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-4)
        exact, rounded = (t.logits(t.states(batch)).double().log_softmax(-1) for t in (beside, kept))
        assert (exact.exp() * (exact - rounded)).sum(-1).mean().item() < 1e-5


def test_a_second_run_reads_what_the_first_one_kept_and_passes_nothing():
    model, blocks = tiny_llama(), blocks_of()
    first = remembered(model, blocks)
    batch = micro_batch(blocks, Steps, ALONE, 0, 0)
    wanted = first.states(batch)
    assert torch.equal(remembered(tiny_llama(seed=3), blocks).states(batch), wanted)  # named by its digest alone
    other = blocks_of(seed=1)
    assert not torch.equal(remembered(model, other).states(micro_batch(other, Steps, ALONE, 0, 0)), wanted)


def test_text_that_is_trained_on_several_times_is_passed_once():
    blocks = blocks_of(tokens=5 * Steps.sequence_length)
    kept = remembered(tiny_llama(), blocks)
    (path,) = (cache_directory() / "teacher").glob("*.states")
    assert path.stat().st_size == 5 * Steps.sequence_length * 24 * 2
    for step in range(Steps.steps):
        kept.states(micro_batch(blocks, Steps, ALONE, step, 0))
    with pytest.raises(KeyError):
        kept.states(Batch(torch.zeros(1, Steps.sequence_length, dtype=torch.int64)))


@pytest.mark.parametrize("extra", [0, 7, 1000])
def test_what_is_killed_goes_on_after_its_last_whole_pass(extra):
    model, blocks = tiny_llama(), blocks_of()
    wanted = remembered(model, blocks).states(micro_batch(blocks, Steps, ALONE, 2, 1))
    folder = cache_directory() / "teacher"
    (path,) = folder.glob("*.states")
    content = path.read_bytes()
    row = Steps.sequence_length * 24 * 2
    path.with_suffix(".partial").write_bytes(content[: 4 * row + extra])
    path.unlink()
    passes = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: passes.append(1))
    found = remembered(model, blocks).states(micro_batch(blocks, Steps, ALONE, 2, 1))
    handle.remove()
    assert torch.equal(found, wanted)
    assert path.read_bytes() == content
    assert len(passes) == 3 - 1 + 1  # one of them looks whether the parts give the model's logits


def test_what_no_run_has_used_for_a_month_goes():
    model, said = tiny_llama(), []
    remembered(model, blocks_of())
    folder = cache_directory() / "teacher"
    (old,) = folder.glob("*.states")
    (folder / "killed.partial").write_bytes(b"1")
    remembered(model, blocks_of(seed=1), say=said.append)
    assert len([*folder.glob("*.states")]) == 2
    assert not said
    long_ago = old.stat().st_mtime - 31 * 86400
    for path in (old, folder / "killed.partial"):
        os.utime(path, (long_ago, long_ago))
    remembered(model, blocks_of(seed=1), say=said.append)
    (left,) = folder.glob("*.states")
    assert left != old
    assert not old.with_suffix(".json").exists()
    assert not [*folder.glob("*.partial")]
    assert len(said) == 2
    assert any(str(old) in line for line in said)
    os.utime(left, (long_ago, long_ago))
    remembered(model, blocks_of(seed=1), say=said.append)  # using it counts
    assert left.stat().st_mtime > long_ago
    assert len(said) == 2


def test_damaged_states_are_made_again():
    model, blocks = tiny_llama(), blocks_of()
    wanted = remembered(model, blocks).states(micro_batch(blocks, Steps, ALONE, 0, 0))
    (path,) = (cache_directory() / "teacher").glob("*.states")
    damaged = bytearray(path.read_bytes())
    damaged[5] ^= 0xFF
    path.write_bytes(damaged)
    assert torch.equal(remembered(model, blocks).states(micro_batch(blocks, Steps, ALONE, 0, 0)), wanted)
    assert files() == [".json", ".lock", ".states"]


def test_a_disk_without_room_and_states_that_are_not_finite_are_refused(monkeypatch):
    model = tiny_llama()
    model.model.norm.weight.data.fill_(1e6)
    with pytest.raises(UserError, match=r"finite in torch.float16.*--dtype bfloat16"):
        remembered(model, blocks_of())
    usage = os.statvfs("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    assert usage
    with pytest.raises(UserError, match="EDKM_CACHE"):
        remembered(tiny_llama(), blocks_of())


def train_until(config, rows, cache):
    """A run that ends itself by SIGKILL after so many rows of the teacher's pass."""
    torch.set_num_threads(1)
    os.environ["EDKM_CACHE"], teacher._PASS_TOKENS = cache, 48
    synced, fsync = [], os.fsync

    def count(number):
        fsync(number)
        if os.readlink(f"/proc/self/fd/{number}").endswith(".partial"):
            synced.append(number)
            if len(synced) == rows:
                os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = count
    compress(config)


def test_a_run_killed_in_the_teachers_pass_resumes_to_the_same_weights(
    start, model_directory, text_file, tmp_path, monkeypatch
):
    config = settings(model_directory, text_file, tmp_path / "out", assignments="held", steps=5)
    child = start(train_until, config, 3, os.environ["EDKM_CACHE"])
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert ".partial" in files()
    monkeypatch.setattr(teacher, "_PASS_TOKENS", 48)
    compress(config, resume=True)
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path / "other"))
    compress(settings(model_directory, text_file, tmp_path / "whole", assignments="held", steps=5))
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "whole")


def test_of_processes_that_work_together_none_has_its_lock_before_the_first_has(tmp_path):
    class Together:  # two threads in place of two processes
        barrier, outcome = Barrier(2), []

        def __init__(self, main):
            self.main = main

        def on_main(self, work):
            self.outcome += [work()] if self.main else []
            self.barrier.wait(60)
            value = self.outcome[-1]
            self.barrier.wait(60)
            return value

    def process(rank):
        with locked(tmp_path / f"{rank}.lock", said.put, "busy", Together(rank == 0)):
            done.append(rank)

    said, done, other = Queue(), [], FileLock(tmp_path / "0.lock")
    with ThreadPoolExecutor(2) as pool:
        with other:  # of another run
            ended = [pool.submit(process, rank) for rank in (1, 0)]
            assert "another process is busy" in said.get(timeout=60)
            with FileLock(tmp_path / "1.lock", timeout=0):
                assert done == []
        for one in ended:
            one.result(60)
    assert sorted(done) == [0, 1]


def test_states_of_another_number_format_are_anothers():
    remembered(tiny_llama(), blocks_of())
    remembered(tiny_llama().half(), blocks_of())
    assert files().count(".states") == 2


def test_a_cache_that_cannot_be_written_to_is_told_before_the_work(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"uncompressed model's states are kept in .*EDKM_CACHE"):
        require_place()
