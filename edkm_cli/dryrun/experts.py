"""Experts in a rehearsal: the first of each block stands for all, since matrices of one shape need the same.

A block of 256 experts is rehearsed in the time of one. The tensors of that one say for how many they stand
(`edkm_cli.dryrun.ledger.stands_for`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from edkm_cli.dryrun.ledger import STANDS_FOR, Ledger, stands_for
from edkm_cli.dryrun.meta import CLUSTERING, OPTIMIZER
from edkm_cli.nn.swap import LINEAR
from edkm_cli.preflight import RunPlan
from edkm_cli.runtime.experts import Experts, with_one_expert


class OneExpert:
    """`plan` with one expert a block. As a context manager: what optimizers hold of that one, they hold of all."""

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

    def __enter__(self) -> None:
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
