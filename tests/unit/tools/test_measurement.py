"""Medians and their intervals."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.tools.measurement import CONFIDENCE, estimate, paired_ratio, spread

SECONDS = st.floats(min_value=1e-6, max_value=1e3)


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [
        (1, 1, 1, 0.0),
        (5, 1, 5, 0.9375),  # the full range, still below 95 %
        (6, 1, 6, 0.96875),
        (8, 1, 8, 0.9921875),
        (9, 2, 8, 0.9609375),  # the smallest count that excludes the extremes
        (20, 6, 15, 0.95861053466796875),  # the tables of Hollander and Wolfe
    ],
)
def test_the_interval_equals_the_sign_tests_interval(
    count: int, low: int, high: int, confidence: float
) -> None:
    values = [float(value) for value in range(count, 0, -1)]
    found = estimate(values)
    assert (found.low, found.high, found.confidence) == (low, high, confidence)
    assert found.median == statistics.median(values)


def test_the_interval_covers_the_true_median_with_its_confidence() -> None:
    draw = random.Random(0)
    runs = [estimate([draw.expovariate(1.0) for _ in range(11)]) for _ in range(4000)]
    hits = sum(run.low <= math.log(2) <= run.high for run in runs) / len(runs)
    assert runs[0].confidence >= CONFIDENCE
    assert hits == pytest.approx(runs[0].confidence, abs=0.012)


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=20))
def test_the_median_lies_in_its_interval_and_the_interval_in_the_data(
    rounds: list[tuple[float, float]],
) -> None:
    ours, theirs = zip(*rounds, strict=True)
    ratio = paired_ratio(ours, theirs)
    ratios = [mine / other for mine, other in rounds]
    assert min(ratios) <= ratio.low <= ratio.median <= ratio.high <= max(ratios)


def test_ratios_are_taken_within_a_round() -> None:
    ratio = paired_ratio([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])
    assert (ratio.median, ratio.low, ratio.high) == (0.5, 0.5, 0.5)


def test_rounds_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])


def test_quartiles_are_interpolated_and_equal_a_single_value() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0])
    assert (found.lower_quartile, found.median, found.upper_quartile) == (1.75, 2.5, 3.25)
    assert spread([7.0]).lower_quartile == spread([7.0]).upper_quartile == 7.0
