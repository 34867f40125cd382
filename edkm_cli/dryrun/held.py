"""What steps of a rehearsal hold: the gradients of a training step, as one process of several has them, and what teaches
it; and what compensating a linear holds beside the model, which no tensor stands for.

Of the experts of each block the first stands for all, since matrices of one shape need the same: a block of 256 experts is
rehearsed in the time of one. The tensors of that one say for how many they stand (`edkm_cli.dryrun.ledger.stands_for`).
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from edkm_cli.data import Batch
from edkm_cli.distributed import World
from edkm_cli.dryrun.ledger import STANDS_FOR, Ledger, stands_for
from edkm_cli.dryrun.meta import CLUSTERING, GRADIENTS, META, OPTIMIZER, SHARDING
from edkm_cli.granularity import FREE
from edkm_cli.initialize.compensate import PART_BYTES, fits_tables
from edkm_cli.kernels.passes_torch import ONE_HOT_NUMBERS
from edkm_cli.nn.hooks import decoder_layers
from edkm_cli.nn.parts import Parts
from edkm_cli.nn.swap import LINEAR
from edkm_cli.precision import TOKENS_A_SUM
from edkm_cli.preflight import RunPlan
from edkm_cli.runtime.experts import Experts, with_one_expert
from edkm_cli.train.teacher import RememberedTeacher

# FSDP2 holds of a layer's gradients the buffer that is reduced, beside the one of the layer before.
_REDUCED_LAYERS = 2


def size_bytes(tensors: Any) -> int:
    """Bytes of some tensors, each counted, and those that it stands for."""
    return sum(tensor.numel() * tensor.element_size() * stands_for(tensor) for tensor in tensors)


def layer_bytes(model: Any) -> int:
    """The parameters of the largest decoder layer."""
    return max(size_bytes(block.parameters()) for block in decoder_layers(model).values())


def rounded_bytes(model: Any, *, alone: bool) -> int:
    """What linears in bfloat16 take more (`bfloat16_linears`), of layers `alone` instead of their float32 weights."""
    head = model.get_output_embeddings()
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    weights = [(linear.weight, -2 if alone and linear is not head else 2) for linear in linears]
    return sum(more * weight.numel() * stands_for(weight) for weight, more in weights)


class Gradients:
    """The gradients of training as one process holds them: alone, in data parallelism's buckets, or reduced to shards."""

    def __init__(self, model: Any, trained: list[nn.Parameter], ledger: Ledger, world: World, held: ExitStack):
        """`held`: until when they are there."""
        self._trained, self._ledger, self._world = trained, ledger, world
        self._buckets = world.size > 1 and not world.sharded
        self._layers: dict[int, list[nn.Parameter]] = {}  # parameter id -> the trained parameters of its decoder layer
        for block in decoder_layers(model).values() if world.sharded else ():
            own = [parameter for parameter in block.parameters() if parameter.requires_grad]
            self._layers.update((id(parameter), own) for parameter in own)
        if self._buckets:  # they are there from the beginning to the end, and gradients are views of them
            held.enter_context(ledger.more(size_bytes(trained), GRADIENTS))
        for parameter in trained:
            held.enter_context(parameter.register_post_accumulate_grad_hook(self._arrived))

    def make(self) -> None:
        """Gradients as an earlier micro-batch leaves them."""
        for parameter in self._trained:
            parameter.grad = torch.empty_like(parameter)
            setattr(parameter.grad, STANDS_FOR, stands_for(parameter))
            self._ledger.move([parameter.grad], GRADIENTS, share=0.0 if self._buckets else self._world.share)

    def restore(self) -> None:
        """Before the optimizer: what went into buckets is seen again as gradients."""
        if self._buckets:
            self.make()

    def _arrived(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self._buckets:
            parameter.grad = None
            return
        setattr(parameter.grad, STANDS_FOR, stands_for(parameter))
        self._ledger.move([parameter.grad], GRADIENTS)
        if (layer := self._layers.get(id(parameter), [])) and all(other.grad is not None for other in layer):
            gradients = [other.grad for other in layer if other.grad is not None]
            with self._ledger.more(_REDUCED_LAYERS * size_bytes(gradients), SHARDING):
                pass
            self._ledger.move(gradients, GRADIENTS, share=self._world.share)


class Taught(RememberedTeacher):
    """A teacher whose states are read from the disk, with states of any sequence."""

    def __init__(self, parts: Parts):
        self._parts = parts

    def states(self, batch: Batch) -> Tensor:
        return torch.empty(*batch.ids.shape, self._parts.width, dtype=torch.float16, device=META)


class OneExpert:
    """`plan` with one expert a block."""

    def __init__(self, plan: RunPlan, ledger: Ledger):
        skeleton = with_one_expert(plan.skeleton)
        modules = dict(skeleton.named_modules())
        swaps = tuple(swap for swap in plan.swaps if swap.role != LINEAR or swap.name in modules)
        self.plan, self._ledger = replace(plan, skeleton=skeleton, swaps=swaps), ledger
        blocks = ((path, module) for path, module in modules.items() if isinstance(module, Experts))
        self._counts = {f"{path}.{leaf}.0": block.count for path, block in blocks for leaf in block.matrices()}

    def for_all(self, tensors: dict[str, Tensor]) -> Iterator[Tensor]:
        """Tensors of linears, by name, that say for how many they stand."""
        for name, tensor in tensors.items():
            setattr(tensor, STANDS_FOR, self._counts.get(name, 1))
            yield tensor

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        training = self._ledger.phase == "training"
        for parameter, state in optimizer.state.items() if self._counts else ():
            tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
            for tensor in tensors if training else [*tensors, parameter.grad]:
                setattr(tensor, STANDS_FOR, stands_for(parameter))
                self._ledger.move([tensor], OPTIMIZER if training else CLUSTERING)

    def counted(self) -> RemovableHandle:
        """As long as the block lasts, what optimizers hold of that one, they hold of all."""
        return register_optimizer_step_post_hook(self._stepped)


def compensated_bytes(layer: Any, inputs: Tensor, bits: int, hidden: int, *, corrected: bool, gpu: bool) -> int:
    """The most that `Compensation` holds at once, in bytes.

    Args:
        hidden: size of the residual stream, to which the layer's output is added where it is as wide.
        corrected: whether the weight is corrected for the errors of the layers before, too.
        gpu: whether sums by pairs of entries are products with one-hot matrices.
    """
    square, size = layer.in_features**2, layer.out_features * layer.in_features
    groups, k, grid = len(layer.centroids), 2**bits, layer.clustering.grid
    tokens = inputs.numel() // layer.in_features
    some = min(tokens, TOKENS_A_SUM)
    widened = 4 * size * (layer.weight.dtype != torch.float32)
    # All matrices in float32. The Hessian, its sorted copy, and two of its factorization.
    factoring = 4 * 4 * square + 6 * some * layer.in_features
    # The Hessian, its factor and that with a unit diagonal; the weight, its float32 copy, the rounded one, the tables.
    moving = 3 * 4 * square + (2 * 4 + layer.weight.element_size()) * size + 4 * layer.centroids.numel()
    # The Hessian, damped, too, and its factor; the weight, rounded and times H, its codes; sums of H by pairs of entries.
    fitting = 3 * 4 * square + (3 * 4 + 1) * size + 8 * (layer.out_features + groups) * k**2 + widened
    fitting += 17 * min(ONE_HOT_NUMBERS, size * k) * gpu  # compared in bytes; chosen, weighted, and a copy of both
    # The Hessian, damped, too, and its factor; the weight, its errors and what they raise, codes; three numbers an entry.
    improving = 3 * 4 * square + (4 * 4 + 1) * size + 3 * 4 * groups * 2**bits + widened
    needed = [factoring, moving, improving]
    if grid.palette != FREE:  # codes, products of a part of the rows, then three weights and their errors
        needed.append(4 * square + (4 * 4 + 1) * size + 3 * PART_BYTES * grid.numbers + 4 * groups * k)
    elif fits_tables(layer.clustering.granularity, (layer.out_features, layer.in_features)):
        needed.append(fitting)
    if corrected:
        # The inputs of both models and their difference, the stream's likewise, some tokens of them; the sum of their
        # products, and what is added to it.
        columns = layer.in_features + layer.out_features * (layer.out_features == hidden)
        # What is solved once for all matrices with these inputs. Among tokens: inputs of both models, the solution and two
        # copies on the way, two matrices of tokens by tokens; else four of columns by columns.
        among_tokens = 4 * 4 * inputs.numel() + 2 * 4 * tokens**2
        solving = among_tokens if tokens < layer.in_features else 4 * 4 * square
        shared = 8 * tokens * layer.in_features if tokens < layer.in_features else 4 * square  # by the next matrix, too
        needed = [most + shared for most in needed]
        needed.append(2 * 4 * square + 3 * 4 * size + max(solving, 3 * 4 * some * columns + 2 * 4 * square))
    return max(needed)
