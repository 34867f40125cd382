"""What training minimizes: plain next-token prediction, or the KL divergence from the uncompressed model's logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from edkm_cli.config import CompressConfig
from edkm_cli.data.blocks import NO_LABEL, Batch
from edkm_cli.nn.lora import dense_weights

_CHUNK_TOKENS = 256


class _MeanKL(torch.autograd.Function):
    """KL(teacher || student) a token, averaged, plus `label_weight` times the next token's negative log-probability,
    averaged. Its gradient is as large as the logits and is the one thing saved; log-softmaxes exist only chunk by chunk.

    `labels` (tokens,) int64 are the next tokens, -1 where there is none. `masked`: what has none counts in neither loss.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, labels: Tensor, label_weight: float, masked: bool
    ) -> Tensor:
        gradient = torch.empty_like(student)
        total = torch.zeros((), dtype=torch.float64, device=student.device)
        known = labels >= 0
        count = max(int(known.sum()), 1) if masked else student.shape[0]  # tokens that the divergence is averaged over
        labelled = known.sum().clamp_min(1)
        share = label_weight / labelled * known if label_weight else None  # (tokens,), what a label weighs
        for rows in torch.arange(student.shape[0]).split(_CHUNK_TOKENS):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            log_student = student[part].float().log_softmax(1)
            log_teacher = teacher[part].float().log_softmax(1)
            probabilities = log_teacher.exp()
            divergence = (log_teacher - log_student).mul_(probabilities)
            counts: Tensor | float = known[part][:, None] if masked else 1.0
            total += (divergence * counts).sum() / count if masked else divergence.sum() / count
            del log_teacher, divergence
            if share is None:
                gradient[part] = (log_student.exp_() - probabilities).div_(count).mul_(counts).to(student.dtype)
                continue
            # Both losses end in the student's softmax: their targets are added, each with its weight.
            weights, target = share[part], probabilities.div_(count).mul_(counts)
            picks = labels[part].clamp_min(0)[:, None]
            total -= (log_student.gather(1, picks)[:, 0] * weights).sum()
            target.scatter_add_(1, picks, weights[:, None].to(target.dtype))
            gradient[part] = (log_student.exp_().mul_(weights[:, None] + counts / count) - target).to(student.dtype)
        ctx.save_for_backward(gradient)
        return total.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grad.to(gradient.dtype), None, None, None, None


def kl_divergence(
    student: Tensor,
    teacher: Tensor,
    *,
    ids: Tensor | None = None,
    label_weight: float = 0.0,
    labels: Tensor | None = None,
) -> Tensor:
    """Mean over tokens of KL(softmax(teacher) || softmax(student)); logits (..., vocabulary), computed in float32.

    With a `label_weight`, plus that times `next_token_loss(student, ids)` (soft and hard targets, arXiv 1503.02531), at
    no further memory. The gradient goes to the student only. With `labels` (batch, sequence), the tokens to be learnt and
    -1 where there is none, both losses are means over the places that have one, and 0 where none has.
    """
    masked = labels is not None
    if labels is None:
        labels = torch.full(student.shape[:-1], -1, device=student.device)
        if label_weight and ids is not None:
            labels[:, :-1] = ids[:, 1:]
    flat = labels.flatten()
    return _MeanKL.apply(student.flatten(0, -2), teacher.detach().flatten(0, -2), flat, label_weight, masked)


def next_token_loss(logits: Tensor, ids: Tensor, labels: Tensor | None = None) -> Tensor:
    """Mean cross entropy of tokens 2.. of each sequence; logits (batch, sequence, vocabulary), ids (batch, sequence).

    With `labels` (batch, sequence), the tokens to be learnt and -1 where there is none: of these, 0 where there are none.
    """
    if labels is not None:
        total = nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=NO_LABEL, reduction="sum"
        )
        return total / (labels >= 0).sum().clamp_min(1)
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


def hidden_loss(student: tuple[Tensor, ...], teacher: tuple[Tensor, ...], *, labels: Tensor | None = None) -> Tensor:
    """How far the decoder layers' outputs are from the teacher's: squared error by squared norm, each (batch, sequence,
    hidden), averaged over layers and tokens (those with a label where there are `labels`). Token by token, or the few tokens
    with huge norms would be all of it."""
    parts = []
    for ours, theirs in zip(student[1:], teacher[1:], strict=True):  # the first are the embeddings
        theirs = theirs.float()
        error = (ours.float() - theirs).square().sum(-1)
        relative = error / theirs.square().sum(-1).clamp_min(1e-12)
        if labels is None:
            parts.append(relative.mean())
        else:
            parts.append((relative * (labels >= 0)).sum() / (labels >= 0).sum().clamp_min(1))
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
        """What a resolved configuration asks for."""
        assert config.label_weight is not None, "the configuration must be resolved"
        return cls(teacher, label_weight=config.label_weight, hidden_weight=config.hidden_weight)

    def loss(self, student: Any, batch: Batch | Tensor) -> Tensor:
        """Of one micro-batch, or of ids (batch, sequence) int64 alone: a scalar whose gradient goes to the student.

        Where a batch has labels, every part of the objective is a mean over the places with a label. Where it has
        positions, which restart with each document, transformers keeps attention within the documents.
        """
        if isinstance(batch, Tensor):
            batch = Batch(batch)
        ids, labels = batch.ids, batch.labels
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if batch.positions is not None:
            inputs["position_ids"] = batch.positions
        if self.teacher is None:
            return next_token_loss(student(**inputs).logits, ids, labels)
        if self.hidden_weight:
            inputs["output_hidden_states"] = True
        # The student first: its graph is the larger part of the memory, and the teacher's logits are needed only after.
        ours = student(**inputs)
        with torch.no_grad():
            theirs = self.teacher(**inputs)
        loss = kl_divergence(ours.logits, theirs.logits, ids=ids, label_weight=self.label_weight, labels=labels)
        if not self.hidden_weight:
            return loss
        return loss + self.hidden_weight * hidden_loss(ours.hidden_states, theirs.hidden_states, labels=labels)
