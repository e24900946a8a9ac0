"""Medians and how sure they are, and a bound for the time of a step. Pure.

Runs one after the other share the load of the machine at that moment, so contestants are compared
by the ratios within a round, never by their medians alone.
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
"""Least confidence of an interval that tells anything; five rounds are the fewest that reach it."""


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
    rank = _rank(len(ordered))
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
    """Return whether the interval is sure enough to tell anything."""
    return estimate.confidence >= LEAST_CONFIDENCE


def _rank(count: int) -> int:
    """Return the largest j whose interval is sure enough; 1, the full range, if none is."""
    ranks = range(1, (count + 1) // 2 + 1)
    return max((j for j in ranks if _coverage(count, j) >= CONFIDENCE), default=1)


def _coverage(count: int, rank: int) -> float:
    """Return the probability that the j-th smallest and largest enclose the population's median."""
    missed = sum(math.comb(count, below) for below in range(rank))
    return 1.0 - math.ldexp(2.0 * missed, -count)


Bound = Callable[[Sequence[ActionTimes], int], float]
"""Returns the seconds of a step; its arguments are the stages' times and the number of
micro-batches."""


def fill_then_no_bubble(stages: Sequence[ActionTimes], num_microbatches: int) -> float:
    """Return the time of a step in which a stage waits for its first micro-batch and never again.

    The slowest stage decides. With equal stages this is what zero-bubble schedules reach:
    (stages - 1) x F + micro-batches x (F + B + W). Transfers and the optimizer take no time.

    The bound is for one step by itself, with one stage per process. If the first stage starts the
    next step while the last one still works, the mean over many steps may be lower. So may
    schedules with two half stages per process, whose pipeline fills in half the time.
    """
    arrivals = accumulate((stage.forward for stage in stages), initial=0.0)
    return max(
        arrival + num_microbatches * stage.total
        for arrival, stage in zip(arrivals, stages, strict=False)
    )
