"""What a second forward shows that the first one has kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy.random
import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import ConfigError
from rpcmp.worker.checks.second_forward import (
    Trial,
    TrialState,
    other_samples,
    require_nothing_carried,
    require_repeatable,
    require_unmoved,
    tried,
)
from rpcmp.worker.checks.training_check import quiet
from tests.zoo.computing import PARTS, Computing, failing, forward_of, state_of

Compute = Callable[[Any, Tensor], Any]
FILLED: dict[Any, Any] = {}


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    FILLED.clear()
    yield
    FILLED.clear()


def trial_of(compute: Compute, *inputs: list[Any]) -> Trial | None:
    """Try a module, which is as it was before afterwards."""
    module = Computing(compute)
    state = TrialState(state_of(module), dict(module.named_parameters()))
    before = state.copy()
    with quiet(module.modules()):
        candidates = [(PARTS[0], PARTS[1]), *(inputs and [inputs])]
        trial = tried(forward_of(module), candidates, state, before)
    assert not [each.place.name for each in before if each.has_new_value]
    assert module.norm.training
    return trial


def shown(compute: Compute) -> Trial:
    trial = trial_of(compute)
    assert trial is not None
    return trial


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


def shrinking(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.inner.weight.mul_(0.5)
    return self.inner(x)


def pruning_in_its_second_call(self: Any, x: Tensor) -> Any:
    self.calls += 1
    if self.calls == 2:
        self.inner.weight.data.round_()
    return self.inner(x)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (centered, "layer.mean"),
        (annealed, "layer.calls"),
        (shrinking, "inner.weight"),
        (pruning_in_its_second_call, "layer.calls"),
    ],
)
def test_what_moves_with_each_forward_is_refused_and_put_back(compute: Compute, name: str) -> None:
    trial = shown(compute)
    assert trial.repeats
    with pytest.raises(ConfigError, match=rf"changes {name} each time, so once per micro-batch"):
        require_unmoved(trial)


@pytest.mark.parametrize("compute", [noted, lambda self, x: self.dropout(self.norm(x))])
def test_notes_generators_and_batch_normalization_may_move(
    compute: Compute, caplog: pytest.LogCaptureFixture
) -> None:
    trial = shown(compute)
    assert trial.repeats
    assert not trial.moved
    assert not trial.carried
    require_unmoved(trial)
    assert not caplog.text


def test_a_forward_that_fails_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert trial_of(failing) is None
    assert "a forward of a sample or two fails (ValueError: not so few samples)" in caplog.text


def logged(self: Computing, x: Tensor) -> Tensor:
    self.notes.append(float(x.detach().norm()))
    return x


@pytest.mark.parametrize(("compute", "name"), [(counted, "calls"), (logged, "notes")])
def test_numbers_of_which_nothing_comes_are_a_warning(
    compute: Compute, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    trial = shown(compute)
    assert not trial.matters
    require_unmoved(trial)
    assert f"the forward changes layer.{name} each time" in caplog.text


SCALES = itertools.cycle([1.0, 0.5])
UNSEEDED = numpy.random.Generator(numpy.random.PCG64())


def unseeded(self: Computing, x: Tensor) -> Tensor:
    return x * float(numpy.random.default_rng().random())


def numbered_by(values: Any) -> Compute:
    def compute(self: Any, x: Tensor) -> Any:
        return self.inner(x), (x * next(values)).long()

    return compute


def masked(self: Computing, x: Tensor) -> Tensor:
    return torch.cat([x * next(SCALES), torch.full((len(x), 1), -torch.inf)], 1)


@pytest.mark.parametrize(
    "compute",
    [
        lambda self, x: x * next(SCALES),
        numbered_by(number for number in range(99)),
        unseeded,
        masked,
        lambda self, x: torch.where(x > 0, x, next(itertools.cycle([0.0]))) * next(SCALES),
        lambda self, x: (x * next(SCALES)).to_sparse(),
        lambda self, x: torch.complex(x, x * next(SCALES)),
        lambda self, x: torch.quantize_per_tensor(x * next(SCALES), 0.1, 0, torch.qint8),
    ],
    ids=["cycle", "generator", "unseeded", "inf", "where", "sparse", "complex", "quantized"],
)
def test_what_gives_something_else_each_time_is_refused(compute: Compute) -> None:
    trial = shown(compute)
    assert not trial.repeats
    with pytest.raises(ConfigError, match="something else the second time"):
        require_repeatable(trial)


def cached(self: Computing, x: Tensor) -> Tensor:
    if len(x) not in FILLED:
        FILLED[len(x)] = torch.randn(len(x), 4)
    table: Tensor = FILLED[len(x)]
    return x * table


@pytest.mark.parametrize(
    "compute",
    [
        annealed,
        centered,
        cached,
        lambda self, x: x * self.generator.random(),
        lambda self, x: x * UNSEEDED.random(),
        lambda self, x: self.dropout(self.norm(x.to(torch.bfloat16).float())),
        lambda self, x: torch.cat([x, torch.full((len(x), 1), -torch.inf)], 1),
        lambda self, x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged),
        lambda self, x: torch.empty(len(x), device="meta"),
    ],
)
def test_what_can_be_put_back_repeats(compute: Compute) -> None:
    require_repeatable(shown(compute))


def test_where_few_samples_fail_the_whole_micro_batch_is_tried() -> None:
    def of_three(self: Computing, x: Tensor) -> Tensor:
        if len(x) < 3:
            raise ValueError("not so few samples")
        return x * next(SCALES)

    whole = [torch.ones(4, 4)]
    trial = trial_of(of_three, whole, other_samples(whole))
    assert trial is not None
    assert not trial.repeats


def test_devices_that_compute_in_any_order_are_told(caplog: pytest.LogCaptureFixture) -> None:
    require_repeatable(Trial({}, repeats=False, is_on_host=False))
    assert "something else the second time" in caplog.text


def act_norm(self: Any, x: Tensor) -> Any:
    if not self.notes[0]:
        self.notes = [1.0]
        with torch.no_grad():
            self.inner.bias.copy_(-x.mean(0))
    return self.inner(x)


def act_norm_without_a_flag(self: Any, x: Tensor) -> Any:
    if self.inner.bias.abs().sum() < 4:
        with torch.no_grad():
            self.inner.bias.copy_(9 - x.mean(0))
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
    [
        (act_norm, "inner.bias"),
        (act_norm_without_a_flag, "inner.bias"),
        (first_mean, "layer.mean"),
        (first_scale, "layer.scale"),
    ],
)
def test_what_is_taken_from_the_first_samples_is_refused(compute: Compute, name: str) -> None:
    trial = shown(compute)
    assert trial.repeats
    assert not trial.moved
    with pytest.raises(ConfigError, match=f"the first forward sets {name} from its samples"):
        require_nothing_carried(trial)


def positioned(self: Any, x: Tensor) -> Any:
    if not self.mean.any():
        self.mean.copy_(torch.arange(4.0))
    return x + self.mean


def at_most(self: Any, x: Tensor) -> Any:
    self.notes = [max(*self.notes, float(x.abs().max()))]
    return x


def orthogonal(self: Any, x: Tensor) -> Any:
    if not self.notes[0]:
        self.notes = [1.0]
        nn.init.orthogonal_(self.inner.weight)
    return self.inner(x)


def drawn_once(self: Any, x: Tensor) -> Any:
    if not self.mean.any():
        self.mean.copy_(torch.randn(4))
    return x + self.mean + torch.randn(4)


@pytest.mark.parametrize(
    "compute", [cached, noted, positioned, at_most, orthogonal, drawn_once, annealed]
)
def test_what_is_filled_in_from_no_samples_passes(compute: Compute) -> None:
    require_nothing_carried(shown(compute))


def test_one_sample_has_another_one_of_its_kind() -> None:
    images, tokens = other_samples([torch.ones(1, 2), torch.tensor([[1, 2, 3]])])
    assert torch.equal(images, torch.full((1, 2), 1.5))
    assert torch.equal(tokens, torch.tensor([[3, 2, 1]]))
