"""Losses: plain next-token prediction, or the KL divergence from the uncompressed model's logits (distillation)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.nn.lora import dense_weights

_CHUNK_TOKENS = 256


class _MeanKL(torch.autograd.Function):
    """KL(teacher || student) a token, averaged. Its gradient, softmax(student) - softmax(teacher), is as large as the
    logits and is the one thing saved; log-softmaxes exist only chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor) -> Tensor:
        gradient = torch.empty_like(student)
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        for rows in torch.arange(student.shape[0]).split(_CHUNK_TOKENS):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            log_student = student[part].float().log_softmax(1)
            log_teacher = teacher[part].float().log_softmax(1)
            probabilities = log_teacher.exp()
            total += ((log_teacher - log_student) * probabilities).sum()
            gradient[part] = (log_student.exp_() - probabilities).div_(student.shape[0]).to(student.dtype)
        ctx.save_for_backward(gradient)
        return (total / student.shape[0]).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None


def kl_divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over tokens of KL(softmax(teacher) || softmax(student)); logits (..., vocabulary), computed in float32.

    The gradient goes to the student only.
    """
    return _MeanKL.apply(student.flatten(0, -2), teacher.detach().flatten(0, -2))


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Mean cross entropy of tokens 2.. of each sequence; logits (batch, sequence, vocabulary), ids (batch, sequence)."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class FrozenTeacher:
    """The uncompressed model inside one that is trained with LoRA: its own weights, without updates and clustering.

    No second copy of the weights. Embeddings are those of the student, rounded.
    """

    def __init__(self, model: Any):
        self._model = model

    def __call__(self, **inputs: Any) -> Any:
        with dense_weights(self._model):
            return self._model(**inputs)


def hidden_loss(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...]) -> Tensor:
    """How far the decoder layers' outputs are from the teacher's: squared error by squared norm, each (batch, sequence,
    hidden), averaged over tokens and layers. Token by token, or the few tokens with huge norms would be all of it."""
    parts = []
    for ours, theirs in zip(student[1:], teacher[1:], strict=True):  # the first are the embeddings
        theirs = theirs.float()
        error = (ours.float() - theirs).square().sum(-1)
        parts.append((error / theirs.square().sum(-1).clamp_min(1e-12)).mean())
    return torch.stack(parts).mean()


def training_loss(student: Any, teacher: Any | None, ids: Tensor, *, hidden_weight: float = 0.0) -> Tensor:
    """The loss of one micro-batch: KL from the teacher where there is one (plus `hidden_weight` times `hidden_loss`),
    else next-token prediction."""
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if teacher is None:
        return next_token_loss(student(**inputs).logits, ids)
    if hidden_weight:
        inputs["output_hidden_states"] = True
    # The student first: its graph is the larger part of the memory, and the teacher's logits are needed only after.
    ours = student(**inputs)
    with torch.no_grad():
        theirs = teacher(**inputs)
    loss = kl_divergence(ours.logits, theirs.logits)
    return loss + hidden_weight * hidden_loss(ours.hidden_states, theirs.hidden_states) if hidden_weight else loss
