"""Medians, and how sure they are. Pure.

Runs that follow on each other share the machine's mood of the moment, so contestants are compared
by the ratios within a round, never by their medians alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95

LEAST_CONFIDENCE = 0.9
"""Of an interval that is to say anything; five rounds are the fewest that reach it."""


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    lower_quartile: float
    upper_quartile: float


@dataclass(frozen=True)
class Estimate:
    """A median and an interval for the median of the population.

    Attributes:
        confidence: of the interval. Fewer than six values cannot reach 95 %: the interval is then
            their full range, and this says how sure it is.
    """

    median: float
    low: float
    high: float
    confidence: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of at least one value, interpolated."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, lower, upper)


def estimate(values: Sequence[float]) -> Estimate:
    """The median, and the narrowest interval of order statistics that is 95 % sure.

    From the j-th smallest to the j-th largest of n values, it misses the population's median only
    if fewer than j of them fall on one side: the sign test, which assumes nothing about their
    distribution (David and Nagaraja, Order Statistics, 3rd edition, section 7.1).
    """
    ordered = sorted(values)
    rank = _rank(len(ordered))
    return Estimate(
        median=statistics.median(ordered),
        low=ordered[rank - 1],
        high=ordered[-rank],
        confidence=_coverage(len(ordered), rank),
    )


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Estimate:
    """The ratio ours / theirs over the rounds, both given in the order of the rounds."""
    return estimate([mine / other for mine, other in zip(ours, theirs, strict=True)])


def is_telling(of: Estimate) -> bool:
    """Whether the interval is sure enough to say anything."""
    return of.confidence >= LEAST_CONFIDENCE


def _rank(count: int) -> int:
    """The largest j whose interval is still sure enough; 1, the full range, where none is."""
    ranks = range(1, (count + 1) // 2 + 1)
    return max((j for j in ranks if _coverage(count, j) >= CONFIDENCE), default=1)


def _coverage(count: int, rank: int) -> float:
    """How likely the population's median lies between the j-th smallest and largest value."""
    missed = sum(math.comb(count, below) for below in range(rank))
    return 1.0 - math.ldexp(2.0 * missed, -count)
