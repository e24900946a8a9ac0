"""Time limits and robust statistics of measured step times.

Runs one after the other share the load of the machine at that moment, so alternatives are compared
by the ratios within a round, never by their medians alone.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

CONFIDENCE = 0.95

LEAST_CONFIDENCE = 0.9
"""Least confidence of a conclusion; five rounds are the fewest that reach it."""

Progress = Callable[[str, float], None]
"""Called with the name of the current measurement, and the estimated seconds until the end."""

Item = TypeVar("Item")


class StoppedError(Exception):
    """The user has stopped the measurement, and wants the results so far."""


class OverBudgetError(StoppedError):
    """The budget is spent."""


class TimeLimits:
    """The budget of a measurement from its creation in an event loop on, and a stop by the user.

    Args:
        budget: seconds.
        stop: set to stop the measurement at once.
    """

    def __init__(self, budget: float = math.inf, stop: asyncio.Event | None = None) -> None:
        self.budget = budget
        self._deadline = asyncio.get_running_loop().time() + budget
        self._stop = stop or asyncio.Event()

    @property
    def left(self) -> float:
        """Seconds left of the budget; negative once it is overdrawn."""
        return self._deadline - asyncio.get_running_loop().time()

    @property
    def at_most(self) -> float:
        """Estimate of the seconds left if nothing better is known; infinite if overdrawn."""
        return self.left if self.left > 0 else math.inf

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    async def run(self, work: Awaitable[Item], is_needed: bool = False) -> Item:
        """Return what `work` returns, or cancel it at the limit.

        Args:
            is_needed: whether there is no result without it, so that the budget does not end it.

        Raises:
            StoppedError: the user has stopped the measurement.
            OverBudgetError: the budget was spent first.
        """
        timeout = None if is_needed or math.isinf(self.left) else max(0.0, self.left)
        running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait(
                [running, stopping], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if running.done():
                return await running
            raise StoppedError if self.is_stopped else OverBudgetError
        finally:
            stopping.cancel()
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Return the order of round `number`, so that each round starts with another item."""
    start = number % len(items) if items else 0
    return [*items[start:], *items[:start]]


@dataclass(frozen=True)
class Spread:
    median: float
    lower_quartile: float
    upper_quartile: float


@dataclass(frozen=True)
class Estimate:
    """A median and an interval for the median of the population.

    Attributes:
        confidence: of the interval. Fewer than six values cannot reach 95 %: the interval is then
            their full range, with the confidence that this has.
    """

    median: float
    low: float
    high: float
    confidence: float


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles of at least one value, interpolated."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper)


def estimate(values: Sequence[float]) -> Estimate:
    """Return the median, and the narrowest interval of order statistics that is 95 % sure.

    From the j-th smallest to the j-th largest of n values, it misses the population's median only
    if fewer than j of them fall on one side: the sign test, which assumes nothing about their
    distribution (David and Nagaraja, Order Statistics, 3rd edition, section 7.1).
    """
    ordered = sorted(values)
    ranks = range(1, (len(ordered) + 1) // 2 + 1)
    sure = (rank for rank in ranks if _coverage(len(ordered), rank) >= CONFIDENCE)
    rank = max(sure, default=1)  # by default the full range
    return Estimate(
        median=statistics.median(ordered),
        low=ordered[rank - 1],
        high=ordered[-rank],
        confidence=_coverage(len(ordered), rank),
    )


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """Estimate the ratio ours / theirs, both given in the order of the rounds."""
    return estimate([one / other for one, other in zip(ours, theirs, strict=True)])


def is_conclusive(estimate: Estimate) -> bool:
    """Return whether the interval is sure enough for a conclusion."""
    return estimate.confidence >= LEAST_CONFIDENCE


def _coverage(count: int, rank: int) -> float:
    """Return the probability that the j-th smallest and largest enclose the population's median."""
    missed = sum(math.comb(count, below) for below in range(rank))
    return 1.0 - math.ldexp(2.0 * missed, -count)
