"""The critical path and the bottleneck, for pictures with known answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from rpcmp.observability.trace.analysis import bottleneck, measure
from rpcmp.observability.trace.critical_path import IdleReason, Via, critical_path
from rpcmp.observability.trace.spans import Trace, Window, choose_window
from tests.support.traces import (
    CELL_NS,
    DIAMOND,
    DIAMOND_PRODUCERS,
    FROZEN_FIRST,
    SLOW_LAST,
    SLOW_LINKS,
    ZERO_BUBBLE,
    drawn,
)
from tests.support.tracestrategies import traces


def path(trace: Trace, first: int | None = None) -> str:
    """Return the critical path from its beginning: stage and activity, once per cell."""
    legs = list(critical_path(trace, choose_window(trace, first)))[::-1]
    return " ".join(f"{leg.stage[-1]}{leg.what[0]}" for leg in legs for _ in range(_cells(leg.ns)))


def _cells(ns: int) -> int:
    assert ns % CELL_NS == 0
    return ns // CELL_NS


def test_path_follows_the_causes_of_waiting() -> None:
    assert path(drawn(SLOW_LAST)) == "0F 1F 1F 1B 1B 1F 1F 1F 1B 1B 0B"
    assert path(drawn(SLOW_LINKS)) == "0F 1n 1F 1o 1B 1F 1o 1B 0n 0B 0n 0O"
    assert path(drawn(DIAMOND, DIAMOND_PRODUCERS)) == "aF cF cF cF dF dB cB cB cB aB"


def test_path_stays_at_a_stage_that_does_not_wait() -> None:
    assert path(drawn(ZERO_BUBBLE)) == "0F 1F 1B 0B 0W 0B 0W 0O"


def test_path_goes_through_the_driver() -> None:
    trace = drawn(FROZEN_FIRST)
    assert path(trace) == "0F 1F 1B 0n 0F 1F 1B"
    legs = list(critical_path(trace, choose_window(trace)))
    assert [leg.via for leg in legs if leg.what is IdleReason.NETWORK] == [Via.DRIVER]


@settings(deadline=None, derandomize=True)
@given(traces())
def test_path_is_never_longer_than_its_window(trace: Trace) -> None:
    whole = Window((1,), trace.begin_ns, trace.end_ns)
    legs = list(critical_path(trace, whole))
    assert 0 < sum(leg.ns for leg in legs) <= trace.end_ns - trace.begin_ns
    assert IdleReason.BUBBLE not in {leg.what for leg in legs}


def advice(picture: str) -> str:
    trace = drawn(picture)
    whole = choose_window(trace, first=1)
    return str(bottleneck(trace, whole, measure(trace, whole)))


def test_bottleneck_names_a_slow_stage_and_advises_to_relieve_it() -> None:
    assert advice(SLOW_LAST) == (
        "bottleneck: stage1 computes 9.0 ms of each step's 11.0 ms; largest loss on the "
        "critical path: uneven stages "
        "at stage1, 23% of a step. Move layers away from stage1, or give it a faster host."
    )


@pytest.mark.parametrize(
    ("picture", "said"),
    [
        ("a F0 ~ ~ ~ B0 O", "overhead at a, 50% of a step. Fewer, larger"),
        (
            "a F0 B0 O ~ ~ F0 B0 O\nb F0 B0 O . . F0 B0 O",
            "waiting for the driver at a, 25% of a step. Give the driver",
        ),
        ("a F0 . . . ~ ~ ~ B0\nb . ~ F0 B0 . . . .", "waiting for network at a, 38%"),
        ("a F0 .\nb . F0", "bubble at a, 50% of a step. More micro-batches"),
        ("a F0 - - B0 O\nb F0 B0 - - O", "overhead at a, 40% of a step. Fewer, larger"),
        ("a F0 = = B0 O\nb F0 = = B0 O", "uneven stages at a, 0% of a step. Only a faster a"),
    ],
)
def test_bottleneck_names_the_largest_loss_with_advice(picture: str, said: str) -> None:
    assert f"largest loss on the critical path: {said}" in advice(picture)
