"""Results of evaluations: means over samples, and metrics with a state.

Metrics with a state, such as torchmetrics metrics, get the whole evaluation:

    sink ──outputs of a micro-batch──> update(outputs, targets), in order ──> compute() at the end

An F1 score or an area under a curve is not a mean over micro-batches, so it needs all of them in
one place. That place is the driver: it usually has the targets already, and otherwise gets them
with the outputs, so the result does not depend on how the model is split.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory
from rpcmp.errors import ConfigError, FactoryError, JobError
from rpcmp.metrics import METHODS, keeps_state
from rpcmp.pipelining import microbatches, pytree


@dataclass(frozen=True)
class Evaluation:
    """The results of an evaluation.

    Attributes:
        num_samples: the number of samples.
        loss: the mean loss.
        metrics: by name, the mean over the samples; for a metric with a state, the result of its
            `compute`, under "name.key" for each key if that is a dict.
        weight: what the loss is a mean over, by the config's `loss_weight`; None: samples.
    """

    num_samples: int
    loss: float
    metrics: dict[str, float] = field(default_factory=dict)
    weight: float | None = None


def mean(parts: Iterable[Evaluation]) -> Evaluation:
    """Combine parts of an evaluation, each weighted by its number of samples.

    The losses are weighted by `weight`. Where all of that is zero there is no loss, which is NaN.
    """
    parts = list(parts)
    names = parts[0].metrics if parts else {}
    samples = [part.num_samples for part in parts]
    metrics = {name: _mean(samples, [part.metrics[name] for part in parts]) for name in names}
    counted = [part.weight for part in parts if part.weight is not None]
    loss = _mean(counted or samples, [part.loss for part in parts])
    weight = microbatches.exact_sum(counted) if counted else None
    return Evaluation(sum(samples), loss, metrics, weight)


def _mean(weights: Sequence[float], values: Sequence[float]) -> float:
    total = microbatches.exact_sum(weights)
    if weights and not total:
        return math.nan
    pairs = zip(weights, values, strict=True)
    # A part without a weight may have no value either.
    return microbatches.exact_sum(weight / total * value for weight, value in pairs if weight)


class Metrics:
    """The metrics with a state of one job, by name; the driver computes them.

    They have methods as in torchmetrics: `update(outputs, targets)` adds a micro-batch, `compute()`
    returns a number or a dict of numbers for all of them, and `reset()` starts a new evaluation.
    """

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = metrics

    @classmethod
    def load(cls, config: Config) -> Self:
        """Create the metrics of a config that have a state.

        A metric that cannot be imported here is left to the sink: it may need packages that only
        the sink's host has.
        """
        created = {
            name: _create(source, f"metrics.{name}") for name, source in config.metrics.items()
        }
        metrics = {name: metric for name, metric in created.items() if metric is not None}
        for key, watched in config.decisive_metrics.items():
            _require(key, watched, config.metrics, metrics)
        return cls(metrics)

    @property
    def names(self) -> list[str]:
        return list(self._metrics)

    def reset(self) -> None:
        for name in self._metrics:
            self._call(name, "reset")

    def update(self, outputs: Any, targets: Any) -> None:
        for name in self._metrics:
            self._call(name, "update", outputs, targets)

    def compute(self) -> dict[str, float]:
        """Return all results, by "name", or by "name.key" for a metric that returns a dict."""
        results: dict[str, float] = {}
        for name in self._metrics:
            result = self._call(name, "compute")
            parts = [(name, result)]
            if isinstance(result, Mapping):
                parts = [(f"{name}.{key}", part) for key, part in result.items()]
            for key, part in parts:
                number = _number(key, part)
                if key in results:
                    raise FactoryError(f"two metrics are called {key!r}: rename metrics.{name}")
                results[key] = number
        return results

    def _call(self, name: str, method: str, *arguments: Any) -> Any:
        """Call a metric's method; raises JobError if that raised."""
        try:
            with torch.no_grad():
                return getattr(self._metrics[name], method)(*arguments)
        except Exception as error:
            types = ", ".join(pytree.describe(argument) for argument in arguments)
            raise JobError(
                f"metrics.{name} failed in {method}({types}): {importing.explain_error(error)}"
            ) from error


def _require(
    key: str, watched: str, sources: Mapping[str, Factory], metrics: Collection[str]
) -> None:
    """Check that a metric can have the result `watched`, which the config's `key` names.

    It cannot if that belongs to a metric that does not import here, or to a mean, without keys.
    """
    if watched in ("loss", *sources) or any(watched.startswith(f"{name}.") for name in metrics):
        return
    name = next(name for name in sources if watched.startswith(f"{name}."))
    importing.resolve(sources[name].callable, f"metrics.{name}")
    raise ConfigError(f"{key} = {watched!r}: metrics.{name} is a mean, without keys")


def _create(source: Factory, what: str) -> Any:
    """Return a metric with a state; None for any other metric."""
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
    return metric


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value)
    if isinstance(value, numbers.Real):  # also numpy's
        return float(value)
    raise FactoryError(
        f"metrics.{name}: compute() gave {pytree.describe(value)}; it has to give one number, or a "
        "dict of numbers"
    )
