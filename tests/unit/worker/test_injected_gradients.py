"""What a Function adds to gradients is a sum over samples, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError
from rpcmp.worker.forward_state import ForwardState
from rpcmp.worker.injected_gradients import require_one_addition
from tests.zoo.surprises import Injecting, Scaled


def checked(loss: Callable[[Tensor], Tensor] | None, samples: int = 6, drop: float = 0.0) -> None:
    torch.manual_seed(0)
    layer, dropout = nn.Linear(4, 4), nn.Dropout(drop)
    norm = nn.BatchNorm1d(4)

    def forward(inputs: list[Any]) -> Tensor:
        y = norm(dropout(layer(inputs[0])))
        found: Tensor = Scaled.apply(y) if loss is None else Injecting.apply(y, loss(y))
        return found

    inputs = [torch.randn(samples, 4, requires_grad=True)]
    before = norm.running_mean.clone() if norm.running_mean is not None else torch.empty(0)
    state = ForwardState([("", norm)])
    try:
        require_one_addition(["F"], forward, inputs, samples, layer.parameters(), state)
    finally:
        assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]
        assert all(each.grad is None for each in (*inputs, *layer.parameters()))


def by_sample(y: Tensor) -> Tensor:
    return y.square().sum(1)


def test_a_derivative_adds_nothing() -> None:
    checked(None)


@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_a_mean_is_refused(drop: float) -> None:
    with pytest.raises(ConfigError, match=r"^F adds a gradient of its own in each micro-batch"):
        checked(lambda y: (y**2).mean() + y.mean(), drop=drop)


def test_a_single_sample_shows_nothing() -> None:
    checked(lambda y: y.mean(), samples=1)


def test_what_cannot_be_called_with_parts_is_let_pass() -> None:
    checked(lambda y: y.reshape(6, 4).mean())
