"""Samples are tried together and one by one: what depends on others is told from what draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rpcmp.config.loader import parse_config
from rpcmp.data.batches import Loaded
from rpcmp.driver.sample_check import Predict, require_independent
from rpcmp.errors import ConfigError, StageError

CONFIG = parse_config(
    {
        "loss": "torch.nn:MSELoss",
        "model": {"layers": "m:layers"},
        "data": {"train": "m:train", "batch_size": 4},
    }
)


def predicting(compute: Callable[[Tensor], Tensor]) -> Predict:
    """Return outputs micro-batch by micro-batch, with random numbers that the step decides."""

    def predict(inputs: Any, count: int, step: int) -> list[Any]:
        torch.manual_seed(step)
        return [compute(part) for part in inputs.chunk(count)]

    return predict


def check(compute: Callable[[Tensor], Tensor]) -> None:
    batch = Loaded(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    with torch.random.fork_rng():
        require_independent(CONFIG, batch, predicting(compute))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x * 2,
        lambda x: x * (1 + torch.rand(x.shape)),  # draws in evaluations, too
        lambda x: x.sum(),  # no output of samples
    ],
)
def test_what_is_computed_of_each_sample_passes(compute: Callable[[Tensor], Tensor]) -> None:
    check(compute)


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (lambda x: x - x.mean(0), "of two samples computed together is up to"),
        (lambda x: x.mT, "has the shape"),
    ],
)
def test_what_depends_on_other_samples_is_refused(
    compute: Callable[[Tensor], Tensor], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        check(compute)


def test_what_is_carried_on_is_no_random_number() -> None:
    kept = [torch.zeros(3)]

    def carries(x: Tensor) -> Tensor:
        y = x + kept[-1]
        kept.append(x.mean(0))
        return y

    with pytest.raises(ConfigError, match="computed together"):
        check(carries)


def test_a_difference_of_one_pair_alone_is_a_decision_by_the_last_bit() -> None:
    calls = []

    def once(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x + (1.0 if len(calls) == 1 else 0.0)

    check(once)


def test_what_cannot_do_with_single_samples_is_let_pass() -> None:
    def fails(x: Tensor) -> Tensor:
        raise StageError("a", "forward", "ValueError: two samples at least")

    check(fails)
