"""The KL loss and its hand-written gradient against PyTorch's."""

import pytest
import torch

from edkm_cli.config import CompressConfig
from edkm_cli.data import Batch
from edkm_cli.train.losses import Objective, hidden_loss, kl_divergence, next_token_loss
from helpers import tiny_llama


@pytest.mark.parametrize("tokens", [3, 256, 300])
def test_kl_equals_torchs_in_value_and_gradient(tokens):
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


def test_hidden_states_add_their_relative_error_token_by_token(ids):

    student, teacher = tiny_llama(seed=1), tiny_llama()
    ours, theirs = (model(ids, output_hidden_states=True) for model in (student, teacher))
    layers = []
    for a, b in zip(ours.hidden_states[1:], theirs.hidden_states[1:], strict=True):
        tokens = [
            float((x - y).square().sum() / y.square().sum())
            for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True)
        ]
        layers.append(sum(tokens) / len(tokens))
    plain = Objective(teacher).loss(student, ids)
    with_hidden = Objective(teacher, hidden_weight=0.5).loss(student, ids)
    assert with_hidden.item() == pytest.approx(plain.item() + 0.5 * sum(layers) / len(layers), rel=1e-5)
    assert hidden_loss(theirs.hidden_states, theirs.hidden_states).item() == 0
    with_hidden.backward()
    assert student.model.layers[0].mlp.down_proj.weight.grad.abs().max() > 0


def test_the_weights_of_a_configuration_reach_the_loss(ids):
    student, teacher = tiny_llama(seed=1), tiny_llama()
    config = CompressConfig(label_weight=0.3, hidden_weight=0.7)
    whole = Objective.of(config, teacher).loss(student, ids).item()
    ours, theirs = (model(ids, output_hidden_states=True) for model in (student, teacher))
    parts = [kl_divergence(ours.logits, theirs.logits), next_token_loss(ours.logits, ids)]
    parts.append(hidden_loss(ours.hidden_states, theirs.hidden_states))
    assert whole == pytest.approx(parts[0].item() + 0.3 * parts[1].item() + 0.7 * parts[2].item(), rel=1e-5)
    without = Objective.of(config, None).loss(student, ids).item()
    assert without == pytest.approx(parts[1].item(), rel=1e-5)


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
    objective = Objective(teacher, label_weight=label_weight or 0.0)
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
    for objective in (Objective(), Objective(tiny_llama(seed=1), label_weight=1.0, hidden_weight=1.0)):
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
