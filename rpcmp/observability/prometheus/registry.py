"""What is served: families of metrics, declared before there is any value, and their values.

Values are written where things happen and read when somebody scrapes, on another thread. What is
not known yet is not there, rather than 0.

Counters of things that begin again at zero: processes, and the connections between them.

process 1    0 ── 5 ── 9 |                  what is read
process 2                | 0 ── 3 ── 4
counter      0 ── 5 ── 9 ── 9 ── 12 ── 13   what is served
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Literal, NamedTuple

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

Value = float | Callable[[], float]
"""A number, or what gives it when it is asked for."""


class Family(NamedTuple):
    """Metrics with one name.

    Attributes:
        name: without the "_total" of a counter and the "_info" of an info.
        kind: a counter only ever grows; an info is constant, and all in its labels.
        help: what it is.
        labels: their names.
    """

    name: str
    kind: Literal["gauge", "counter", "info"]
    help: str
    labels: tuple[str, ...] = ()

    @property
    def sample(self) -> str:
        """The name that its samples have, and queries use."""
        return self.name + {"gauge": "", "counter": "_total", "info": "_info"}[self.kind]


class Store(Collector):
    """The values of some families; any thread may read and write them.

    Args:
        families: all that there can be.
    """

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = {family.name: family for family in families}
        self._values: dict[str, dict[tuple[str, ...], Value]] = {n: {} for n in self._families}
        self._lock = threading.Lock()

    def set(self, name: str, value: Value, *labels: str) -> None:
        """Let one metric have a value; of an info 1."""
        if len(labels) != len(self._families[name].labels):
            raise ValueError(f"{name} has the labels {self._families[name].labels}, not {labels}")
        with self._lock:
            self._values[name][labels] = value

    def add(self, name: str, amount: float, *labels: str) -> None:
        """Add to a counter, which begins at 0."""
        known = self._values[name].get(labels, 0.0)
        self.set(name, (known() if callable(known) else known) + amount, *labels)

    def forget(self, name: str) -> None:
        """Let a family have no values any more."""
        with self._lock:
            self._values[name].clear()

    def collect(self) -> Iterator[Metric]:
        """All families that have any values."""
        with self._lock:
            known = {name: dict(values) for name, values in self._values.items() if values}
        for name, values in known.items():
            yield _metric(self._families[name], values)


def _metric(family: Family, values: dict[tuple[str, ...], Value]) -> Metric:
    if family.kind == "info":
        info = InfoMetricFamily(family.name, family.help)
        for labels in values:
            info.add_metric([], dict(zip(family.labels, labels, strict=True)))
        return info
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric: CounterMetricFamily | GaugeMetricFamily
    metric = kind(family.name, family.help, labels=family.labels)
    for labels, value in values.items():
        metric.add_metric(labels, value() if callable(value) else value)
    return metric


class Tally:
    """Totals over all that has been counted; they never fall."""

    def __init__(self) -> None:
        self._before: defaultdict[Hashable, float] = defaultdict(float)
        self._last: dict[Hashable, tuple[object, float]] = {}

    def total(self, key: Hashable, source: object, count: float) -> float:
        """The total of `key`.

        Args:
            source: what is counted now, such as a process id; with another one it has begun anew.
            count: of that source, so far.
        """
        known, last = self._last.get(key, (source, 0.0))
        if known != source:
            self._before[key] += last
            last = 0.0
        self._last[key] = source, max(last, count)
        return self._before[key] + max(last, count)
