"""The busy times and spans that a compute thread records."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from rpcmp.observability.trace import spans
from rpcmp.observability.trace.spans import (
    NO_MICROBATCH,
    SPANS_PER_ANSWER,
    Kind,
    Span,
    SpanRecorder,
)


class Clock:
    """A `time.perf_counter_ns` that the test sets."""

    def __init__(self) -> None:
        self.now = 0

    def read(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(spans, "time", SimpleNamespace(perf_counter_ns=made.read))
    return made


def add(
    to: SpanRecorder,
    clock: Clock,
    kind: str,
    start: int,
    end: int,
    microbatch: int = 0,
    ready: int = 0,
) -> None:
    clock.now = end
    to.add(kind, 7, microbatch, ready, start)


def test_busy_seconds_add_up_by_kind_since_the_last_call(clock: Clock) -> None:
    stage = SpanRecorder()
    add(stage, clock, "F", 0, 2_000_000_000)
    add(stage, clock, "F", 5_000_000_000, 6_000_000_000)
    add(stage, clock, "O", 6_000_000_000, 6_500_000_000)
    assert stage.take()[0] == {"F": 3.0, "B": 0.0, "W": 0.0, "O": 0.5}
    assert stage.take()[0] == {"F": 0.0, "B": 0.0, "W": 0.0, "O": 0.0}


def test_what_a_thread_has_of_a_core_is_told_apart_from_what_it_sleeps() -> None:
    stage = SpanRecorder()
    stage.take()
    ends = time.thread_time() + 0.05
    while time.thread_time() < ends:
        pass
    time.sleep(0.5)
    _, cores = stage.take()
    assert 0.05 <= cores["used"] < 0.4
    assert cores["waited"] >= 0.0


def test_actions_are_kept_once_that_is_requested_and_read_from_a_cursor(clock: Clock) -> None:
    stage = SpanRecorder()
    add(stage, clock, "F", 10, 20)
    cursor = stage.keep(1)
    add(stage, clock, "B", 30, 40, microbatch=2, ready=25)
    add(stage, clock, "O", 40, 45, microbatch=NO_MICROBATCH, ready=40)
    cursor, spans = stage.read(cursor)
    assert spans == [
        Span(Kind.BACKWARD, 7, 2, 25, 30, 40),
        Span(Kind.OPTIMIZER, 7, NO_MICROBATCH, 40, 40, 45),
    ]
    assert stage.read(cursor) == (cursor, [])
    add(stage, clock, "F", 50, 60)
    assert stage.keep(1) == 3  # another reader's cursor skips what was recorded before
    assert stage.read(cursor) == (3, [Span(Kind.FORWARD, 7, 0, 0, 50, 60)])
    assert stage.read(0)[1][:2] == spans


def test_an_answer_has_a_limited_number_of_actions(clock: Clock) -> None:
    stage, sizes = SpanRecorder(), []
    cursor = stage.keep(1)
    for _ in range(SPANS_PER_ANSWER + 1):
        add(stage, clock, "F", 10, 20)
    for _ in range(3):
        cursor, spans = stage.read(cursor)
        sizes.append(len(spans))
    assert sizes == [SPANS_PER_ANSWER, 1, 0]


def test_a_cursor_whose_actions_are_gone_reads_the_oldest_that_are_kept() -> None:
    stage = SpanRecorder()
    cursor = stage.keep(1)
    for step in range(5):
        stage.add("F", step, 0, 0, 0)
    cursor, spans = stage.read(cursor)
    assert (cursor, [span.step for span in spans]) == (5, [3, 4])


def test_an_action_is_ready_before_it_starts(clock: Clock) -> None:
    stage = SpanRecorder()
    stage.keep(1)
    add(stage, clock, "F", 10, 20, ready=12)
    assert [(span.ready_ns, span.start_ns) for span in stage.read(0)[1]] == [(10, 10)]
