"""Output that is not read for a while: it does not block the run, and is not lost."""

from __future__ import annotations

import threading

import pytest

from rpcmp.observability.events import Event, StartEvent
from rpcmp.observability.observers import in_background


def test_events_are_shown_in_order_and_reported_without_waiting() -> None:
    shown: list[int] = []
    may_go_on = threading.Event()

    def show(event: Event) -> None:
        may_go_on.wait()
        assert isinstance(event, StartEvent)
        shown.append(event.steps)

    with in_background(show) as report:
        for step in range(1000):
            report(StartEvent(steps=step))
        assert shown == []
        may_go_on.set()
    assert shown == list(range(1000))


@pytest.mark.parametrize("more", [100_000, 0], ids=["meanwhile", "at the end"])
def test_an_output_that_cannot_be_written_ends_the_run(more: int) -> None:
    tried = threading.Event()

    def show(event: Event) -> None:
        tried.set()
        raise BrokenPipeError("nobody reads any more")

    def report_all() -> None:
        with in_background(show) as report:
            report(StartEvent(steps=1))
            tried.wait()
            for step in range(more):
                report(StartEvent(steps=step))

    with pytest.raises(BrokenPipeError):
        report_all()
