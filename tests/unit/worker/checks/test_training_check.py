"""What a forward in training computes or keeps of a micro-batch as if it were the mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcmp.errors import ConfigError
from rpcmp.worker.checks.training_check import quiet, require_independent, require_linear_backward
from tests.zoo.computing import PARTS, Computing, failing, forward_of, state_of


def independent(compute: Callable[[Any, Tensor], Any]) -> None:
    module = Computing(compute)
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
    module = Computing(hooked(change))
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
