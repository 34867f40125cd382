"""Fixtures: a tiny model with its tokenizer, a text, token ids, and children to kill; nothing is downloaded."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing.forkserver
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the hub is wrong
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models gain nothing from threads, and workers share the cores

if gc.isenabled():  # until all is imported and collected: there is no garbage in it
    gc.disable()

import pytest
import torch

import preloaded
from helpers import byte_tokenizer, tiny_llama
from processes import SERVER, children

torch.set_num_threads(1)
if find_spec("hypothesis"):  # a GPU machine may have no more than tests/test_gpu.py needs
    from hypothesis import HealthCheck, settings

    # The same examples each time, however busy the machine.
    settings.register_profile("edkm", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("edkm")


def pytest_collection_modifyitems(items):
    """Files with long tests first: workers take files in this order, and the last ones should be short."""
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in long, item.path))


def pytest_collection_finish():
    gc.enable()
    gc.freeze()  # what was imported stays: looking for garbage among it takes 3% of the tests' time


@pytest.fixture
def alone(tmp_path_factory):
    """Of the tests that start several processes, one runs at a time, whatever the workers of pytest-xdist are at."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    with open(tmp_path_factory.getbasetemp().parent / "alone", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture
def exact_products(monkeypatch):
    """What rounds products to bfloat16 where that is faster does not: for a comparison with an exact reference."""
    monkeypatch.setattr("edkm_cli.precision.multiplies_bfloat16", lambda device: False)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 257, (2, 17), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory) -> Path:
    """A dense tiny LLaMA with its tokenizer, as a local Hugging Face directory."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_llama().save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """About 20,000 characters of varied text."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    lines = [f"Line {i}: the {['quick', 'slow', 'odd'][i % 3]} fox counted {i * 7919 % 1000} hens." for i in range(400)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def fork_server():
    """Runs, and has imported what children need, before any of them or of the product's own is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server looks there for what it imports
        SERVER.set_forkserver_preload(["forked", "kill_worker"])
        multiprocessing.forkserver.ensure_running()


@pytest.fixture
def start(fork_server):
    """Starts a function in a child of the fork server; ends what is left of it after the test."""
    with children() as begin:
        yield begin


@pytest.fixture(scope="session")
def python(fork_server, tmp_path_factory):
    """The path of a Python for scripts, whose start costs no imports (preloaded.py); elsewhere than on Linux a plain one."""
    if not sys.platform.startswith("linux"):
        yield Path(sys.executable)
        return
    directory = tmp_path_factory.mktemp("python")
    server = SERVER.Process(target=preloaded.serve, args=(str(directory / "socket"),))
    server.start()
    client = directory / "python"
    client.write_text(preloaded.CLIENT.format(python=sys.executable, path=str(directory / "socket")))
    client.chmod(0o755)
    while not (directory / "socket").exists():
        assert server.is_alive()
        time.sleep(0.01)
    yield client
    server.kill()
    server.join()
