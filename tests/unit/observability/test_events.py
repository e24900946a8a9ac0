"""What is told of a run whose steps are done again: everything, and nothing twice."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from rpcmp.observability.events import KEPT, EventLog
from rpcmp.process.channel import Message


class Told:
    """A log and what it has passed on."""

    def __init__(self) -> None:
        self.events: list[Message] = []
        self.log = EventLog(self.events.append)

    def step(self, step: int, loss: float = 0.5, step_s: float = 0.1) -> None:
        self.log.tell({"event": "step", "step": step, "loss": loss, "step_s": step_s})

    def steps(self, first: int, last: int) -> None:
        """Steps whose loss is their number's inverse."""
        for step in range(first, last + 1):
            self.step(step, 1 / step)

    def evaluate(self, step: int, **metrics: float) -> None:
        self.log.tell({"event": "eval", "step": step, "epoch": 1, **metrics})

    def told(self, event: str, key: str) -> list[Any]:
        """Of all events of a kind."""
        return [each[key] for each in self.events if each["event"] == event]

    @property
    def warnings(self) -> list[str]:
        return self.told("warning", "text")


@pytest.fixture
def told() -> Told:
    return Told()


def test_every_step_is_told_once(told: Told) -> None:
    told.steps(1, 5)
    told.steps(3, 7)
    told.steps(1, 9)
    assert told.told("step", "step") == list(range(1, 10))
    assert told.log.step == 9
    assert told.warnings == []


def test_seconds_are_those_of_the_steps_that_were_told(told: Told) -> None:
    told.step(1, step_s=3.0)
    told.step(2, step_s=1.0)
    told.step(2, step_s=9.0)
    told.step(3, step_s=2.0)
    assert told.log.step_seconds == [3.0, 1.0, 2.0]


def test_the_events_are_passed_on_as_they_are(told: Told) -> None:
    step = {"event": "step", "step": 1, "loss": 0.5, "step_s": 0.1, "busy": {"s": 0.4}}
    other = {"event": "warning", "text": "careful"}
    for event in (step, other, other):
        told.log.tell(event)
    assert told.events == [step, other, other]


def test_a_resumed_run_tells_what_comes_after_its_checkpoint(told: Told) -> None:
    told.log.step = 120
    told.steps(119, 122)
    assert told.told("step", "step") == [121, 122]
    assert told.warnings == []


@pytest.mark.parametrize("event", ["start", "report"])
def test_what_comes_once_a_generation_is_told_once(told: Told, event: str) -> None:
    for steps in (10, 10, 12):
        told.log.tell({"event": event, "steps": steps, "text": "t"})
    assert told.events == [{"event": event, "steps": 10, "text": "t"}]


# Evaluations


def test_every_evaluation_is_told_once(told: Told) -> None:
    told.evaluate(5, loss=0.1)
    told.evaluate(5, loss=0.1)
    told.evaluate(10, loss=0.2)
    told.evaluate(10, loss=0.2)
    assert told.told("eval", "step") == [5, 10]


def test_an_evaluation_before_the_first_step_is_told(told: Told) -> None:
    told.evaluate(0)
    told.evaluate(0)
    assert told.told("eval", "step") == [0]


def test_every_evaluation_is_told_once_where_several_are_done_again(told: Told) -> None:
    for step in (1, 2, 3, 2, 3, 4):  # epochs of one step each; or a checkpoint of long ago
        told.step(step)
        told.evaluate(step)
    assert told.told("step", "step") == [1, 2, 3, 4]
    assert told.told("eval", "step") == [1, 2, 3, 4]


# Replays


def test_a_replay_with_another_loss_is_warned_of(told: Told) -> None:
    told.steps(1, 3)
    told.step(2, 0.5 + 2**-53)
    assert told.warnings == [
        f"step 2 gave a loss of {0.5 + 2**-53!r} in its replay and 0.5 before: the model draws on "
        "something that is not reproducible"
    ]
    assert told.told("step", "loss") == [1.0, 0.5, 1 / 3]


def test_each_replay_is_compared_with_what_was_told(told: Told) -> None:
    told.steps(1, 3)
    told.step(3, 0.25)
    told.step(3, 0.25)
    assert [text.count(f"{1 / 3!r} before") for text in told.warnings] == [1, 1]
    told.step(3, 1 / 3)
    assert len(told.warnings) == 2


def a_nan(bits: int) -> float:
    """A float that is no number, by its bits."""
    value: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
    assert math.isnan(value)
    return value


@pytest.mark.parametrize(
    ("before", "replayed"),
    [
        (math.nan, math.nan),
        (math.nan, float("nan")),
        (a_nan(0x7FF8000000000000), a_nan(0x7FF8000000000123)),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
        (5e-324, 5e-324),
    ],
)
def test_what_is_no_number_is_equal_to_itself(told: Told, before: float, replayed: float) -> None:
    told.step(1, before)
    told.step(1, replayed)
    assert told.warnings == []


@pytest.mark.parametrize(
    ("before", "replayed"),
    [(math.nan, 1.0), (1.0, math.nan), (math.inf, -math.inf), (0.0, -0.0), (0.1, 0.1 + 2**-56)],
)
def test_losses_differ_by_their_bits(told: Told, before: float, replayed: float) -> None:
    told.step(1, before)
    told.step(1, replayed)
    assert len(told.warnings) == 1


def test_losses_of_long_ago_are_forgotten(told: Told) -> None:
    told.steps(1, KEPT + 1)
    told.step(1, 77.0)
    assert told.warnings == []
    told.step(2, 77.0)
    assert len(told.warnings) == 1
    told.steps(KEPT + 2, 20 * KEPT)
    for step in range(1, 20 * KEPT + 1):
        told.step(step, 77.0)
    assert len(told.warnings) == 1 + KEPT
