"""The metrics that keep a state, as those of torchmetrics do, over a whole evaluation.

    sink ──outputs of a micro-batch──> update(outputs, targets), in order ──> compute() at the end

An F1 or an area under a curve is no mean of what it is for micro-batches, so it needs all of them
in one place. That place is the driver, which mostly has the targets already, and else gets them
with the outputs; what the model is cut into makes no difference.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, cast

import torch
from torch import Tensor

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory
from rpcmp.errors import ConfigError, FactoryError, JobError
from rpcmp.metrics import METHODS, keeps_state
from rpcmp.pipelining import pytree


class Metric(Protocol):
    """What torchmetrics' have, and one's own need."""

    def update(self, preds: Any, target: Any) -> object:
        """Take in one micro-batch: the model's outputs, and the targets."""

    def compute(self) -> Any:
        """What came of all that was taken in: a number, or a dict of numbers."""

    def reset(self) -> object:
        """Forget it."""


class Metrics:
    """The metrics of one job that its driver computes.

    Args:
        metrics: by name.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = dict(metrics)

    @classmethod
    def load(cls, config: Config) -> Self:
        """Those of a job.

        Whatever cannot be imported here is left to the sink: functions may need packages that only
        its host has.

        Raises:
            FactoryError: one cannot be made, or lacks a method.
            ConfigError: something is decided by a key that none of them can have.
        """
        made = {name: _make(source, f"metrics.{name}") for name, source in config.metrics.items()}
        metrics = {name: metric for name, metric in made.items() if metric is not None}
        for key, watched in config.watched.items():
            _require(key, watched, config.metrics, metrics)
        return cls(metrics)

    @property
    def names(self) -> list[str]:
        """Their names; empty: the driver has none to compute."""
        return list(self._metrics)

    def reset(self) -> None:
        """Forget what was evaluated before.

        Raises:
            JobError: a metric raised.
        """
        for name, metric in self._metrics.items():
            _call(name, "reset", metric.reset)

    def update(self, outputs: Any, targets: Any) -> None:
        """Take in a micro-batch, the next in order.

        Raises:
            JobError: a metric raised.
        """
        for name, metric in self._metrics.items():
            _call(name, "update", metric.update, outputs, targets)

    def compute(self) -> dict[str, float]:
        """What came of all of them, by "name", or by "name.key" where that is a dict.

        Raises:
            JobError: a metric raised.
            FactoryError: it gave something else than numbers, or a name is taken twice.
        """
        found: dict[str, float] = {}
        for name, metric in self._metrics.items():
            for key, value in _named(name, _call(name, "compute", metric.compute)):
                if key in found:
                    raise FactoryError(f"two metrics are called {key!r}: rename metrics.{name}")
                found[key] = value
        return found


def _require(
    key: str, watched: str, sources: Mapping[str, Factory], metrics: Mapping[str, Metric]
) -> None:
    """Fail where something is decided by a key that no metric can have.

    Raises:
        FactoryError: it would have to be of a metric that does not import here.
        ConfigError: or of a mean.
    """
    if watched in ("loss", *sources) or any(watched.startswith(f"{name}.") for name in metrics):
        return
    name = next(name for name in sources if watched.startswith(f"{name}."))
    importing.resolve(sources[name].callable, f"metrics.{name}")
    raise ConfigError(f"{key} = {watched!r}: metrics.{name} is a mean, without keys")


def _make(source: Factory, what: str) -> Metric | None:
    """A metric with a state; None for any other kind.

    Raises:
        FactoryError: it cannot be made, or lacks a method.
    """
    try:
        target = importing.resolve(source.callable, what)
    except FactoryError as error:
        if isinstance(error.__cause__, ImportError):
            return None
        raise
    if not keeps_state(target):
        return None
    if source.kwargs and not isinstance(target, type):
        raise FactoryError(f"{what} = {source.callable!r} is made already: it takes no kwargs")
    metric: Any = importing.create(source, what) if isinstance(target, type) else target
    _check(metric, source, what)
    return cast(Metric, metric)


def _check(metric: Any, source: Factory, what: str) -> None:
    missing = [name for name in METHODS if not callable(getattr(metric, name, None))]
    if missing:
        raise FactoryError(
            f"{what} = {source.callable!r} has no {' and no '.join(missing)}: a metric has "
            "update(outputs, targets), compute() and reset(), or is a function of both"
        )
    try:
        inspect.signature(metric.update).bind(None, None)
    except ValueError:  # written in C
        pass
    except TypeError as error:
        raise FactoryError(
            f"{what} = {source.callable!r}: its update does not take (outputs, targets): {error}"
        ) from error


def _call(name: str, method: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        with torch.no_grad():
            return function(*arguments)
    except Exception as error:
        got = ", ".join(pytree.describe(argument) for argument in arguments)
        what = f"metrics.{name} failed in {method}({got}): {importing.explain_error(error)}"
        raise JobError(what) from error


def _named(name: str, value: Any) -> list[tuple[str, float]]:
    """A metric's results under their names.

    Raises:
        FactoryError: they are no numbers.
    """
    parts = (
        [(f"{name}.{key}", part) for key, part in value.items()]
        if isinstance(value, Mapping)
        else [(name, value)]
    )
    return [(key, _number(key, part)) for key, part in parts]


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, numbers.Real):  # also numpy's
        return float(value)
    raise FactoryError(
        f"metrics.{name}: compute() gave {pytree.describe(value)}; it has to give one number, or a "
        "dict of numbers"
    )
