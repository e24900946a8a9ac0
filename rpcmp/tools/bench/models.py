"""Models and data of the frozen cases.

`sleeping` measures scheduling alone: each action of a stage sleeps, without the GIL, on tensors of
a few bytes. A stage is one layer, or two that sleep half as long each. Both have the same
parameters, so the losses are the same.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.tools.bench.cases import action_times
from rpcmp.worker.weight_grad import splittable

Layers = list[tuple[str, Callable[[], nn.Module]]]

ROWS_PER_STAGE = 2
"""Rows of weights of a sleeping stage, divided among its layers."""

_PR_SET_TIMERSLACK = 29
_local = threading.local()


def sleep(seconds: float) -> None:
    """Sleep with an error of some 10 us; by default Linux may add 50 us to every sleep."""
    if sys.platform == "linux" and not getattr(_local, "is_exact", False):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        _local.is_exact = True
    time.sleep(seconds)


class _SleepInput(torch.autograd.Function):
    """The identity; its backward is the layer's input gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.seconds)
        return gradients[0], None


class _SleepWeight(torch.autograd.Function):
    """The sum of the rows; its backward is the layer's weight gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds, ctx.num_rows = seconds, weight.shape[0]
        return weight.sum(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        sleep(ctx.seconds)
        return gradients[0].repeat(ctx.num_rows, 1), None


@splittable
def apply_sleep(x: Tensor, weight: Tensor, times: ActionTimes) -> Tensor:
    """Return `x + weight.sum(0)`; each of its three actions sleeps.

    The two gradients are nodes of their own, so that a split backward finds them apart.

    Args:
        x: float32[samples, features].
        weight: float32[rows, features], a leaf.
    """
    sleep(times.forward)
    y: Tensor = _SleepInput.apply(x, times.backward)
    offset: Tensor = _SleepWeight.apply(weight, times.weight)
    return y + offset


class Sleep(nn.Module):
    """A layer that sleeps; float32[samples, features] in and out."""

    def __init__(self, times: ActionTimes, num_rows: int, features: int) -> None:
        super().__init__()
        self.times = times
        self.weight = nn.Parameter(torch.zeros(num_rows, features))

    def forward(self, x: Tensor) -> Tensor:
        if not x.requires_grad:
            # The model's first layer: its input gradient is to take time as well.
            x = x.detach().requires_grad_()
        return apply_sleep(x, self.weight, self.times)


def sleeping(
    num_stages: int, times_ms: Mapping[str, float], layers_per_stage: int = 1, features: int = 8
) -> Layers:
    """Return layers that sleep `times_ms` milliseconds per stage, however many layers it has.

    Args:
        num_stages: of the run; the model grows with it.
        times_ms: a stage's "forward", "input_gradient" and "weight_gradient".
        layers_per_stage: 1, or 2 to cut each stage in two, with the same work and parameters.
    """
    times = action_times(times_ms).scaled(1 / layers_per_stage)
    rows = ROWS_PER_STAGE // layers_per_stage
    names = [f"sleep{index}" for index in range(num_stages * layers_per_stage)]
    return [(name, lambda: Sleep(times, rows, features)) for name in names]


def transformer(num_layers: int, features: int, heads: int, hidden: int) -> Layers:
    """Return transformer encoder layers without dropout; float32[samples, length, features]."""

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(features, heads, hidden, dropout=0.0, batch_first=True)

    return [(f"layer{index}", layer) for index in range(num_layers)]


class Wide(nn.Module):
    """Little compute, large outputs: float32[samples, 1 or width] to [samples, width or 1].

    Args:
        narrow: return the mean of each sample's numbers, as the model's last layer does.
    """

    def __init__(self, width: int, narrow: bool) -> None:
        super().__init__()
        self.narrow = narrow
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return y.mean(1, keepdim=True) if self.narrow else y


def wide(num_stages: int, width: int) -> Layers:
    """Return two layers per stage, with `width` numbers per sample between any two of them."""
    last = 2 * num_stages - 1
    return [
        (f"wide{index}", lambda narrow=index == last: Wide(width, narrow))  # type: ignore[misc]
        for index in range(last + 1)
    ]


def vectors(num_samples: int, features: int) -> TensorDataset:
    """Random float32[features] as inputs and as targets."""
    return _random(num_samples, features)


def sequences(num_samples: int, length: int, features: int) -> TensorDataset:
    """Random float32[length, features] as inputs and as targets."""
    return _random(num_samples, length, features)


def _random(*shape: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(*shape, generator=generator) for _ in range(2))
    return TensorDataset(inputs, targets)
