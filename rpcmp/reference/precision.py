"""Mixed precision as a plain loop has it: `torch.autocast`, and `torch.amp.GradScaler` itself.

GradScaler skips the step of the one optimizer whose gradients are not finite. There is one
optimizer a stage here, and none may step where any must not; so all of them are shown to it as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from rpcmp import seeds
from rpcmp.config import Config


def autocast(config: Config, stage_index: int) -> AbstractContextManager[object]:
    """What one layer of a stage is called under; a region of its own for each call."""
    dtype = config.autocast_of(stage_index)
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, dtype))


class Steps:
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
            seeds.seed_all(self._seed, "optimizer", self.number, stage)
            optimizer.step()
        self.steps += 1
