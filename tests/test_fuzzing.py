"""Mutated checkpoints: each is refused in one line, or is the model that was exported, or is caught by --verify.

`make fuzz` draws more of them; EDKM_FUZZ is the number.
"""

import resource
import signal
from pathlib import Path

import pytest
import torch

from edkm_cli import integrity
from edkm_cli.errors import UserError
from edkm_cli.export.source import Compressed
from edkm_cli.hf import load
from edkm_cli.report.inspection import verify
from fuzzing import COUNT, Mutator, copied
from helpers import byte_tokenizer, cluster, tiny_llama

SECONDS = 20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from edkm_cli.export.checkpoint import write_checkpoint
    from edkm_cli.files import write_json

    directory = tmp_path_factory.mktemp("fuzzing") / "whole"
    directory.mkdir()
    model, spec = cluster(tiny_llama(hidden=8, inner=16, layers=1))
    write_checkpoint(model, byte_tokenizer(), directory, spec)
    write_json(directory / "report.json", report_of(directory))
    return directory


def report_of(directory):
    from edkm_cli.evaluate.size import footprint
    from edkm_cli.model_files import weight_files_bytes

    size = footprint(load(directory))
    return {
        "weights_bytes": weight_files_bytes(directory),
        "decoder_bits_per_weight": size.decoder_bits_per_weight,
        "model_bits_per_weight": size.model_bits_per_weight,
    }


@pytest.fixture
def no_hang():
    """A mutation that takes longer than `SECONDS` fails the test."""

    def late(*_):
        raise TimeoutError(f"more than {SECONDS} s")

    former = signal.signal(signal.SIGALRM, late)
    yield lambda: signal.alarm(SECONDS)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)


@pytest.fixture
def remembered(monkeypatch):
    """What a config.json asks for is worked out once for each of its texts: it depends on nothing else, and most
    mutations leave it as it is."""
    known, derive = {}, integrity.expected_tensors

    def expected(directory, spec, *, limit, trust_remote_code=False):
        key = (Path(directory, "config.json").read_bytes(), repr(spec), limit)
        if key not in known:
            known[key] = attempt(lambda: derive(directory, spec, limit=limit, trust_remote_code=trust_remote_code))
        tensors, refused = known[key]
        if refused:
            raise UserError(refused)
        return tensors

    monkeypatch.setattr(integrity, "expected_tensors", expected)


def attempt(what):
    """(result, the one line of a user error or None)."""
    try:
        return what(), None
    except UserError as error:
        return None, str(error)


def outcome(directory, logits, ids):
    """`refused`, `same` (the model that was exported) or `verify` (another one, which --verify tells)."""
    _, fault = attempt(lambda: verify(Compressed(directory)))
    model, refused = attempt(lambda: load(directory))
    for line in filter(None, (fault, refused)):
        assert "\n" not in line.strip(), line
        assert len(line) < 2000
    if refused:
        assert fault, f"verified, and cannot be loaded: {refused}"
        return "refused"
    with torch.no_grad():
        same = torch.equal(model(ids).logits, logits)
    assert same or fault, "another model, and --verify says nothing"
    return "same" if same else "verify"


@pytest.mark.slow
@pytest.mark.usefixtures("remembered")
def test_mutated_checkpoints_are_refused_or_caught(checkpoint, tmp_path, ids, no_hang):
    ids = ids[:1, :5]
    verify(Compressed(checkpoint))
    with torch.no_grad():
        logits = load(checkpoint)(ids).logits
    mutator, counts, failed = Mutator(seed=0), {"refused": 0, "same": 0, "verify": 0}, []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(COUNT):
        directory = copied(checkpoint, tmp_path / "mutated")
        told = mutator.apply(directory)
        no_hang()
        try:
            counts[outcome(directory, logits, ids)] += 1
        except Exception as error:
            failed.append(f"{number} {told}: {type(error).__name__}: {str(error)[:300]}")
        signal.alarm(0)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(counts, f"{grown / 1024:.0f} MB more")
    assert not failed, "\n".join(failed[:20])
    assert grown * 1024 < 2**30
    assert counts["refused"] > COUNT / 2
