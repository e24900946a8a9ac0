"""What a second forward shows that the first one has kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy.random
import pytest
import torch
from torch import Tensor

from rpcmp.errors import ConfigError
from rpcmp.worker.checks.second_forward import (
    DataDependentInit,
    require_repeatable,
    require_unmoved,
)
from rpcmp.worker.checks.training_check import quiet
from tests.zoo.computing import PARTS, Computing, failing, forward_of, state_of, watch_of


def unmoved(compute: Callable[[Any, Tensor], Any]) -> Computing:
    module = Computing(compute)

    with quiet(module.modules()):
        require_unmoved(forward_of(module), PARTS[0], state_of(module), watch_of(module))
    return module


def centered(self: Any, x: Tensor) -> Any:
    self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x - self.mean


def counted(self: Computing, x: Tensor) -> Tensor:
    self.calls += 1
    return x


def annealed(self: Computing, x: Tensor) -> Tensor:
    self.calls += 1
    return x * self.calls


def noted(self: Computing, x: Tensor) -> Tensor:
    self.notes = [float(x.sum())]
    self.generator.random()
    return x


def normalizing_itself(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.inner.weight.mul_(1.0)
    return self.inner(x)


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


def repeatable(compute: Callable[[Any, Tensor], Any]) -> Computing:
    module = Computing(compute)
    forward = forward_of(module)
    with quiet(module.modules()):
        forward(PARTS[1], False)
        require_repeatable(forward, PARTS, state_of(module))
    return module


SCALES = itertools.cycle([1.0, 0.5])
UNSEEDED = numpy.random.Generator(numpy.random.PCG64())
FILLED: dict[int, Tensor] = {}


def unseeded(self: Computing, x: Tensor) -> Tensor:
    return x * float(numpy.random.default_rng().random())


def numbered_by(values: Any) -> Callable[[Any, Tensor], Any]:
    def compute(self: Any, x: Tensor) -> Any:
        return self.inner(x), (x * next(values)).long() if x.sum() else x

    return compute


@pytest.mark.parametrize(
    "compute",
    [
        lambda self, x: x * next(SCALES),
        numbered_by(number for number in range(9)),
        unseeded,
    ],
    ids=["cycle", "generator", "unseeded"],
)
def test_what_gives_something_else_each_time_is_refused(
    compute: Callable[[Any, Tensor], Any],
) -> None:
    with pytest.raises(ConfigError, match="something else the second time"):
        repeatable(compute)


def cached(self: Computing, x: Tensor) -> Tensor:
    if len(x) not in FILLED:
        FILLED[len(x)] = torch.randn(len(x), 4)
    return x * FILLED[len(x)]


def of_two(self: Computing, x: Tensor) -> Tensor:
    if len(x) < 3:
        raise ValueError("not so few samples")
    return x * torch.rand_like(x)


@pytest.mark.parametrize(
    "compute",
    [
        annealed,
        centered,
        cached,
        of_two,
        lambda self, x: x * self.generator.random(),
        lambda self, x: x * UNSEEDED.random(),
        lambda self, x: self.dropout(self.norm(x.to(torch.bfloat16).float())),
    ],
)
def test_what_can_be_put_back_passes(compute: Callable[[Any, Tensor], Any]) -> None:
    module = repeatable(compute)
    assert module.calls == int(compute is annealed)
    assert module.norm.training


def test_devices_that_compute_in_any_order_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = Computing(lambda self, x: torch.empty(len(x), 4, device="meta"))
    monkeypatch.setattr("rpcmp.worker.checks.second_forward._are_same", lambda *_: False)
    require_repeatable(forward_of(module), PARTS, state_of(module))
    assert "something else the second time" in caplog.text


def initialized(compute: Callable[[Any, Tensor], Any]) -> Computing:
    module = Computing(compute)
    forward = forward_of(module)
    with quiet(module.modules()):
        init = DataDependentInit(state_of(module), watch_of(module)())
        forward(PARTS[1], False)
        init.require_none(forward, PARTS[0])
    return module


def act_norm(self: Any, x: Tensor) -> Any:
    if not self.notes[0]:
        self.notes = [1.0]
        with torch.no_grad():
            self.inner.bias.copy_(-x.mean(0))
    return self.inner(x)


def first_mean(self: Any, x: Tensor) -> Any:
    if not self.mean.any():
        self.mean.copy_(x.mean(0))
    return x - self.mean


def first_scale(self: Any, x: Tensor) -> Any:
    if not hasattr(self, "scale"):
        self.scale = float(x.std())
    return x / self.scale


@pytest.mark.parametrize(
    ("compute", "name"),
    [(act_norm, "inner.bias"), (first_mean, "layer.mean"), (first_scale, "layer.scale")],
)
def test_what_is_taken_from_the_first_samples_is_refused(
    compute: Callable[[Any, Tensor], Any], name: str
) -> None:
    with pytest.raises(ConfigError, match=f"the first forward sets {name} from its samples"):
        initialized(compute)


def positioned(self: Any, x: Tensor) -> Any:
    if not self.mean.any():
        self.mean.copy_(torch.arange(4.0))
    return x + self.mean


@pytest.mark.parametrize("compute", [annealed, cached, centered, noted, positioned])
def test_what_is_filled_in_from_no_samples_passes(compute: Callable[[Any, Tensor], Any]) -> None:
    module = initialized(compute)
    assert module.calls == int(compute is annealed)
