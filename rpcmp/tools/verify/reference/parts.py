"""Mixed precision as a plain loop has it: `torch.autocast`, and `torch.amp.GradScaler` itself.

GradScaler skips the step of the one optimizer whose gradients are not finite. There is one
optimizer a stage here, and none may step where any must not; so all of them are shown to it as one.

The replicas of a stage, in one process: the same modules, with gradients and buffers for each.

The rules that make bits comparable: bundles of micro-batches go to replicas by
`rpcmp.config.topology`; each replica adds up the gradients of its own; before the step the
replicas' sums are added in their order, and all of them have replica 0's buffers.

Parameters that are one and lie in several layers, in one process.

Each place has a tensor of its own, as where the places are on several hosts. Before the step their
gradients are added in the order of the config's names, to the first one's; after it all have its
value. Only the first is optimized and stored.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from rpcmp.config.schema import Config
from rpcmp.config.topology import ReplicaAssignment
from rpcmp.pipelining import layers


def autocast(config: Config, stage_index: int) -> AbstractContextManager[object]:
    """What one layer of a stage is called under; a region of its own for each call."""
    dtype = config.autocast_of(stage_index)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, dtype))


class ReferenceSteps:
    """How a mini-batch ends: unscale, clip, step, all as the config says.

    Args:
        config: the job.
        optimizers: of all stages, by name.
    """

    def __init__(self, config: Config, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._max_norm = config.max_grad_norm
        self._together = _Together(config.seed, optimizers) if optimizers else None
        self._scaler: Any = None
        if (scaling := config.loss_scaling) is not None:
            self._scaler = GradScaler(
                "cpu",
                init_scale=scaling.initial,
                growth_factor=scaling.growth_factor,
                backoff_factor=scaling.backoff_factor,
                growth_interval=scaling.growth_interval,
            )

    def scale(self, loss: Tensor) -> Tensor:
        """What to differentiate instead of `loss`."""
        if self._scaler is None:
            return loss
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def step(self, parameters: Iterable[nn.Parameter], number: int) -> bool:
        """Step all optimizers; whether they did.

        Args:
            parameters: all that are trained, in order.
            number: of the step, from 1.
        """
        parameters = list(parameters)
        has_gradients = any(parameter.grad is not None for parameter in parameters)
        scaler = self._scaler if has_gradients else None
        if scaler is not None:
            scaler.unscale_(self._together)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._max_norm)
        if self._together is None:
            return True
        before, self._together.number = self._together.steps, number
        if scaler is None:
            self._together.step()
        else:
            scaler.step(self._together)
            scaler.update()
        return self._together.steps > before


class _Together(torch.optim.Optimizer):
    """Several optimizers as one.

    Attributes:
        number: of the step that follows, from 1.
        steps: how many there were.
    """

    def __init__(self, seed: int, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        every = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
        super().__init__([{"params": group["params"]} for group in every], {})
        self._seed = seed
        self._optimizers = optimizers
        self.number = 1
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for stage, optimizer in self._optimizers.items():
            layers.seed_all(self._seed, "optimizer", self.number, stage)
            optimizer.step()
        self.steps += 1


class Replicas:
    """The replicas of one stage.

    Args:
        modules: the stage's layers.
        turns: which replica computes which bundle.
    """

    def __init__(self, modules: Iterable[nn.Module], turns: ReplicaAssignment) -> None:
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


class ReferenceTies:
    """The tied parameters of a model.

    Args:
        tied: the config's.
        parameters: all, by their names in the unsplit model.
    """

    def __init__(
        self, tied: Sequence[Sequence[str]], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        self._groups = [[parameters[name] for name in names] for names in tied]
        self.follow()

    def sum(self) -> None:
        """Let the first of each group have all of its gradients."""
        for first, *others in self._groups:
            for other in others:
                if other.grad is not None:
                    first.grad = other.grad if first.grad is None else first.grad + other.grad
                other.grad = None

    def follow(self) -> None:
        """Let all have the first one's value."""
        with torch.no_grad():
            for first, *others in self._groups:
                for other in others:
                    other.copy_(first)
