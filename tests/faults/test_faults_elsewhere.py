"""Commands that begin from a result, ended before a change of files drawn by chance, and then given once more: what they
write is absent or whole, over nothing and over a former result, and the second time it is all there."""

import json
import os
import random
import signal
import sys
from functools import cache
from types import SimpleNamespace

import pytest
from faulty import Fault, command

from edkm_cli.export.ownership import foreign
from helpers import byte_tokenizer, run, tiny_llama
from processes import PATIENCE_SECONDS, children

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="counts changes as Linux does them")]
COUNT = int(os.environ.get("EDKM_FAULTS", "10")) // 3
SHORT = ["--steps", 2, "--sequence-length", 32, "--context", 32, "--eval-windows", 1, "--device", "cpu"]
WEIGHTS = (".safetensors", ".gguf")


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.glob("*") if path.suffix in WEIGHTS}


@pytest.fixture(scope="module")
def bench(fork_server, text_file, tmp_path_factory):
    """`run` of a command, by name, to an output gives (exit status, what it said); `whole`, by name, what one
    without a fault writes and how many changes of files that takes."""
    folder = tmp_path_factory.mktemp("elsewhere")
    model, packed, grid, adapter = (folder / name for name in ("model", "packed", "grid", "adapter"))
    tiny_llama(hidden=64, inner=128).save_pretrained(model)  # whose rows llama.cpp's blocks divide
    byte_tokenizer().save_pretrained(model)
    text = ["--data", text_file]
    for output, more in ((packed, []), (grid, ["--target", "gguf:q4_0"])):
        status, _, err = run("compress", "--model", model, *text, "-o", output, *SHORT, "--steps", 0, *more)
        assert status == 0, err
    assert run("finetune", packed, *text, "-o", adapter, *SHORT)[0] == 0
    commands = {
        "finetune": ["finetune", packed, *text, *SHORT, "--save-every", 1, "--resume"],
        "merge": ["merge", packed, "--adapter", adapter, *text, *SHORT, "--start-tokens", 64,
                  "--max-perplexity-ratio", 10],
        "export": ["export", grid, "--to", "gguf:q4_0"],
    }  # fmt: skip
    with children() as start:

        def go(name, output, fault=None, *, record=None, more=()):
            log = folder / f"{output.name}.log"
            arguments = [*map(str, commands[name]), "-o", str(output), *more]
            child = start(command, arguments, str(log), fault, record and str(record))
            child.join(PATIENCE_SECONDS)
            return child.exitcode, log.read_text(encoding="utf-8")

        @cache
        def whole(name):
            output, record = folder / f"whole-{name}", folder / f"{name}.json"
            status, said = go(name, output, record=record)
            assert status == 0, said[-2000:]
            names = json.loads(record.read_text())
            first = next(place for place, changed in enumerate(names) if output.name in changed)
            return contents(output), len(names) - first

        yield SimpleNamespace(run=go, whole=whole, folder=folder)


@pytest.mark.parametrize("number", range(COUNT))
def test_a_command_that_is_ended_leaves_nothing_half_done_and_runs_again(bench, number):
    draw, name = random.Random(number), ("export", "merge", "finetune")[number % 3]
    whole, changes = bench.whole(name)
    output = bench.folder / f"out-{number}"
    former = draw.random() < 0.5
    if former:
        assert bench.run(name, output)[0] == 0
    fault = Fault(draw.choice(("kill", "terminate")), draw.randint(1, changes), output.name)
    more = ["--overwrite"] if former else []
    status, said = bench.run(name, output, fault, more=more)
    assert status in (0, 143, -signal.SIGKILL, -signal.SIGTERM), said[-2000:]
    assert output.exists() or not former
    assert not output.exists() or contents(output) == whole
    status, said = bench.run(name, output, more=["--overwrite"] if output.exists() else [])
    assert status == 0, said[-2000:]
    assert contents(output) == whole
    assert not foreign(output)
    left = {path.name for path in bench.folder.iterdir() if path.name.strip(".").startswith(f"{output.name}.")}
    assert left <= {f"{output.name}.log", f".{output.name}.lock"}
