"""A layer that computes as it is told, with everything at hand that a forward may keep or draw."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rpcmp.worker.state.forward_state import ForwardState

DRAWN = torch.Generator().manual_seed(0)
PARTS = [[torch.randn(count, 4, generator=DRAWN)] for count in (2, 3)]


class Computing(nn.Module):
    """Computes its outputs by a function of itself and an input."""

    def __init__(self, compute: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.compute = compute
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.notes = 0, [0.0]
        self.generator = random.Random(1)
        self.norm, self.dropout = nn.BatchNorm1d(4), nn.Dropout()

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


def forward_of(module: Computing) -> Callable[[list[Any], bool], Any]:
    def forward(inputs: list[Any], draws_others: bool) -> Any:
        torch.manual_seed(int(draws_others))
        return module(*inputs)

    return forward


def state_of(module: Computing) -> ForwardState:
    return ForwardState([("layer.", module)])


def failing(self: Computing, x: Tensor) -> Tensor:
    raise ValueError("not so few samples")
