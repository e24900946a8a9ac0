"""The one thread on which a stage computes.

Where the order matters, a test holds the thread in a call while it hands in its actions, so that
the schedule has the same choice in every run.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rpcmp.errors import BusyError, JobError, from_wire
from rpcmp.schedule import Action, policy
from rpcmp.transport import Raised
from rpcmp.worker.compute import ComputeThread, Task

F, B = Action.FORWARD, Action.BACKWARD
SECONDS = 30.0  # after which a test that hangs fails


class Recorder:
    """A compute thread and what it did: "F0" for what ran, "-F0" for what was cancelled."""

    def __init__(self, schedule: str = "1f1b", limit: int = 4) -> None:
        self.compute = ComputeThread(policy(schedule), limit)
        self.log: list[str] = []
        self._logged = threading.Condition()
        self._gate = threading.Event()

    def hold(self) -> None:
        """Keep the thread busy until the next `expect`."""
        held = threading.Event()
        self._gate.clear()

        def wait() -> None:
            held.set()
            self._gate.wait(SECONDS)

        self.compute.future(wait)
        assert held.wait(SECONDS)

    def submit(self, *actions: tuple[Action, int], number: int = 1) -> None:
        """Hand in actions of a round."""
        for action, microbatch in actions:
            self.compute.submit(number, action, microbatch, self.task(f"{action}{microbatch}"))

    def call(self, function: Callable[[], Any]) -> Any:
        """What `function` returns, run on the thread."""
        done = threading.Event()
        future = self.compute.future(function)
        future.add_done_callback(lambda _: done.set())
        assert done.wait(SECONDS)  # unlike Future.wait, this can be interrupted
        return future.value()

    def task(self, name: str) -> Task:
        return Task(run=lambda: self._note(name), cancel=lambda: self._note(f"-{name}"))

    def expect(self, names: str) -> None:
        """Wait until that much has happened, and see that it was this and nothing else."""
        self._gate.set()
        expected = names.split()
        with self._logged:
            self._logged.wait_for(lambda: len(self.log) >= len(expected), SECONDS)
        for _ in range(3):  # after each call the thread looks for actions that it must not do
            self.call(lambda: None)
        assert self.log == expected

    def _note(self, name: str) -> None:
        with self._logged:
            self.log.append(name)
            self._logged.notify_all()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_forwards_run_in_order_however_they_arrive(schedule: str, order: tuple[int, ...]) -> None:
    stage = Recorder(schedule)
    stage.compute.begin(1, 4, training=True)
    stage.hold()
    stage.submit(*((F, microbatch) for microbatch in order))
    stage.expect("F0 F1 F2 F3")
    stage.hold()
    stage.submit(*((B, microbatch) for microbatch in order))
    stage.expect("F0 F1 F2 F3 B0 B1 B2 B3")


def test_an_action_waits_for_the_one_before() -> None:
    stage = Recorder()
    stage.compute.begin(1, 3, training=True)
    stage.submit((F, 1), (F, 2))
    stage.expect("")
    stage.submit((F, 0))
    stage.expect("F0 F1 F2")


@pytest.mark.parametrize(
    ("schedule", "order"), [("gpipe", "F0 F1 F2 B0 B1 B2"), ("1f1b", "F0 B0 F1 B1 F2 B2")]
)
def test_the_schedule_chooses_among_what_is_ready(schedule: str, order: str) -> None:
    stage = Recorder(schedule)
    stage.compute.begin(1, 3, training=True)

    def forward(microbatch: int) -> None:
        stage.task(f"F{microbatch}").run()
        stage.submit((B, microbatch))

    stage.hold()
    for microbatch in range(3):
        stage.compute.submit(1, F, microbatch, Task(functools.partial(forward, microbatch)))
    stage.expect(order)


def test_no_more_micro_batches_are_open_than_the_limit() -> None:
    stage = Recorder(limit=2)
    stage.compute.begin(1, 4, training=True)
    stage.submit((F, 0), (F, 1), (F, 2), (F, 3))
    stage.expect("F0 F1")
    stage.submit((B, 0))
    stage.expect("F0 F1 B0 F2")


def test_an_evaluation_has_no_limit_and_no_backwards() -> None:
    stage = Recorder(limit=1)
    stage.compute.begin(1, 3, training=False)
    stage.submit((F, 0), (F, 1), (F, 2))
    stage.expect("F0 F1 F2")


def test_a_round_begins_anew_at_micro_batch_0() -> None:
    stage = Recorder()
    for number in (1, 2):
        stage.compute.begin(number, 1, training=True)
        stage.submit((F, 0), number=number)
        stage.expect("F0 " * number)


def test_a_round_that_has_begun_does_not_begin_again() -> None:
    stage = Recorder()
    stage.compute.begin(1, 2, training=True)
    stage.submit((F, 0))
    stage.expect("F0")
    stage.compute.begin(1, 2, training=True)  # every micro-batch's first reader says so
    stage.submit((F, 1))
    stage.expect("F0 F1")


def test_an_abort_cancels_what_waits_and_what_still_comes() -> None:
    stage = Recorder()
    stage.compute.begin(1, 4, training=True)
    stage.hold()
    stage.submit((F, 0), (F, 2), (B, 0))
    stage.compute.abort(1)
    stage.submit((F, 1), (B, 1))
    stage.expect("-F0 -F2 -B0 -F1 -B1")


def test_an_abort_cancels_nothing_twice() -> None:
    stage = Recorder()
    stage.compute.begin(1, 1, training=True)
    stage.hold()
    stage.submit((F, 0))
    stage.compute.abort(1)
    stage.compute.abort(1)
    stage.expect("-F0")


def test_the_round_after_an_abort_runs() -> None:
    stage = Recorder()
    stage.compute.begin(1, 2, training=True)
    stage.submit((F, 0))
    stage.expect("F0")
    stage.compute.abort(1)
    stage.compute.begin(2, 1, training=True)
    stage.submit((B, 0), number=1)  # late
    stage.submit((F, 0), number=2)
    stage.expect("F0 -B0 F0")
    stage.submit((B, 0), number=2)
    stage.expect("F0 -B0 F0 B0")


def test_an_abort_of_an_earlier_round_leaves_the_current_one_alone() -> None:
    stage = Recorder()
    stage.compute.begin(2, 1, training=True)
    stage.hold()
    stage.submit((F, 0), number=2)
    stage.compute.abort(1)
    stage.expect("F0")


def test_a_round_that_was_aborted_before_it_reached_this_stage_stays_aborted() -> None:
    stage = Recorder()
    stage.compute.abort(3)
    stage.compute.begin(3, 1, training=True)
    stage.submit((F, 0), number=3)
    stage.expect("-F0")


def test_calls_run_on_the_same_thread_even_without_a_round() -> None:
    stage = Recorder()
    assert stage.call(lambda: threading.current_thread().name) == "rpcmp-compute"
    assert stage.call(threading.get_ident) == stage.call(threading.get_ident)


def test_calls_run_in_order_and_before_actions() -> None:
    stage = Recorder()
    stage.compute.begin(1, 1, training=True)
    stage.hold()
    stage.submit((F, 0))
    for name in ("step", "zero_grad"):
        stage.compute.future(stage.task(name).run)
    stage.expect("step zero_grad F0")


@pytest.mark.parametrize(
    ("error", "kind"), [(BusyError("mine"), BusyError), (ValueError("theirs"), JobError)]
)
def test_what_a_call_raises_is_its_answer(error: Exception, kind: type[Exception]) -> None:
    def fail() -> Any:
        raise error

    stage = Recorder()
    raised = stage.call(fail)
    assert isinstance(raised, Raised)
    assert type(from_wire(raised.error)) is kind
    assert str(error) in str(from_wire(raised.error))
    assert stage.call(lambda: "still here") == "still here"


def test_an_idle_thread_keeps_no_micro_batch_alive() -> None:
    stage = Recorder()
    activation = torch.ones(3)
    kept = weakref.ref(activation)
    stage.compute.begin(1, 1, training=True)
    run = stage.task("F0").run
    stage.compute.submit(1, F, 0, Task(lambda kept=activation: run()))  # type: ignore[misc]
    del activation
    stage.expect("F0")
    assert kept() is None


class Clock:
    """A clock that goes on when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds


def test_busy_seconds_are_those_of_tasks_since_they_were_last_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr("rpcmp.worker.compute.time", clock)
    stage = Recorder()
    stage.call(lambda: clock.work(2.0))
    clock.work(5.0)  # idle
    stage.call(lambda: clock.work(1.0))
    assert [stage.call(stage.compute.take_busy_seconds) for _ in range(2)] == [3.0, 0.0]
