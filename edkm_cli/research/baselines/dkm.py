"""DKM (arXiv 2108.12659): differentiable k-means as published, with every attention map kept for backward.

Each step clusters every weight softly, computes the model's own loss with the result, and sends the gradient through
the attention and its iterations; at the end weights snap to their nearest centroid. It has none of what edkm adds: no
trained tables, no straight-through forward, no teacher, no closed form, and by default it starts from plain k-means.
`closed_form=True` computes the same without attention maps (docs/clustering.md), which makes longer runs possible.
"""

from typing import Any

from torch import Tensor

from edkm_cli.distributed import World
from edkm_cli.errors import UserError
from edkm_cli.format import QuantizationSpec
from edkm_cli.granularity import Granularity
from edkm_cli.initialize.build import Recipe, initialize
from edkm_cli.nn.clustered import Clustering
from edkm_cli.nn.swap import check_geometry, plan_swaps
from edkm_cli.research.baselines import outcome
from edkm_cli.research.baselines.train import train
from edkm_cli.train.losses import next_token_loss


def quantize(
    task: outcome.Task,
    *,
    granularity: str = "row:1",
    lut_dtype: str = "float16",
    steps: int = 10,
    learning_rate: float = 5e-5,
    temperature: float = 0.02,
    iterations: int = 3,
    importance: str = "none",
    closed_form: bool = False,
) -> outcome.Outcome:
    """Train a model's decoder linears in place, one batch of the task for each step.

    Args:
        steps: optimizer steps; 0 leaves the k-means start. AdamW without decay, at a constant `learning_rate` (eDKM's).
        temperature: of the attention, relative to the variance of the weights that share a LUT.
        importance: weighs the start: `none`, `activation` or `gradient`, measured on the batches.
        closed_form: keep no attention maps.

    Raises UserError for a value out of range, no text to train on, or a loss that is not finite.
    """
    bits, model = task.bits, task.model
    outcome.check_bits(bits=bits)
    outcome.check_at_least(0, steps=steps, iterations=iterations)
    outcome.check_positive(learning_rate=learning_rate, temperature=temperature)
    if steps and not task.batches:
        raise UserError("dkm trains on the calibration text, got none; give --data or steps 0")
    layers = outcome.decoder_linears(model)
    device = next(model.parameters()).device
    batches = [batch.to(device) for batch in task.batches]
    method = "edkm" if closed_form else "dkm"
    spec = QuantizationSpec(bits, Granularity.parse(granularity), lut_dtype)
    geometry, table_bits = spec.granularity, 8 * (2**bits * spec.torch_lut_dtype.itemsize + spec.scales_tables)
    swaps = [swap for swap in plan_swaps(model) if swap.clustered]
    check_geometry(swaps, geometry)
    size = outcome.stored_size(layers, bits=bits, side_bits=lambda *shape: geometry.groups(*shape) * table_bits)
    clustering = Clustering(bits, geometry, lut_dtype, method=method, mode="soft", iterations=iterations)
    recipe = Recipe(swaps, spec, clustering, temperature, importance)
    used = batches if importance != "none" else []
    initialize(model, recipe, calibration=used, world=World(device=str(device)), track=task.track)
    if steps:
        _train(model, batches, list(layers), steps=steps, learning_rate=learning_rate, track=task.track)
    for name, layer in layers.items():
        layer.weight.data.copy_(model.get_submodule(name).hard_weight())
        model.set_submodule(name, layer)
    seen = sum(batches[step % len(batches)].numel() for step in range(steps))
    return outcome.Outcome(*size, training_tokens=seen, calibration_tokens=sum(batch.numel() for batch in used))


def _train(model: Any, batches: list[Tensor], names: list[str], **how: Any) -> None:
    """Train the clustered weights, nothing else, as `train` does with `how`."""
    layers: list[Any] = [model.get_submodule(name) for name in names]

    def loss_at(step: int) -> Tensor:
        ids = batches[step % len(batches)]
        return next_token_loss(model(input_ids=ids, use_cache=False).logits, ids)

    def commit() -> None:  # before the step: the next warm start is what this forward pass ended at
        for layer in layers:
            layer.commit()

    was_training = model.training
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        train(model, [layer.weight for layer in layers], loss_at, betas=(0.9, 0.95), before_step=commit, **how)
    finally:
        model.gradient_checkpointing_disable()
        model.train(was_training)
