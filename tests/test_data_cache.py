"""The token cache: the same tokens as in memory, by one process or several; never a store that is not whole."""

import errno
import json
import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import pytest
from filelock import FileLock

from edkm_cli.config import TextSettings
from edkm_cli.data import cache, open_training_data, parse_source, parse_sources, splits, store
from edkm_cli.errors import UserError
from helpers import byte_tokenizer

RECORDS = [{"prompt": f"{i} + 1 =", "completion": f" {i + 1}" + " yes" * (i % 50)} for i in range(400)]


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A JSON Lines file that counts as large, and a cache of its own."""
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(splits, "WHOLE_BYTES", 1000)
    monkeypatch.setattr("edkm_cli.data.reading.PART_BYTES", 2000)
    path = tmp_path / "large.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    return path


def opened(path, say=lambda text: None, tokenizer=None, **options):
    options = TextSettings(**{"data_workers": 1, **options})
    data = open_training_data(parse_sources([str(path)]), tokenizer or byte_tokenizer(), options=options, say=say)
    return data.stores[0]


def contents(found):
    return found.ids(0, len(found)).tolist(), found.trained(0, len(found)).tolist(), found.ends.tolist(), found.counts


def stores(path):
    return sorted(p.name for p in (path.parent / "cache" / "tokens").iterdir() if p.is_dir())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_cached_store_is_that_of_one_pass_in_memory(large, monkeypatch, workers):
    found = opened(large, data_workers=workers)
    parts = splits.read_split(parse_source(str(large)), "train")
    source = cache.memory_store(parts, cache.Encoder(byte_tokenizer()))
    assert contents(found) == contents(source)
    assert found.sha256 == source.sha256
    assert found.counts.masked > 0
    assert len(stores(large)) == 1


@pytest.mark.parametrize("before", [None, "true"])
def test_one_process_tokenizes_on_one_core(large, monkeypatch, before):
    """tokenizers reads this variable at each call."""
    name, seen, encode = "TOKENIZERS_PARALLELISM", [], cache.Encoder.encode
    monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(name, before)
    monkeypatch.setattr(cache.Encoder, "encode", lambda *args: seen.append(os.environ.get(name)) or encode(*args))
    opened(large, data_workers=1)
    assert len(seen) > 1
    assert set(seen) == {"false"}
    assert os.environ.get(name) == before


def test_what_is_held_out_of_a_large_file_is_counted_and_is_what_is_measured(large):
    found = opened(large)
    held_out = [record for part in splits.read_split(parse_source(str(large)), "test") for record in part.load()]
    assert RECORDS[: len(held_out)] == held_out
    assert found.counts.held_out == sum(len(record["prompt"] + record["completion"]) for record in held_out) > 0
    assert found.counts.documents == len(RECORDS) - len(held_out)


def test_a_second_start_reads_what_the_first_wrote(large):
    said = []
    first = opened(large, said.append)
    second = opened(large, said.append)
    assert contents(first) == contents(second)
    assert said == [f"tokenizing {large}, once"]


@pytest.mark.parametrize("change", ["data", "touch", "tokenizer", "template", "train_on", "data_column"])
def test_whatever_decides_the_tokens_makes_another_store(large, change):
    opened(large)
    tokenizer, options = byte_tokenizer(), {}
    if change == "data":
        text = large.read_text().replace("7 + 1", "9 + 1")
        times = large.stat()
        large.write_text(text)
        os.utime(large, ns=(times.st_atime_ns, times.st_mtime_ns))
    elif change == "touch":
        os.utime(large, ns=(0, 0))
    elif change == "tokenizer":
        tokenizer.add_tokens(["yes"])
    elif change == "template":
        tokenizer.chat_template = "{{ messages }}"
    else:
        options = {change: {"train_on": "all", "data_column": "prompt"}[change]}
    said = []
    opened(large, said.append, tokenizer, **options)
    assert len(stores(large)) == 2
    assert len(said) == 1


def test_of_a_large_source_a_share_of_the_marks_is_kept(large, monkeypatch):
    large.write_text(
        "".join(
            json.dumps({"text": f"Line {i} of\nsome text that is long enough to be looked for.\nEnd"}) + "\n"
            for i in range(400)
        )
    )
    every = opened(large)
    monkeypatch.setattr("edkm_cli.data.training.WHOLE_BYTES", 1000)
    some = opened(large)
    assert (every.sampled, some.sampled) == (False, True)
    assert set(some.marks.tolist()) < set(every.marks.tolist())
    assert every.sha256 == some.sha256


def test_a_cache_can_be_made_again(large):
    opened(large)
    said = []
    opened(large, said.append, rebuild_cache=True)
    assert "are made again" in said[0]
    assert len(stores(large)) == 1


def test_what_another_process_has_made_again_is_not_made_once_more(large):
    opened(large)
    said: Queue[str] = Queue()
    with ThreadPoolExecutor(1) as pool:
        with FileLock(large.parent / "cache" / "tokens" / f"{stores(large)[0]}.lock"):
            made = pool.submit(opened, large, said.put, rebuild_cache=True)
            assert said.get(timeout=60) == "another process is tokenizing the same data; waiting for it"
        assert made.result(60).sha256
    assert said.empty()


@pytest.mark.parametrize("file", [store.TOKENS, store.TRAINED, store.ENDS, store.MARKS, store.MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "empty"])
def test_a_damaged_store_is_noticed_and_made_again(large, file, damage):
    wanted = contents(opened(large))
    path = large.parent / "cache" / "tokens" / stores(large)[0] / file
    if damage == "remove":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0x10
        path.write_bytes({"flip": bytes(data), "cut": bytes(data[: len(data) // 2]), "empty": b""}[damage])
    said = []
    assert contents(opened(large, said.append)) == wanted
    assert any("are made again" in text for text in said) or file == store.MANIFEST


def test_a_full_disk_leaves_nothing_and_says_so(large, monkeypatch):
    class Full(store.StoreWriter):
        def append(self, part):
            super().append(part)
            if self.counts.tokens > 3000:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(cache, "StoreWriter", Full)
        with pytest.raises(UserError, match=r"No space left on device.*EDKM_TOKEN_CACHE"):
            opened(large)
    assert stores(large) == []
    assert opened(large).counts.documents > 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_files_on_a_full_device_are_refused(large, monkeypatch):
    """Written through the real files: the buffer meets the full disk, and closing it does, too."""
    make = cache.StoreWriter.__init__

    def on_full(self, directory, dtype):
        make(self, directory, dtype)
        self._files[store.TOKENS].close()
        self._files[store.TOKENS] = open("/dev/full", "wb")  # noqa: SIM115 - the writer closes it

    monkeypatch.setattr(cache.StoreWriter, "__init__", on_full)
    with pytest.raises(UserError, match=r"No space left on device"):
        opened(large)
    assert stores(large) == []


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, large, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDKM_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="EDKM_TOKEN_CACHE"):
        opened(large)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_record_far_in_is_one_line_and_leaves_nothing(large, workers):
    large.write_text(large.read_text() + '{"text": \n')
    with pytest.raises(UserError, match="must be valid jsonl"):
        opened(large, data_workers=workers)
    assert stores(large) == []


def test_a_file_that_changes_while_it_is_read_is_refused(large, monkeypatch):
    encode = cache.Encoder.encode

    def meddling(self, part):
        os.utime(large, ns=(1, 1))
        return encode(self, part)

    monkeypatch.setattr(cache.Encoder, "encode", meddling)
    with pytest.raises(UserError, match="changed while it was read"):
        opened(large, data_workers=1)
    assert stores(large) == []


def _open_in_child(path, root, queue):
    os.environ["EDKM_CACHE"] = root
    splits.WHOLE_BYTES = 1000
    said = []
    found = opened(path, said.append)
    queue.put((found.sha256, said))


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked")
def test_two_runs_at_once_tokenize_once(large):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_open_in_child, args=(large, os.environ["EDKM_CACHE"], queue)) for _ in range(3)]
    for child in children:
        child.start()
    results = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    assert len({sha256 for sha256, _ in results}) == 1
    assert sum(any("once" in text for text in said) for _, said in results) == 1
    assert len(stores(large)) == 1


def _open_slowly(path, root, started, workers, pids=None):
    os.environ["EDKM_CACHE"] = root
    splits.WHOLE_BYTES = 1000
    append = cache.StoreWriter.append

    def slow(self, part):
        append(self, part)
        if pids is not None and not started.is_set():
            pids.put([child.pid for child in multiprocessing.active_children()])
        started.set()
        time.sleep(0.05)

    cache.StoreWriter.append = slow
    opened(path, data_workers=workers)


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked")
@pytest.mark.parametrize("delay", [0, 0.03, 0.11])
def test_a_run_killed_while_it_writes_leaves_no_store_and_no_lock(large, delay):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    child = context.Process(target=_open_slowly, args=(large, os.environ["EDKM_CACHE"], started, 1))
    child.start()
    assert started.wait(60)
    time.sleep(delay)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert all(name.endswith(".tmp") for name in stores(large))
    found = opened(large)
    assert len(stores(large)) == 1
    assert found.counts.documents > 300


@pytest.mark.skipif(sys.platform != "linux", reason="children are forked")
def test_the_workers_of_a_killed_run_end_and_do_not_keep_its_lock(large):
    context = multiprocessing.get_context("fork")
    started, pids = context.Event(), context.SimpleQueue()
    child = context.Process(target=_open_slowly, args=(large, os.environ["EDKM_CACHE"], started, 2, pids))
    child.start()
    assert started.wait(60)
    workers = pids.get()
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    said = []
    assert opened(large, said.append).counts.documents > 300
    assert not any("waiting" in text for text in said)
    assert len(workers) == 2
    until = time.monotonic() + 60
    while any(_runs(pid) for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in workers)


def _runs(pid):
    """Whether there is a process that has not ended; one that nobody waits for stays a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
