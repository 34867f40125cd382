"""LLM-QAT: quantization-aware training on text that the model writes itself (arXiv 2305.17888).

The uncompressed model writes the text (section 2.1). The student computes with fake-quantized weights, symmetric by the
largest magnitude of each output row, of which nothing is clipped (section 2.2); gradients pass the rounding straight
through. The loss is the cross entropy against the uncompressed model's whole distribution (section 2.3, equation 4), here
as the KL divergence, which has the same gradient. Embeddings and head neither change nor train. More: docs/baselines.md.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from edkm_cli.clustering.grids import StraightThrough
from edkm_cli.data import Blocks
from edkm_cli.nn.parts import Parts
from edkm_cli.progress import Track, no_progress
from edkm_cli.research.baselines.grid import Uniform, quantize_inputs, quantize_outputs
from edkm_cli.research.baselines.outcome import UNQUANTIZED, Outcome, Task, check_at_least, check_bits, check_positive
from edkm_cli.research.baselines.train import train
from edkm_cli.self_text import write_text
from edkm_cli.train.losses import Beside, Objective

_GREEDY_UP_TO = (3, 4, 5)


def quantize(
    task: Task,
    *,
    steps: int = 50,
    learning_rate: float = 2e-5,
    batch_size: int = 1,
    sequence_length: int = 1024,
    sequences: int = 0,
    activation_bits: int = UNQUANTIZED,
    kv_bits: int = UNQUANTIZED,
) -> Outcome:
    """Train a model in place on text of its own; the paper has groups of whole rows.

    Args:
        steps: optimizer steps; 0 rounds the weights without training.
        sequences: how many are written; 0: as many as the steps take. Fewer are seen repeatedly.
        activation_bits, kv_bits: 2 to 8 bits of a linear's input, and of keys and values, by hooks that stay; 16: none.

    Raises UserError for a value out of range, or if the loss stops being finite.
    """
    check_at_least(0, steps=steps, sequences=sequences)
    check_at_least(1, batch_size=batch_size)
    check_at_least(2, sequence_length=sequence_length)
    check_positive(learning_rate=learning_rate)
    check_bits(activation_bits=activation_bits, kv_bits=kv_bits)
    form, model = Uniform(task.bits, task.group_size, "absmax"), task.model
    linears = form.linears(model)
    count = (sequences or steps * batch_size) if steps else 0
    text = training_text(model, sequences=count, length=sequence_length, seed=task.seed, track=task.track)
    teacher = copy.deepcopy(model).requires_grad_(False) if steps else None
    for layer in linears.values():
        parametrize.register_parametrization(layer, "weight", _Quantized(form), unsafe=True)
    quantize_inputs(linears.values(), activation_bits)
    quantize_outputs(linears, ("k_proj", "v_proj"), kv_bits)
    if teacher is not None:
        blocks = Blocks(text.flatten(), sequence_length, seed=task.seed)
        distil(model, teacher, blocks, batch_size, steps=steps, learning_rate=learning_rate, track=task.track)
    for layer in linears.values():
        parametrize.remove_parametrizations(layer, "weight", leave_parametrized=True)
    notes = [f"data-free: {text.numel():,} tokens of its own text"]
    for what, rounded_to in (("activations", activation_bits), ("keys and values", kv_bits)):
        notes += [f"{what} at {rounded_to} bits per token"] * (rounded_to != UNQUANTIZED)
    return form.outcome(linears, training_tokens=steps * batch_size * sequence_length, note=", ".join(notes))


@torch.no_grad()
def training_text(model: Any, *, sequences: int, length: int, seed: int = 0, track: Track = no_progress) -> Tensor:
    """Text by the model itself, (sequences, length) int64 on the CPU (section 2.1).

    Sequences do not end: what follows an end-of-sequence token is the next text, as where documents are joined.
    """
    vocabulary, device = model.config.get_text_config().vocab_size, next(model.parameters()).device
    text = torch.zeros(sequences, length, dtype=torch.int64)
    text[:, :1] = torch.randint(vocabulary, (sequences, 1), generator=torch.Generator().manual_seed(seed))
    about: dict[str, Any] = {"length": length, "track": track}
    for index, until in enumerate(_GREEDY_UP_TO[:sequences]):
        rows = text[index :: len(_GREEDY_UP_TO)]
        for at in range(1, min(until, length)):
            rows[:, at] = model(input_ids=rows[:, :at].to(device), use_cache=False).logits[:, -1].argmax(-1)
        rows[:] = write_text(model, rows[:, :until].tolist(), sequences=len(rows), seed=seed + index, **about)
    return text


class _Quantized(nn.Module):
    """A parametrization: the weight (out, in) as the layer computes with it; its scale is stored in float16."""

    def __init__(self, form: Uniform):
        super().__init__()
        self._form = form

    def forward(self, weight: Tensor) -> Tensor:
        return StraightThrough.apply(weight, self._form.round)


def distil(model: Any, teacher: Any, blocks: Blocks, batch_size: int, **how: Any) -> list[float]:
    """Distil the teacher's distribution into the fake-quantized model, in place, as `train` does with `how`."""
    frozen = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module}
    trained = [one for one in model.parameters() if one.requires_grad and id(one) not in frozen]
    objective, parts = Objective(Beside(teacher)), Parts(model)

    def loss_at(step: int) -> Tensor:
        return objective.loss(parts, blocks.batch(step, batch_size).to(trained[0].device))

    return train(model, trained, loss_at, cosine=True, **how)
