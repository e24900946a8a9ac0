"""The stream of a run's events: if steps are replayed, each event is still passed on only once."""

from __future__ import annotations

import math
import struct

import pytest

from rpcmp.observability.events import (
    EvalEvent,
    Event,
    FaultEvent,
    LogEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from rpcmp.observability.events.training_events import LOSSES_KEPT, EventStream
from tests.support.runevents import typed


class Received:
    """A stream and the events that it has passed on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.stream = EventStream(self.events.append, lambda: 1)

    def emit_step(self, step: int, loss: float = 0.5, step_s: float = 0.1) -> None:
        data = {"event": "step", "step": step, "loss": loss, "step_s": step_s}
        self.stream.emit_new(typed(data))

    def emit_steps(self, first: int, last: int) -> None:
        """Emit steps with the inverse of their number as the loss."""
        for step in range(first, last + 1):
            self.emit_step(step, 1 / step)

    def emit_evaluation(self, step: int, **metrics: float) -> None:
        self.stream.emit_new(EvalEvent(step=step, epoch=1, values=metrics))

    @property
    def steps(self) -> list[StepEvent]:
        return [event for event in self.events if isinstance(event, StepEvent)]

    @property
    def evaluated(self) -> list[int]:
        return [event.step for event in self.events if isinstance(event, EvalEvent)]

    @property
    def warnings(self) -> list[str]:
        return [event.text for event in self.events if isinstance(event, WarningEvent)]


@pytest.fixture
def received() -> Received:
    return Received()


def test_every_event_is_stamped(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    now = iter((7.5, 8.5))
    monkeypatch.setattr("rpcmp.observability.events.training_events.time.time", lambda: next(now))
    stream = EventStream(events.append, lambda: 3)
    start = StartEvent(steps=9)
    stream.emit(start)
    line = typed({"event": "log", "time": 1.0, "generation": 2, "text": "t"})
    stream.emit(line)
    assert [(event.time, event.generation) for event in events] == [(7.5, 3), (8.5, 2)]
    assert isinstance(events[1], LogEvent)
    assert start == StartEvent(steps=9)


def test_recent_steps_are_those_that_were_passed_on(received: Received) -> None:
    received.emit_step(1, step_s=3.0)
    received.emit_step(2, step_s=1.0)
    received.emit_step(2, step_s=9.0)
    received.emit_step(3, step_s=2.0)
    assert [step.step_s for step in received.stream.recent_steps] == [3.0, 1.0, 2.0]


def test_other_events_are_passed_on_each_time(received: Received) -> None:
    fault = FaultEvent(step=1, error="gone", kind="WorkerDiedError", stage="s", host="")
    warning = WarningEvent(text="careful")
    for event in (fault, warning, warning):
        received.stream.emit_new(event)
    assert [type(event) for event in received.events] == [FaultEvent, WarningEvent, WarningEvent]


def test_a_resumed_run_passes_on_the_steps_after_its_checkpoint(received: Received) -> None:
    received.stream.step = 120
    received.emit_steps(119, 122)
    assert [event.step for event in received.steps] == [121, 122]
    assert received.warnings == []


@pytest.mark.parametrize("event", ["start", "report", "early_stop"])
def test_events_that_each_generation_repeats_are_passed_on_once(
    received: Received, event: str
) -> None:
    for steps in (10, 10, 12):
        received.stream.emit_new(typed({"event": event, "steps": steps, "text": "t"}))
    assert [each.event for each in received.events] == [event]


# Evaluations


def test_an_evaluation_before_the_first_step_is_passed_on(received: Received) -> None:
    received.emit_evaluation(0)
    received.emit_evaluation(0)
    assert received.evaluated == [0]


def test_every_evaluation_is_passed_on_once_if_several_are_replayed(received: Received) -> None:
    for step in (1, 2, 3, 2, 3, 4):  # two steps, and their evaluations, are replayed
        received.emit_step(step)
        received.emit_evaluation(step)
    assert [event.step for event in received.steps] == [1, 2, 3, 4]
    assert received.evaluated == [1, 2, 3, 4]


# Replays


def test_a_replay_with_another_loss_is_a_warning(received: Received) -> None:
    received.emit_steps(1, 3)
    received.emit_step(2, 0.5 + 2**-53)
    assert received.warnings == [
        f"step 2 gave a loss of {0.5 + 2**-53!r} in its replay and 0.5 before: the model draws on "
        "something that is not reproducible"
    ]
    assert [event.loss for event in received.steps] == [1.0, 0.5, 1 / 3]


def test_each_replay_is_compared_with_the_first_loss(received: Received) -> None:
    received.emit_steps(1, 3)
    received.emit_step(3, 0.25)
    received.emit_step(3, 0.25)
    assert [text.count(f"{1 / 3!r} before") for text in received.warnings] == [1, 1]
    received.emit_step(3, 1 / 3)
    assert len(received.warnings) == 2


def a_nan(bits: int) -> float:
    value: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    assert math.isnan(value)
    return value


@pytest.mark.parametrize(
    ("before", "replayed", "differ"),
    [
        (math.nan, math.nan, False),
        (math.nan, float("nan"), False),
        (a_nan(0x7FF8000000000000), a_nan(0x7FF8000000000123), False),
        (math.inf, math.inf, False),
        (-math.inf, -math.inf, False),
        (5e-324, 5e-324, False),
        (math.nan, 1.0, True),
        (1.0, math.nan, True),
        (math.inf, -math.inf, True),
        (0.0, -0.0, True),
        (0.1, 0.1 + 2**-56, True),
    ],
)
def test_losses_differ_by_their_bits_and_one_that_is_no_number_equals_itself(
    received: Received, before: float, replayed: float, differ: bool
) -> None:
    received.emit_step(1, before)
    received.emit_step(1, replayed)
    assert len(received.warnings) == differ


def test_old_losses_are_forgotten(received: Received) -> None:
    received.emit_steps(1, LOSSES_KEPT + 1)
    received.emit_step(1, 77.0)
    assert received.warnings == []
    received.emit_step(2, 77.0)
    assert len(received.warnings) == 1
    received.emit_steps(LOSSES_KEPT + 2, 20 * LOSSES_KEPT)
    for step in range(1, 20 * LOSSES_KEPT + 1):
        received.emit_step(step, 77.0)
    assert len(received.warnings) == 1 + LOSSES_KEPT
