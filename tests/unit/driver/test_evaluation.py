"""Means over samples, computed from the means of parts of any size."""

from __future__ import annotations

import math

from rpcmp.driver.evaluation import Evaluation, mean
from rpcmp.pipelining import microbatches


def test_parts_are_weighted_by_their_samples() -> None:
    parts = [Evaluation(3, 1.0, {"accuracy": 0.0}), Evaluation(1, 5.0, {"accuracy": 1.0})]
    assert mean(parts) == Evaluation(4, 2.0, {"accuracy": 0.25})


def test_mean_of_one_part_is_that_part() -> None:
    part = Evaluation(7, 0.1, {"a": 0.3, "b": 1e-30})
    assert mean([part]) == part


def test_the_order_of_parts_does_not_matter_and_an_iterator_may_give_them() -> None:
    parts = [Evaluation(1, loss) for loss in (1e16, -1e16, 1.0)]
    assert mean(parts) == mean(reversed(parts))


def test_nan_loss_stays_nan() -> None:
    assert math.isnan(mean([Evaluation(1, math.nan), Evaluation(1, 1.0)]).loss)


def test_infinities_of_both_signs_give_nan() -> None:
    parts = [Evaluation(1, sign * math.inf, {"a": 1.0}) for sign in (1, -1)]
    assert math.isnan(mean(parts).loss)
    assert mean(parts).metrics == {"a": 1.0}
    assert mean([parts[0], Evaluation(1, -1.0, {"a": 0.0})]).loss == math.inf


def test_a_sum_that_is_too_large_is_infinite() -> None:
    assert microbatches.exact_sum([1e308, 1e308]) == math.inf
    assert microbatches.exact_sum([-1e308, -1e308, 1.0]) == -math.inf
    assert microbatches.exact_sum(0.1 for _ in range(10)) == 1.0


def test_mean_of_no_parts_has_no_samples() -> None:
    assert mean([]) == Evaluation(0, 0.0)
