"""What training minimizes: plain next-token prediction, or the KL divergence from the uncompressed model's logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from edkm_cli.data.blocks import NO_LABEL, Batch
from edkm_cli.nn.parts import Parts

_CHUNK_TOKENS = 256
_CACHED_NUMBERS = 1 << 20  # logits that become losses at once on a CPU: in float32 they stay in its caches
Logits = Callable[[Tensor], Tensor]
"""States (1, tokens, n) -> logits (1, tokens, vocabulary)."""


class Teacher(Protocol):
    """Whose predictions are learnt: its states (batch, sequence, n) of a batch, and the logits of some of them."""

    def states(self, batch: Batch) -> Tensor: ...

    def logits(self, states: Tensor) -> Tensor: ...


class Beside:
    """A frozen model in memory as a teacher."""

    def __init__(self, model: Any):
        self._model, self._parts = model.eval(), Parts(model)
        self.logits = self._parts.logits

    @torch.no_grad()
    def states(self, batch: Batch) -> Tensor:
        return self._parts.states(**inputs_of(batch))


def inputs_of(batch: Batch) -> dict[str, Any]:
    """What a model is called with. Where a batch has positions, which restart with each document, transformers keeps
    attention within the documents."""
    positions = {} if batch.positions is None else {"position_ids": batch.positions}
    return {"input_ids": batch.ids, "use_cache": False, **positions}


@dataclass(frozen=True)
class _Weights:
    """What a token counts: `divergence` (tokens,) and `label` (tokens,) float32, whose sums over all are those of means."""

    divergence: Tensor | None
    label: Tensor | None
    labels: Tensor

    @classmethod
    def of(cls, labels: Tensor, *, taught: bool, label_weight: float, masked: bool) -> "_Weights":
        """`labels` (tokens,) int64, -1 where there is none; `masked`: such places count for nothing."""
        known = (labels >= 0).float()
        mean = known / known.sum().clamp_min(1)
        divergence = mean if masked else torch.full_like(known, 1 / len(labels))
        label = label_weight * mean if taught else mean
        return cls(divergence if taught else None, label if label_weight or not taught else None, labels)


def _loss_of_logits(student: Tensor, teacher: Tensor | None, weights: _Weights, part: slice) -> tuple[Tensor, Tensor]:
    """(the loss of some tokens, its gradient in their logits (tokens, vocabulary)), in float32, on a CPU in parts.

    Both losses end in the student's softmax p: with targets q that sum to one, the gradient of each is p - q.
    """
    count = max(1, _CACHED_NUMBERS // student.shape[1])
    if student.device.type == "cpu" and len(student) > count:
        loss, gradient = torch.zeros(()), torch.empty_like(student)
        for first in range(0, len(student), count):
            rows, begin = slice(first, first + count), part.start + first
            at = slice(begin, min(begin + count, part.stop))
            some = _loss_of_logits(student[rows], None if teacher is None else teacher[rows], weights, at)
            loss, gradient[rows] = loss + some[0], some[1]
        return loss, gradient
    log_student = student.float().log_softmax(1)
    loss, target, total = torch.zeros((), device=student.device), None, torch.zeros_like(log_student[:, 0])
    if teacher is not None and weights.divergence is not None:
        log_teacher = teacher.float().log_softmax(1)
        target = log_teacher.exp()
        share = weights.divergence[part]
        loss = loss + ((log_teacher.sub_(log_student)).mul_(target).sum(1) * share).sum()
        target.mul_(share[:, None])
        total = total + share
    if weights.label is not None:
        share, picks = weights.label[part], weights.labels[part].clamp_min(0)[:, None]
        loss = loss - (log_student.gather(1, picks)[:, 0] * share).sum()
        total = total + share
    gradient = log_student.exp_().mul_(total[:, None])
    if target is not None:
        gradient.sub_(target)
    if weights.label is not None:
        gradient.scatter_add_(1, picks, -share[:, None])
    return loss, gradient


class _ChunkedLoss(torch.autograd.Function):
    """The loss of states (tokens, n), whose logits exist some tokens at a time, in forward only: the gradients, as large as
    the states and as what trains of the head, are computed there."""

    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        logits: Logits,
        taught: Tensor | None,
        teacher: Teacher | None,
        weights: _Weights,
        differentiate: bool,
        *head: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=states.device)
        gradients = [torch.zeros_like(tensor) for tensor in (states, *head)] if differentiate else []
        for first in range(0, len(states), _CHUNK_TOKENS):
            part = slice(first, first + _CHUNK_TOKENS)
            theirs = None if teacher is None or taught is None else teacher.logits(taught[part][None])[0]
            with torch.set_grad_enabled(differentiate):
                given = states[part].detach().requires_grad_(differentiate)
                ours = logits(given[None])[0]
            loss, gradient = _loss_of_logits(ours.detach(), theirs, weights, part)
            total += loss
            if differentiate:
                found = torch.autograd.grad(ours, [given, *head], gradient.to(ours.dtype), allow_unused=True)
                gradients[0][part] = found[0]
                for sum_, more in zip(gradients[1:], found[1:], strict=True):
                    sum_ += 0 if more is None else more
            del theirs, ours, gradient  # before the next ones are there
        ctx.save_for_backward(*gradients)
        return total.float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, *head = (gradient * grad.to(gradient.dtype) for gradient in ctx.saved_tensors)
        return states, None, None, None, None, None, *head


def _next_tokens(ids: Tensor) -> Tensor:
    """The label of each place of ids (batch, sequence): the next token, NO_LABEL at the last."""
    return torch.cat((ids[:, 1:], torch.full_like(ids[:, :1], NO_LABEL)), 1)


def next_token_loss(logits: Tensor, ids: Tensor, labels: Tensor | None = None) -> Tensor:
    """Mean cross entropy of tokens 2.. of each sequence; logits (batch, sequence, vocabulary), ids (batch, sequence).

    With `labels` (batch, sequence), the tokens to be learnt and -1 where there is none: of these, 0 where there are none.
    """
    labels = _next_tokens(ids) if labels is None else labels
    flat = logits.flatten(0, 1).float()
    total = nn.functional.cross_entropy(flat, labels.flatten(), ignore_index=NO_LABEL, reduction="sum")
    return total / (labels >= 0).sum().clamp_min(1)


@dataclass(frozen=True)
class Objective:
    """What training minimizes, in one piece, so that no part of it is left out on the way.

    With a teacher: the KL divergence from its predictions, plus `label_weight` times the next-token loss. Without one:
    the next-token loss alone, and the weight counts for nothing.
    """

    teacher: Teacher | None = None
    label_weight: float = 0.0

    def loss(self, student: Any, batch: Batch | Tensor) -> Tensor:
        """Of one micro-batch, or of ids (batch, sequence) int64 alone: a scalar whose gradient goes to the student, a causal
        LM or its `Parts`. Logits exist 256 tokens at a time.

        Where a batch has labels, every part of the objective is a mean over the places with a label.
        """
        batch = Batch(batch) if isinstance(batch, Tensor) else batch
        parts = student if isinstance(student, Parts) else Parts(student)
        labels = _next_tokens(batch.ids) if batch.labels is None else batch.labels
        states = parts.states(**inputs_of(batch)).flatten(0, 1)
        taught = None if self.teacher is None else self.teacher.states(batch).flatten(0, 1)
        weights = _Weights.of(
            labels.flatten(), taught=taught is not None, label_weight=self.label_weight, masked=batch.labels is not None
        )
        head = parts.head_parameters()
        differentiate = torch.is_grad_enabled() and (states.requires_grad or bool(head))
        return _ChunkedLoss.apply(states, parts.logits, taught, self.teacher, weights, differentiate, *head)
