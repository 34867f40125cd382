"""AutoRound by its authors' own package: rounding and ranges tuned block by block (arXiv 2309.05516).

Not a reimplementation: this runs the package `auto-round` as its users get it, where it is installed
(`pip install 'edkm-cli[autoround]'`; tested with 0.16.1). It learns by signed gradient descent how far each weight is
rounded from the nearest level and how far each range is clipped, so that a block's output comes close to the original
block's. Symmetric grids; bits are counted as its checkpoints store them, a float16 scale and a zero point of `bits` bits
for each group.
"""

import importlib.util

import torch

from edkm_cli.errors import UserError
from edkm_cli.models import load_tokenizer, resolve
from edkm_cli.research.baselines.grid import Uniform
from edkm_cli.research.baselines.outcome import Outcome, Task, check_at_least


def quantize(task: Task, *, iterations: int = 200, learning_rate: float = 0.0, batch_size: int = 8) -> Outcome:
    """Tune and round a model, from `load_dense`, in place, on batches of one length. The package shows its own progress.

    Args:
        iterations: a block; the package's `auto-round-light` recipe has 50, with a learning rate of 0.005.
        learning_rate: 0: the package's choice, 1 / iterations.

    Raises UserError where the package is absent, or for a value out of range.
    """
    if importlib.util.find_spec("auto_round") is None:
        raise UserError("autoround needs the package auto-round; pip install 'edkm-cli[autoround]'")
    model, batches = task.model, task.batches
    check_at_least(0, iterations=iterations, learning_rate=learning_rate)
    check_at_least(1, batch_size=batch_size, calibration_samples=len(batches))
    form = Uniform(task.bits, task.group_size)  # of its size only: a zero point is stored
    linears = form.linears(model)
    from auto_round import AutoRound

    length, together = batches[0].shape[-1], min(batch_size, len(batches))
    scheme = {"bits": task.bits, "group_size": task.group_size or -1, "sym": True, "data_type": "int", "act_bits": 16}
    text = {"dataset": batches, "seqlen": length, "nsamples": len(batches), "batch_size": together}
    how = {"iters": iterations, "lr": learning_rate or None, "seed": task.seed, "device_map": str(batches[0].device)}
    tokenizer = load_tokenizer(resolve(model.config._name_or_path))  # it wants one, though samples are tokens already
    tuner = AutoRound(model, tokenizer, scheme=scheme, **text, **how, amp=False, enable_torch_compile=False)
    before = {name: layer.weight.detach().clone() for name, layer in linears.items()}
    tuned, _ = tuner.quantize()
    for name, weight in before.items():
        model.set_submodule(name, tuned.get_submodule(name))
        if torch.equal(model.get_submodule(name).weight.cpu(), weight.cpu()):
            rule = f"autoround must quantize all linears, but left {name} {tuple(weight.shape)} as it is"
            raise UserError(f"{rule}; auto-round skips widths that are not multiples of 32")
    calibrated, note = sum(batch.numel() for batch in batches), f"{iterations} iterations a block"
    trained = iterations * together * length
    return form.outcome(linears, training_tokens=trained, calibration_tokens=calibrated, note=note)
