"""The training loop's own parts; whole trainings are in test_compress.py."""

from __future__ import annotations

import signal
from contextlib import nullcontext
from types import SimpleNamespace as Fake

import torch

from edkm_cli.config import TrainingSettings
from edkm_cli.distributed import ALONE
from edkm_cli.nn.parts import Parts
from edkm_cli.train.loop import _Training, preemption
from edkm_cli.train.losses import Beside, Objective
from helpers import cluster, tiny_llama


def test_the_hard_loss_is_the_whole_objective_of_the_snapped_model(ids):
    teacher, (student, _) = tiny_llama(), cluster(tiny_llama(), mode="soft", bits=2)
    config = TrainingSettings(steps=1)
    objective, parts = Objective(Beside(teacher), label_weight=0.3), Parts(student)
    student.eval()
    with torch.no_grad():
        expected = float(objective.loss(parts, ids))
        less = float(Objective(Beside(teacher)).loss(student, ids))
    student.train()
    alone = {"world": ALONE, "accelerator": Fake(autocast=nullcontext)}
    run = Fake(model=student, _parts=parts, objective=objective, config=config, **alone)
    assert _Training.hard_loss(run, ids, 0) == expected != less
    assert student.training


def test_the_former_handler_of_sigterm_comes_back():
    former = signal.getsignal(signal.SIGTERM)
    with preemption() as asked:
        signal.raise_signal(signal.SIGTERM)
        assert asked.is_set()
    assert signal.getsignal(signal.SIGTERM) is former
