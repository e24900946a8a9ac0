"""The estimate of a remote clock from pings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.observability.trace.spans import (
    DRIVER_CLOCK,
    Clock,
    ClockEstimate,
    Ping,
    between,
    estimate,
)

offsets = st.integers(-(10**15), 10**15)
delays = st.integers(0, 10**9)
times = st.integers(0, 10**13)


def ping(offset_ns: int, sent_ns: int, there_ns: int, back_ns: int) -> Ping:
    """Return a ping to a clock that is `offset_ns` behind the driver's."""
    arrived_ns = sent_ns + there_ns
    return Ping(sent_ns, arrived_ns - offset_ns, arrived_ns + back_ns)


@given(offsets, times, delays, delays)
def test_clock_error_is_at_most_half_of_the_asymmetry(
    offset_ns: int, sent_ns: int, there_ns: int, back_ns: int
) -> None:
    found = estimate([ping(offset_ns, sent_ns, there_ns, back_ns)])
    assert abs(found.offset_ns - offset_ns) <= (abs(there_ns - back_ns) + 1) // 2


@given(offsets, st.lists(st.tuples(times, delays, delays), min_size=1))
def test_clock_error_is_bounded_by_the_fastest_ping(
    offset_ns: int, sent: list[tuple[int, int, int]]
) -> None:
    found = estimate(ping(offset_ns, *one) for one in sent)
    bound_ns = min(there + back + 1 for _, there, back in sent) // 2
    assert abs(found.offset_ns - offset_ns) <= bound_ns


@given(offsets, st.floats(-1e-3, 1e-3), times, st.integers(1, 10**13), delays, delays, st.data())
def test_drifting_clock_is_as_exact_as_its_estimates_between_them(
    offset_ns: int,
    drift: float,
    begin_ns: int,
    length_ns: int,
    first_error_ns: int,
    last_error_ns: int,
    data: st.DataObject,
) -> None:
    truth = Clock(offset_ns, begin_ns, drift)
    end_ns = begin_ns + length_ns
    clock = between(
        _estimate(truth, begin_ns, first_error_ns), _estimate(truth, end_ns, -last_error_ns)
    )
    at_ns = data.draw(st.integers(begin_ns, end_ns))
    error_ns = abs(clock.to_driver(at_ns) - truth.to_driver(at_ns))
    assert error_ns <= max(first_error_ns, last_error_ns) + 2  # each rounds to a nanosecond


def _estimate(truth: Clock, at_ns: int, error_ns: int) -> ClockEstimate:
    return ClockEstimate(at_ns, truth.to_driver(at_ns) - at_ns + error_ns)


def test_clock_has_no_drift_if_both_estimates_are_equal() -> None:
    once = ClockEstimate(remote_ns=100, offset_ns=7)
    assert between(once, once).to_driver(1_000) == 1_007


@pytest.mark.parametrize("ns", [0, 10**15 + 1])
def test_drivers_clock_changes_no_time(ns: int) -> None:
    assert DRIVER_CLOCK.to_driver(ns) == ns
