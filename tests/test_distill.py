"""The KL loss and its hand-written gradient against PyTorch's."""

import pytest
import torch

from edkm_cli.distill import kl_divergence, next_token_loss, training_loss


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


def test_the_loss_of_a_perfect_student_is_zero():
    logits = torch.randn(2, 5, 11)
    assert kl_divergence(logits, logits).item() == pytest.approx(0, abs=1e-6)


def test_without_a_teacher_the_loss_is_next_token_prediction(ids):
    from conftest import tiny_llama

    model = tiny_llama()
    expected = model(ids, labels=ids).loss
    assert training_loss(model, None, ids).item() == pytest.approx(expected.item(), rel=1e-6)
    assert next_token_loss(model(ids).logits, ids).item() == pytest.approx(expected.item(), rel=1e-6)
