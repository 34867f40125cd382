"""The KL loss and its hand-written gradient against PyTorch's."""

import pytest
import torch

from edkm_cli.data import Batch
from edkm_cli.train import losses
from edkm_cli.train.losses import Beside, Objective, next_token_loss
from helpers import kl_divergence, tiny_llama


@pytest.mark.parametrize("at_once", [1, 7 * 50, 1 << 20])
@pytest.mark.parametrize("tokens", [3, 256, 300])
def test_kl_equals_torchs_in_value_and_gradient(tokens, at_once, monkeypatch):
    monkeypatch.setattr(losses, "_CACHED_NUMBERS", at_once)
    student = torch.randn(1, tokens, 50, requires_grad=True)
    teacher = 3 * torch.randn(1, tokens, 50)
    reference_student = student.detach().double().requires_grad_(True)
    reference = torch.nn.functional.kl_div(
        reference_student.log_softmax(-1).flatten(0, 1),
        teacher.double().log_softmax(-1).flatten(0, 1),
        log_target=True,
        reduction="batchmean",
    )
    loss = kl_divergence(student, teacher)
    (2 * loss).backward()
    (2 * reference).backward()
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    torch.testing.assert_close(student.grad.double(), reference_student.grad, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("label_weight", [0.3, 2.0])
def test_labels_beside_the_teacher_add_next_token_prediction(label_weight):
    student = torch.randn(2, 150, 50, dtype=torch.float64)
    teacher, ids = 3 * torch.randn(2, 150, 50), torch.randint(0, 50, (2, 150))
    ours, plain = student.float().requires_grad_(True), student.clone().requires_grad_(True)
    expected = torch.nn.functional.kl_div(
        plain.log_softmax(-1).flatten(0, 1),
        teacher.double().log_softmax(-1).flatten(0, 1),
        log_target=True,
        reduction="batchmean",
    )
    expected = expected + label_weight * torch.nn.functional.cross_entropy(
        plain[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    )
    loss = kl_divergence(ours, teacher, ids=ids, label_weight=label_weight)
    (3 * loss).backward()
    (3 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(ours.grad.double(), plain.grad, rtol=1e-4, atol=1e-8)


def test_the_loss_of_a_perfect_student_is_zero():
    logits = torch.randn(2, 5, 11)
    assert kl_divergence(logits, logits).item() == pytest.approx(0, abs=1e-6)


def test_without_a_teacher_the_loss_is_next_token_prediction(ids):

    model = tiny_llama()
    expected = model(ids, labels=ids).loss
    assert Objective().loss(model, ids).item() == pytest.approx(expected.item(), rel=1e-6)
    assert next_token_loss(model(ids).logits, ids).item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_weight_of_labels_reaches_the_loss_and_logits_in_parts_are_whole_ones(ids):
    student, teacher = tiny_llama(seed=1), tiny_llama()
    long = ids.repeat(1, 9)[:, :128].repeat(2, 1)  # two parts, one of which ends inside a sequence
    whole = Objective(Beside(teacher), label_weight=0.3).loss(student, long)
    whole.backward()
    found = {name: parameter.grad.clone() for name, parameter in student.named_parameters()}
    student.zero_grad()
    ours, theirs = student(long).logits, teacher(long).logits
    wanted = torch.nn.functional.kl_div(
        ours.log_softmax(-1).flatten(0, 1), theirs.log_softmax(-1).flatten(0, 1), log_target=True, reduction="batchmean"
    )
    wanted = wanted + 0.3 * next_token_loss(ours, long)
    wanted.backward()
    assert whole.item() == pytest.approx(wanted.item(), rel=1e-5)
    for name, parameter in student.named_parameters():  # the head's own, which is the embedding here, too
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


CONVERSATION = torch.tensor([[5, 1, 2, 9, 3, 7, 4, 8], [6, 6, 1, 0, 2, 3, 9, 5]])
LEARNT = torch.tensor([[0, 0, 0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)


def answered():
    labels = torch.full_like(CONVERSATION, -1)
    labels[:, :-1] = torch.where(LEARNT[:, 1:], CONVERSATION[:, 1:], -1)
    return Batch(CONVERSATION, labels)


def by_hand(logits, teacher=None, label_weight=0.0):
    """The mean over answer tokens, each from the logits before it, written out; float64."""
    terms = []
    for row in range(2):
        for token in range(1, 8):
            if LEARNT[row, token]:
                ours = logits[row, token - 1].double().log_softmax(-1)
                term = -ours[CONVERSATION[row, token]]
                if teacher is not None:
                    theirs = teacher[row, token - 1].double().log_softmax(-1)
                    term = (theirs.exp() * (theirs - ours)).sum() + label_weight * term
                terms.append(term)
    assert len(terms) == 8
    return torch.stack(terms).mean()


@pytest.mark.parametrize("label_weight", [None, 0.0, 0.7])
def test_only_answers_count_as_computed_by_hand(label_weight):
    student, teacher = tiny_llama(), tiny_llama(seed=1) if label_weight is not None else None
    objective = Objective(teacher and Beside(teacher), label_weight=label_weight or 0.0)
    with torch.no_grad():
        found = objective.loss(student, answered())
        theirs = teacher(input_ids=CONVERSATION).logits if teacher else None
        wanted = by_hand(student(input_ids=CONVERSATION).logits, theirs, label_weight or 0.0)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)


@pytest.mark.parametrize("label_weight", [None, 0.0, 0.7])
def test_gradients_of_masked_tokens_are_zero_and_the_others_right(label_weight):
    logits = torch.randn(2, 8, 257, generator=torch.Generator().manual_seed(0)).requires_grad_(True)
    theirs = torch.randn(2, 8, 257, generator=torch.Generator().manual_seed(1))
    labels = answered().labels
    if label_weight is None:
        next_token_loss(logits, CONVERSATION, labels).backward()
        wanted = by_hand(copy := logits.detach().clone().requires_grad_(True))
    else:
        kl_divergence(logits, theirs, labels=labels, label_weight=label_weight).backward()
        wanted = by_hand(copy := logits.detach().clone().requires_grad_(True), theirs, label_weight)
    wanted.backward()
    assert logits.grad[labels < 0].abs().max() == 0
    torch.testing.assert_close(logits.grad, copy.grad, rtol=1e-4, atol=1e-8)


def test_a_batch_without_an_answer_has_no_loss_and_no_gradient():
    student, nothing = tiny_llama(), torch.full_like(CONVERSATION, -1)
    for objective in (Objective(), Objective(Beside(tiny_llama(seed=1)), label_weight=1.0)):
        loss = objective.loss(student, Batch(CONVERSATION, nothing))
        assert loss.item() == 0
        loss.backward()
        assert all(p.grad is None or p.grad.abs().max() == 0 for p in student.parameters())


def test_labels_of_every_next_token_give_the_unmasked_loss():
    student, every = tiny_llama(), torch.full_like(CONVERSATION, -1)
    every[:, :-1] = CONVERSATION[:, 1:]
    assert Objective().loss(student, Batch(CONVERSATION, every)).item() == pytest.approx(
        Objective().loss(student, CONVERSATION).item(), rel=1e-6
    )
