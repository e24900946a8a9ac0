"""Observers: they get every event in order, and their failures do not harm the run."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from rpcmp.errors import DrainingError, InterruptedJobError, JobError
from rpcmp.observability import observers
from rpcmp.observability.events import Event as TypedEvent
from rpcmp.observability.observers import MAX_LAG, MAX_QUEUE, PATIENCE, watching
from rpcmp.process.logging.collector import Display
from tests.support.runevents import typed

Event = dict[str, Any]


class RecordingObserver:
    """An observer that calls `on` with each event, and then keeps the event."""

    name = "the witness"

    def __init__(self, on: Callable[[Event], None] = lambda event: None) -> None:
        self.on = on
        self.events: list[Event] = []
        self.closed = 0

    def handle(self, event: TypedEvent) -> None:
        data = event.to_json()
        self.on(data)
        self.events.append(data)

    def close(self) -> None:
        self.closed += 1


class Hanging(RecordingObserver):
    """An observer that hangs at its first event until `may_go_on` is set."""

    def __init__(self) -> None:
        super().__init__(self._wait)
        self.may_go_on = threading.Event()

    def _wait(self, event: Event) -> None:
        self.may_go_on.wait()


@contextlib.contextmanager
def watched(
    observers: Sequence[RecordingObserver],
    show: Callable[[Event], None],
    patience: float = PATIENCE,
) -> Iterator[Callable[[Event], None]]:
    """Like `watching`, but events are passed in their JSON form."""
    with watching(observers, lambda event: show(event.to_json()), patience) as report:
        yield lambda data: report(typed(data))


def names(events: list[Event]) -> list[str]:
    return [event["event"] for event in events]


def warnings(events: list[Event]) -> list[str]:
    return [event["text"] for event in events if event["event"] == "warning"]


def test_observers_get_all_events_in_order_and_the_end_last() -> None:
    shown: list[Event] = []
    first, second = RecordingObserver(), RecordingObserver()
    with watched([first, second], shown.append) as report:
        for step in range(1000):
            report({"event": "step", "step": step, "generation": 3})
    assert [event["step"] for event in shown[:-1]] == list(range(1000))
    assert first.events == second.events == shown
    assert (first.closed, second.closed) == (1, 1)
    end = shown[-1]
    assert {**end, "time": 0} == {
        "event": "end",
        "outcome": "done",
        "error": "",
        "generation": 3,
        "time": 0,
    }


@pytest.mark.parametrize(
    ("error", "outcome", "text"),
    [
        (JobError("it broke"), "failed", "it broke"),
        (ValueError("a bug"), "failed", "ValueError: a bug"),
        (InterruptedJobError(2, 7), "interrupted", "ended by SIGINT after step 7"),
        (DrainingError("stopped"), "interrupted", "stopped"),
        (KeyboardInterrupt(), "interrupted", "KeyboardInterrupt"),
    ],
)
def test_end_event_has_the_outcome(error: BaseException, outcome: str, text: str) -> None:
    told = RecordingObserver()
    with pytest.raises(type(error)), watched([told], lambda event: None):
        raise error
    (end,) = told.events
    assert (end["outcome"], end["error"]) == (outcome, text)
    assert told.closed == 1


def test_observer_that_raises_is_dropped_with_a_warning() -> None:
    def fail(event: Event) -> None:
        raise OSError("the disk is full")

    shown: list[Event] = []
    bad, good = RecordingObserver(fail), RecordingObserver()
    with watched([bad, good], shown.append) as report:
        report({"event": "start"})
        while bad.closed == 0:
            threading.Event().wait(0.001)
        report({"event": "summary"})
    (warning,) = warnings(shown)
    assert warning.startswith("the witness failed: OSError: the disk is full")
    assert "the run goes on without it" in warning
    assert (names(shown)[0], names(shown)[-2:]) == ("start", ["summary", "end"])
    assert good.events == shown
    assert bad.events == []
    assert bad.closed == 1


def test_observer_that_fails_at_the_end_is_named_before_the_end_is_shown() -> None:
    def fail(event: Event) -> None:
        raise SystemExit(3)  # user code may raise it

    shown: list[Event] = []
    with watched([RecordingObserver(fail)], shown.append):
        pass
    assert names(shown) == ["warning", "end"]


def test_passing_events_are_not_shown() -> None:
    shown: list[Event] = []
    observer = RecordingObserver()
    with watched([observer], shown.append) as report:
        for event in ("start", "vitals", "timeline"):
            report({"event": event})
    assert names(shown) == ["start", "end"]  # a terminal may be unread for hours
    assert names(observer.events) == ["start", "vitals", "timeline", "end"]


def test_observer_that_lags_misses_only_passing_events() -> None:
    slow = Hanging()
    with watched([slow], lambda event: None) as report:
        for step in range(5 * MAX_LAG):
            report({"event": "step", "step": step})
            report({"event": "vitals", "step": step})
        slow.may_go_on.set()
    told = names(slow.events)
    assert told.count("step") == 5 * MAX_LAG
    assert 0 < told.count("vitals") < 2 * MAX_LAG
    assert told[-1] == "end"


def test_observer_that_hangs_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Event] = []
    monkeypatch.setattr(observers, "MAX_QUEUE", 50)
    assert MAX_QUEUE > 50
    hanging = Hanging()
    with watched([hanging], shown.append) as report:
        for step in range(100):
            report({"event": "step", "step": step})
    hanging.may_go_on.set()
    (warning,) = warnings(shown)
    assert "lags 50 events behind" in warning
    assert [event["step"] for event in shown if event["event"] == "step"] == list(range(100))


def test_end_waits_for_observers_with_a_timeout() -> None:
    shown: list[Event] = []
    hanging = Hanging()
    with watched([hanging], shown.append, patience=0.01) as report:
        report({"event": "start"})
    hanging.may_go_on.set()
    assert names(shown) == ["start", "warning", "end"]
    assert "did not finish in time" in shown[1]["text"]


def test_events_of_an_observer_only_reach_the_others() -> None:
    reports: list[Callable[[Event], None]] = []

    def speak(event: Event) -> None:
        if event["event"] == "start":
            reports[0]({"event": "log", "text": "I was told"})

    speaker, listener = RecordingObserver(speak), RecordingObserver()
    with watched([speaker, listener], lambda event: None) as report:
        reports.append(report)
        report({"event": "start"})
        while "log" not in names(listener.events):
            threading.Event().wait(0.001)
    assert names(listener.events) == ["start", "log", "end"]
    assert names(speaker.events) == ["start", "end"]


def test_observers_get_the_error_of_an_output_that_cannot_be_written() -> None:
    def show(event: Event) -> None:
        raise BrokenPipeError("nobody reads any more")

    told = RecordingObserver()
    with pytest.raises(BrokenPipeError), watched([told], show) as report:
        report({"event": "start"})
    assert names(told.events) == ["end"]
    assert told.events[0]["outcome"] == "failed"


def test_log_lines_of_an_observer_are_shown_but_not_reported() -> None:
    stream = io.StringIO()
    display = Display(stream)

    def say(text: str) -> None:
        display.emit(
            logging.makeLogRecord({"name": "x", "levelname": "INFO", "levelno": 20, "msg": text})
        )

    observer = RecordingObserver(lambda event: say(f"heard {event['event']}"))
    with watched([observer], lambda event: None) as report, display.reporting(report):
        report({"event": "start"})
        say("a word of the run's")
    display.finish()
    assert names(observer.events) == ["start", "log", "end"]
    shown = [line.rpartition(": ")[2] for line in stream.getvalue().splitlines()]
    assert shown == ["heard start", "heard log", "heard end"]
