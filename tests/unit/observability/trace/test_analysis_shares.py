"""The shares of time, for pictures with known answers and for random traces."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcmp.config import topology
from rpcmp.errors import ConfigError
from rpcmp.observability.trace.analysis import measure
from rpcmp.observability.trace.critical_path import IdleReason
from rpcmp.observability.trace.spans import (
    Kind,
    Span,
    Trace,
    Track,
    Window,
    choose_window,
    last_complete,
    producers,
)
from tests.support.traces import (
    CELL_NS,
    DIAMOND,
    DIAMOND_PRODUCERS,
    FROZEN_FIRST,
    SLOW_LAST,
    SLOW_LINKS,
    ZERO_BUBBLE,
    drawn,
    redrawn,
)
from tests.support.tracestrategies import traces


@pytest.mark.parametrize("picture", [SLOW_LINKS, ZERO_BUBBLE, FROZEN_FIRST, SLOW_LAST])
def test_idle_time_is_split_as_drawn(picture: str) -> None:
    assert redrawn(drawn(picture)) == picture


def test_join_waits_for_the_last_of_its_inputs() -> None:
    assert redrawn(drawn(DIAMOND, DIAMOND_PRODUCERS)) == DIAMOND


def bundled(trace: Trace) -> Trace:
    """Return the trace with all spans of a kind in one bundle, ready when its first span is."""

    def ready(track: Track) -> tuple[Span, ...]:
        first: dict[Kind, int] = {}
        for span in track.spans:
            first.setdefault(span.kind, span.ready_ns)
        return tuple(span._replace(ready_ns=first[span.kind]) for span in track.spans)

    return replace(trace, tracks=tuple(replace(t, spans=ready(t)) for t in trace.tracks))


def test_bundle_is_sent_when_its_last_micro_batch_is_computed() -> None:
    trace = drawn("""
        stage0  F0 F1 .  .  .  .  .  B0 B1
        stage1  .  .  .  F0 F1 B0 B1 .  .
    """)
    alone, together = redrawn(trace).splitlines(), redrawn(bundled(trace)).splitlines()
    assert alone[1].startswith("stage1  .  ~  ~  F0")
    assert together[1].startswith("stage1  .  .  ~  F0")


def test_shares_match_the_picture_without_its_first_step() -> None:
    trace = drawn(SLOW_LINKS)
    first, second = measure(trace, choose_window(trace))
    assert first.busy == {Kind.FORWARD: 2 / 12, Kind.BACKWARD: 2 / 12, Kind.WEIGHT: 0} | {
        Kind.OPTIMIZER: 1 / 12
    }
    assert first.lost == {
        IdleReason.BUBBLE: 3 / 12,
        IdleReason.NETWORK: 3 / 12,
        IdleReason.OVERHEAD: 1 / 12,
    }
    assert second.lost == {
        IdleReason.BUBBLE: 3 / 12,
        IdleReason.NETWORK: 2 / 12,
        IdleReason.OVERHEAD: 2 / 12,
    }
    assert (first.stage, first.host) == ("stage0", "host-stage0")


def test_window_ends_when_the_next_step_starts() -> None:
    trace = drawn(SLOW_LINKS)
    assert choose_window(trace, 1, 1) == Window((1,), 0, 13 * CELL_NS)
    assert choose_window(trace, last=1) == choose_window(trace, 1, 1)
    assert (
        choose_window(trace)
        == choose_window(trace, first=2)
        == Window((2,), 13 * CELL_NS, 25 * CELL_NS)
    )
    assert choose_window(trace, 1, 2).step_s == 25e-3 / 2
    assert choose_window(drawn(SLOW_LAST)).steps == (1,)  # the only step


def test_last_complete_excludes_a_step_cut_by_the_end_of_the_run() -> None:
    cut = drawn("stage0 F0 B0 O F0 B0 O F0 B0 O F0\nstage1 F0 B0 O F0 B0 O F0 B0 . .")
    assert last_complete(cut).steps == (1, 2)
    assert last_complete(drawn(ZERO_BUBBLE), count=1).steps == (2,)
    assert last_complete(drawn(SLOW_LAST)).steps == (1,)  # a trace without an optimizer


@pytest.mark.parametrize(("first", "last"), [(0, 1), (2, 1), (1, 3), (3, None), (None, 0)])
def test_choose_window_refuses_missing_steps(first: int | None, last: int | None) -> None:
    with pytest.raises(ConfigError, match="in the trace; it has 1 to 2"):
        choose_window(drawn(SLOW_LINKS), first, last)


def test_choose_window_refuses_a_trace_without_steps() -> None:
    with pytest.raises(ConfigError, match="no steps"):
        choose_window(Trace((Track("a", "host", ()),), {"a": ()}))
    with pytest.raises(ConfigError, match="take no time"):
        choose_window(Trace((Track("a", "host", (Span(Kind.FORWARD, 1, 0, 5, 5, 5),)),), {"a": ()}))


@settings(deadline=None, derandomize=True)
@given(traces(), st.data())
def test_shares_of_any_window_add_up_to_1(trace: Trace, data: st.DataObject) -> None:
    begin_ns = data.draw(st.integers(trace.begin_ns, trace.end_ns - 1))
    end_ns = data.draw(st.integers(begin_ns + 1, trace.end_ns))
    for stage in measure(trace, Window((1,), begin_ns, end_ns)):
        shares = [*stage.busy.values(), *stage.lost.values()]
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0


def test_producers_contain_each_stage_once() -> None:
    inputs = {"a": ["input"], "b": ["a.x", "a.y", "input"], "c": ["a", "b", "target"]}
    assert producers(topology.build_graph(inputs)) == {"a": (), "b": ("a",), "c": ("a", "b")}
