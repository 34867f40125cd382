"""What training minimizes: plain next-token prediction, or the KL divergence from the uncompressed model's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.config import CompressConfig
from edkm_cli.nn.lora import dense_weights

_CHUNK_TOKENS = 256


class _MeanKL(torch.autograd.Function):
    """KL(teacher || student) a token, averaged, plus `label_weight` times the next token's negative log-probability,
    averaged. Its gradient is as large as the logits and is the one thing saved; log-softmaxes exist only chunk by chunk.

    `labels` (tokens,) int64 are the next tokens, -1 where there is none.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor, label_weight: float) -> Tensor:
        gradient = torch.empty_like(student)
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        known = labels >= 0
        share = label_weight / known.sum() * known if label_weight else None  # (tokens,), what a label weighs
        for rows in torch.arange(student.shape[0]).split(_CHUNK_TOKENS):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            log_student = student[part].float().log_softmax(1)
            log_teacher = teacher[part].float().log_softmax(1)
            probabilities = log_teacher.exp()
            total += ((log_teacher - log_student) * probabilities).sum() / student.shape[0]
            del log_teacher
            if share is None:
                gradient[part] = (log_student.exp_() - probabilities).div_(student.shape[0]).to(student.dtype)
                continue
            # Both losses end in the student's softmax: their targets are added, each with its weight.
            weights, target = share[part], probabilities.div_(student.shape[0])
            picks = labels[part].clamp_min(0)[:, None]
            total -= (log_student.gather(1, picks)[:, 0] * weights).sum()
            target.scatter_add_(1, picks, weights[:, None].to(target.dtype))
            gradient[part] = (log_student.exp_().mul_(weights[:, None] + 1 / student.shape[0]) - target).to(
                student.dtype
            )
        ctx.save_for_backward(gradient)
        return total.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None


def kl_divergence(student: Tensor, teacher: Tensor, *, ids: Tensor | None = None, label_weight: float = 0.0) -> Tensor:
    """Mean over tokens of KL(softmax(teacher) || softmax(student)); logits (..., vocabulary), computed in float32.

    With a `label_weight`, plus that times `next_token_loss(student, ids)` (soft and hard targets, arXiv 1503.02531), at
    no further memory. The gradient goes to the student only.
    """
    labels = torch.full(student.shape[:-1], -1, device=student.device)
    if label_weight and ids is not None:
        labels[:, :-1] = ids[:, 1:]
    return _MeanKL.apply(student.flatten(0, -2), teacher.detach().flatten(0, -2), labels.flatten(), label_weight)


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


@dataclass(frozen=True)
class Objective:
    """What training minimizes, in one piece, so that no part of it is left out on the way.

    With a teacher: the KL divergence from its logits, plus `label_weight` times `next_token_loss` and `hidden_weight`
    times `hidden_loss`. Without one (`teacher` is None): `next_token_loss` alone, and the two weights count for nothing.
    """

    teacher: Any | None = None
    label_weight: float = 0.0
    hidden_weight: float = 0.0

    @classmethod
    def of(cls, config: CompressConfig, teacher: Any | None) -> Objective:
        """What a configuration asks for."""
        return cls(teacher, label_weight=config.label_weight, hidden_weight=config.hidden_weight)

    def loss(self, student: Any, ids: Tensor) -> Tensor:
        """Of one micro-batch, ids (batch, sequence) int64: a scalar whose gradient goes to the student."""
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self.teacher is None:
            return next_token_loss(student(**inputs).logits, ids)
        if self.hidden_weight:
            inputs["output_hidden_states"] = True
        # The student first: its graph is the larger part of the memory, and the teacher's logits are needed only after.
        ours = student(**inputs)
        with torch.no_grad():
            theirs = self.teacher(**inputs)
        loss = kl_divergence(ours.logits, theirs.logits, ids=ids, label_weight=self.label_weight)
        if not self.hidden_weight:
            return loss
        return loss + self.hidden_weight * hidden_loss(ours.hidden_states, theirs.hidden_states)
