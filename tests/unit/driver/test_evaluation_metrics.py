"""Metrics with a state, which the driver computes: their loading, arguments and results.

Metrics from torchmetrics take seconds to import; tests/cluster/test_launch.py tests them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rpcmp.driver.evaluation import Metrics
from rpcmp.errors import ConfigError, FactoryError, JobError
from tests.support.graphs import chain_of


class Gives:
    """A metric that returns `result`, or raises a ValueError if `fails` is set."""

    def __init__(self, result: Any = 0.5, fails: str = "") -> None:
        self.result = result
        self.fails = fails
        self.seen: list[tuple[Any, Any]] = []

    def update(self, preds: Any, target: Any) -> None:
        if self.fails:
            raise ValueError(self.fails)
        self.seen.append((preds, target))

    def compute(self) -> Any:
        return self.result

    def reset(self) -> None:
        self.seen.clear()


class Unresettable:
    """A metric without `reset`."""

    def update(self, preds: Any, target: Any) -> None: ...
    def compute(self) -> float:
        return 0.0


class Narrow(Gives):
    """A metric whose `update` takes no targets."""

    def update(self, preds: Any) -> None:  # type: ignore[override]
        ...


class Callable:
    """A callable instance without a state, which the sink computes."""

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).mean()


class F1:
    """The mean F1 score of the classes, which is not a mean over samples."""

    def __init__(self, num_classes: int) -> None:
        self._matches = torch.zeros(3, num_classes)

    def update(self, preds: Tensor, target: Tensor) -> None:
        classes = torch.arange(self._matches.shape[1])
        found, true = preds.argmax(dim=1)[:, None] == classes, target[:, None] == classes
        self._matches += torch.stack([(found & true).sum(0), found.sum(0), true.sum(0)])

    def compute(self) -> Tensor:
        both, found, true = self._matches
        mean: Tensor = (2 * both / (found + true)).mean()
        return mean

    def reset(self) -> None:
        self._matches.zero_()


class Ready(Gives):
    """A metric with a state that can also be called, as in torchmetrics."""

    def __call__(self, preds: Any, target: Any) -> Any:
        return self.result


READY = Ready()


def load(more: dict[str, Any] | None = None, **metrics: Any) -> Metrics:
    """Return the driver's metrics of a config; a string names a callable of this module."""
    named = {
        name: f"tests.unit.driver.test_evaluation_metrics:{metric}"
        if isinstance(metric, str)
        else metric
        for name, metric in metrics.items()
    }
    data = {"train": "m:train", "test": "m:test"}
    return Metrics.load(chain_of(2, data=data, metrics=named, **(more or {})))


def gives(result: Any) -> dict[str, float]:
    return Metrics({"m": Gives(result)}).compute()


def test_driver_computes_only_metrics_with_a_state() -> None:
    found = load(
        one="Gives",
        function={"callable": "rpcmp.metrics:accuracy"},
        instance="Callable",
        away={"callable": "no_such_module_here:F1"},  # perhaps at the sink
        made="READY",
    )
    assert found.names == ["one", "made"]


def test_metric_instance_takes_no_arguments() -> None:
    assert load(m="READY").names == ["m"]
    ready = "tests.unit.driver.test_evaluation_metrics:READY"
    with pytest.raises(FactoryError, match="is made already: it takes no kwargs"):
        load(m={"callable": ready, "kwargs": {"num_classes": 3}})


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("Unresettable", "has no reset: a metric has update"),
        ("Narrow", r"its update does not take \(outputs, targets\): too many positional"),
        ("Gievs", "has no attribute 'Gievs'"),
        (
            "F1",
            r"metrics\.m = .* failed: TypeError: .*num_classes",
        ),
    ],
)
def test_load_refuses_objects_that_are_not_metrics(metric: Any, message: str) -> None:
    with pytest.raises(FactoryError, match=message):
        load(m=metric)


def test_load_refuses_to_watch_a_key_of_a_mean() -> None:
    watched = {"early_stopping": {"metric": "m.f1"}}
    assert load(watched, m="Gives").names == ["m"]
    with pytest.raises(
        ConfigError, match=r"early_stopping\.metric = 'm\.f1': metrics\.m is a mean"
    ):
        load(watched, m={"callable": "rpcmp.metrics:accuracy"})
    with pytest.raises(FactoryError, match=r"metrics\.m = .* does not import: Mod"):
        load(watched, m={"callable": "no_such_module_here:F1"})


def test_compute_accepts_numbers_and_dicts_of_numbers() -> None:
    assert gives(3) == {"m": 3.0}
    assert gives(torch.tensor(0.25, dtype=torch.bfloat16)) == {"m": 0.25}
    assert gives(torch.tensor([2])) == {"m": 2.0}
    assert gives(np.float32(0.5)) == {"m": 0.5}
    assert gives({"f1": torch.tensor(0.5), 3: True}) == {"m.f1": 0.5, "m.3": 1.0}


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            torch.zeros(2, 2),
            r"metrics\.m: compute\(\) gave float32\[2, 2\]; it has to give one num",
        ),
        ({"f1": "high"}, r"metrics\.m\.f1: compute\(\) gave str; "),
        ({"a": {"b": 1.0}}, r"metrics\.m\.a: compute\(\) gave \{'b': float\}; "),
        (None, r"compute\(\) gave NoneType"),
        (torch.tensor(1j), r"compute\(\) gave complex64"),
        ({1: 0.0, "1": 1.0}, r"two metrics are called 'm\.1'"),
    ],
)
def test_compute_refuses_other_results(result: Any, message: str) -> None:
    with pytest.raises(FactoryError, match=message):
        gives(result)


def test_error_names_a_metric_that_raises_and_its_arguments() -> None:
    metrics = Metrics({"m": Gives(fails="three classes?")})
    with pytest.raises(JobError) as raised:
        metrics.update({"a": torch.zeros(2, 3)}, torch.zeros(2))
    first, *_ = str(raised.value).splitlines()
    assert first == (
        "metrics.m failed in update({'a': float32[2, 3]}, float32[2]): ValueError: three classes?"
    )
    assert Path(__file__).name in str(raised.value)


def test_f1_over_micro_batches_equals_f1_of_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(50, 3, generator=generator)
    targets = torch.randint(0, 3, (50,), generator=generator)
    metrics = load(
        f1={
            "callable": "tests.unit.driver.test_evaluation_metrics:F1",
            "kwargs": {"num_classes": 3},
        }
    )
    whole = F1(num_classes=3)
    whole.update(outputs, targets)
    for _ in range(2):
        metrics.reset()
        for first in range(0, 50, 7):
            metrics.update(outputs[first : first + 7], targets[first : first + 7])
        assert metrics.compute() == {"f1": float(whole.compute())}
