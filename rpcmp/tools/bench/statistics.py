"""Medians, and how sure they are. Pure.

Runs that follow on each other share the machine's mood of the moment, so contestants are compared
by the ratios within a round, never by their medians alone.

How short a step could be at best, given how long each stage computes when it is alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from rpcmp.pipelining.simulation import ActionTimes

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


Bound = Callable[[Sequence[ActionTimes], int], float]
"""Seconds of a step, of the stages' times in order and the number of micro-batches."""


def fill_then_no_bubble(stages: Sequence[ActionTimes], num_microbatches: int) -> float:
    """A stage waits until the first micro-batch reaches it and then never again.

    The slowest stage decides. With equal stages this is what zero-bubble schedules reach:
    (stages - 1) x F + micro-batches x (F + B + W). Transfers and the optimizer take no time.

    It is that of one step by itself, with one stage a process. Where the first stage begins the
    next step while the last one still works, the mean over many steps may fall below it, and so
    may schedules with two half stages a process, whose pipeline fills in half the time.
    """
    arrivals = accumulate((stage.forward for stage in stages), initial=0.0)
    return max(
        arrival + num_microbatches * stage.total
        for arrival, stage in zip(arrivals, stages, strict=False)
    )
