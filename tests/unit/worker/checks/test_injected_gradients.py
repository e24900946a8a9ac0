"""What a Function adds to gradients is a sum over samples, or is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError
from rpcmp.worker.checks.injected_gradients import require_one_addition
from rpcmp.worker.state.forward_state import ForwardState
from tests.zoo.surprises import Injecting, Scaled


def checked(loss: Callable[[Tensor], Tensor] | None, drop: float = 0.0, bare: bool = False) -> None:
    """Check a layer whose outputs have an auxiliary loss; without one, their gradient is scaled."""
    torch.manual_seed(0)
    layer, dropout, norm = nn.Linear(4, 4), nn.Dropout(drop), nn.BatchNorm1d(4)
    layer.bias.grad = torch.ones(4)

    def forward(inputs: list[Any]) -> Tensor:
        torch.manual_seed(0)  # as before each layer
        x, scale = inputs
        y = dropout(layer(x.mul_(2))) * scale
        norm(y)
        found: Tensor = Scaled.apply(y) if loss is None else Injecting.apply(y, loss(y))
        return found

    scale = torch.ones((), requires_grad=True)
    parts = [[torch.randn(3, 4, requires_grad=True), scale] for _ in range(2)]
    assert norm.running_mean is not None
    before = norm.running_mean.clone()
    parameters = [] if bare else [*layer.parameters()]
    try:
        require_one_addition(["F"], forward, parts, parameters, ForwardState([("", norm)]))
    finally:
        assert torch.equal(norm.running_mean, before)
        assert layer.weight.grad is None
        assert layer.bias.grad.equal(torch.ones(4))


def test_a_derivative_adds_nothing() -> None:
    checked(None)


@pytest.mark.parametrize("bare", [True, False])
def test_a_sum_over_samples_passes(bare: bool) -> None:
    checked(lambda y: y.sum() * 0.5, bare=bare)


@pytest.mark.parametrize("bare", [True, False])
@pytest.mark.parametrize("drop", [0.0, 0.1])
def test_a_mean_is_refused(drop: float, bare: bool) -> None:
    with pytest.raises(ConfigError, match=r"^F adds a gradient of its own in each micro-batch"):
        checked(lambda y: y.sum(1).mean(), drop=drop, bare=bare)


def test_what_a_backward_adds_by_itself_counts_and_is_removed() -> None:
    class Recomputing(torch.autograd.Function):
        """As checkpoints of other libraries, whose gradients arrive without being asked for."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            return x * weight.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            x, weight = ctx.saved_tensors
            with torch.enable_grad():
                (x.detach() * kept).mean().backward()
            return gradient * weight, None

    kept = nn.Parameter(torch.ones(4))
    parts = [[torch.randn(3, 4) + 5] for _ in range(2)]
    with pytest.raises(ConfigError, match="adds a gradient"):
        require_one_addition(
            ["F"],
            lambda inputs: Recomputing.apply(inputs[0], kept),
            parts,
            [kept],
            ForwardState([]),
        )
    assert kept.grad is None


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (lambda x: Injecting.apply(x, x.reshape(6, 4).mean()), "invalid for input of size"),
        (lambda x: Injecting.apply(x, (x * torch.rand(1).item()).sum()), "from call to call"),
    ],
)
def test_what_cannot_be_compared_is_told(
    forward: Callable[[Tensor], Tensor], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [[torch.ones(3, 4, requires_grad=True)] for _ in range(2)]
    draws = itertools.count(0.1, 0.3)
    monkeypatch.setattr(torch, "rand", lambda *_: torch.full((1,), next(draws)))
    with pytest.warns(UserWarning, match=reason):
        require_one_addition(["F"], lambda inputs: forward(inputs[0]), parts, [], ForwardState([]))
