"""What a forward in training computes or keeps of a micro-batch as if it were the mini-batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError
from rpcmp.worker.forward_state import ForwardState, ParameterWatch
from rpcmp.worker.training_check import (
    quiet,
    require_independent,
    require_linear_backward,
    require_unmoved,
)

DRAWN = torch.Generator().manual_seed(0)
PARTS = [[torch.randn(count, 4, generator=DRAWN)] for count in (2, 3)]


class Stage(nn.Module):
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


def forward_of(module: Stage) -> Callable[[list[Any], bool], Any]:
    def forward(inputs: list[Any], draws_others: bool) -> Any:
        torch.manual_seed(int(draws_others))
        return module(*inputs)

    return forward


def state_of(module: Stage) -> ForwardState:
    return ForwardState([("layer.", module)])


def unmoved(compute: Callable[[Any, Tensor], Any]) -> Stage:
    module = Stage(compute)

    def watch() -> ParameterWatch:
        return ParameterWatch(dict(module.named_parameters()))

    with quiet(module.modules()):
        require_unmoved(forward_of(module), PARTS[0], state_of(module), watch)
    return module


def centered(self: Any, x: Tensor) -> Any:
    self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - self.mean


def counted(self: Stage, x: Tensor) -> Tensor:
    self.calls += 1
    return x


def annealed(self: Stage, x: Tensor) -> Tensor:
    self.calls += 1
    return x * self.calls


def noted(self: Stage, x: Tensor) -> Tensor:
    self.notes = [float(x.sum())]
    self.generator.random()
    return x


def normalizing_itself(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.inner.weight.mul_(1.0)
    return self.inner(x)


def failing(self: Stage, x: Tensor) -> Tensor:
    raise ValueError("not so few samples")


@pytest.mark.parametrize(
    ("compute", "name"),
    [(centered, "layer.mean"), (annealed, "layer.calls"), (normalizing_itself, "inner.weight")],
)
def test_what_moves_with_each_forward_is_refused_and_put_back(
    compute: Callable[[Any, Tensor], Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"changes {name} each time, so once per micro-batch"):
        unmoved(compute)


@pytest.mark.parametrize(
    "compute",
    [noted, lambda self, x: self.dropout(self.norm(x)), failing],
)
def test_notes_generators_and_batch_normalization_may_move(
    compute: Callable[[Any, Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    module = unmoved(compute)
    assert module.notes == [0.0]
    assert module.norm.training
    assert "each time" not in caplog.text


def test_a_count_of_which_nothing_comes_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert unmoved(counted).calls == 0
    assert "the forward changes layer.calls each time" in caplog.text


def independent(compute: Callable[[Any, Tensor], Any]) -> None:
    module = Stage(compute)
    with quiet(module.modules()):
        require_independent(forward_of(module), PARTS, (2, 3), state_of(module))


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda self, x: x - x.mean(0), "output 0 of some samples computed together is up to"),
        (
            lambda self, x: (x, self.inner(x).pow(2).sum()),
            "output 1, which has no rows of samples,",
        ),
    ],
)
def test_outputs_that_depend_on_other_samples_are_refused(
    compute: Callable[[Any, Tensor], Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"in training, {reason}"):
        independent(compute)


@pytest.mark.parametrize(
    "compute",
    [
        lambda self, x: self.dropout(self.norm(x)),
        lambda self, x: x * torch.rand_like(x),  # draws
        lambda self, x: (self.inner(x), self.inner(x).pow(2).mean(), self.inner.weight.norm()),
        lambda self, x: (self.inner(x), x.std(), torch.arange(len(x)).sum(), torch.eye(3)),
        failing,
    ],
)
def test_what_is_computed_of_each_sample_passes(compute: Callable[[Any, Tensor], Any]) -> None:
    independent(compute)


def hooked(change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
    def compute(self: Any, x: Tensor) -> Any:
        y = self.inner(x)
        y.register_hook(change)
        return y

    return compute


@pytest.mark.parametrize(
    ("change", "is_linear"),
    [
        (lambda gradient: gradient * 2, True),
        (lambda gradient: gradient.clamp(-5, 5), True),  # of each sample
        (lambda gradient: gradient / gradient.norm(), False),
    ],
)
def test_gradients_of_samples_have_to_add_up(
    change: Callable[[Tensor], Tensor], is_linear: bool
) -> None:
    module = Stage(hooked(change))
    trained = [*module.inner.parameters()]

    def check() -> None:
        state = state_of(module)
        require_linear_backward(forward_of(module), PARTS, (2, 3), trained, state, "a hook")

    if is_linear:
        check()
    else:
        with pytest.raises(ConfigError, match="a hook: the gradients of samples in two micro-b"):
            check()
    assert all(each.grad is None for each in trained)
