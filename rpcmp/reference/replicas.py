"""The replicas of a stage, in one process: the same modules, with gradients and buffers for each.

The rules that make bits comparable: bundles of micro-batches go to replicas by `rpcmp.turns`; each
replica adds up the gradients of its own; before the step the replicas' sums are added in their
order, and all of them have replica 0's buffers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rpcmp.turns import Turns


class Replicas:
    """The replicas of one stage.

    Args:
        modules: the stage's layers.
        turns: which replica computes which bundle.
    """

    def __init__(self, modules: Iterable[nn.Module], turns: Turns) -> None:
        self._modules = list(modules)
        self._turns = turns
        self._parameters = list(
            dict.fromkeys(p for module in self._modules for p in module.parameters())
        )
        everybody = range(turns.num_replicas)
        self._gradients: list[list[Tensor | None]] = [[None] * len(self._parameters)] * len(
            everybody
        )
        self._buffers = [self._copied() for _ in everybody]

    def enter(self, bundle: int) -> None:
        """Let the modules be the replica that computes this bundle."""
        self._become(self._turns.owner(bundle))

    def leave(self, bundle: int) -> None:
        """Keep what this replica has become."""
        replica = self._turns.owner(bundle)
        self._gradients[replica] = [parameter.grad for parameter in self._parameters]
        self._buffers[replica] = self._copied()

    def sum(self) -> None:
        """Let the modules be all replicas together; all have the first one's buffers."""
        self._become(0)
        for index, parameter in enumerate(self._parameters):
            total: Tensor | None = None
            for gradients in self._gradients:
                mine = gradients[index]
                if mine is not None:
                    total = mine if total is None else total + mine
            parameter.grad = total
        self._gradients = [[None] * len(self._parameters)] * self._turns.num_replicas
        self._buffers = [self._copied() for _ in self._buffers]

    def _become(self, replica: int) -> None:
        for parameter, gradient in zip(self._parameters, self._gradients[replica], strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in zip(self._all_buffers(), self._buffers[replica], strict=True):
                buffer.copy_(value)

    def _copied(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self._all_buffers()]

    def _all_buffers(self) -> list[Tensor]:
        return [buffer for module in self._modules for buffer in module.buffers()]
