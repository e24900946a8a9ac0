"""The compute thread of a stage.

If the order matters, a test keeps the thread busy in a call while it submits its actions, so that
the schedule has the same choice in every run.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rpcmp.errors import BusyError, JobError, from_wire
from rpcmp.pipelining.schedule import Action, InFlightLimits
from rpcmp.rpc.messages import AfterRound, Mode, RoundHeader
from rpcmp.rpc.transport import Raised
from rpcmp.worker.executor import Task
from tests.support.rounds import compute_thread, header

F, B, W = Action
SECONDS = 30.0  # a test that hangs fails after this time

WHOLE = InFlightLimits(4, 4)
SPLIT = InFlightLimits(4, 8, splits=True, deferred=8)


class Stage:
    """A compute thread and a log of its actions: "F0" for an action that ran, "-F0" for a cancelled
    one.

    Actions of later rounds are logged as "F0@2", and the end of a round as "end" or "end@2". If
    several actions are ready, zero-bubble runs forwards before backwards, each in the order of
    micro-batches.
    """

    def __init__(self, schedule: str = "zero-bubble", limits: InFlightLimits = WHOLE) -> None:
        self.compute = compute_thread(schedule, limits, self._note_end)
        self.limits = limits
        self.log: list[str] = []
        self._logged = threading.Condition()
        self._gate = threading.Event()

    def begin(self, number: int, num_microbatches: int, training: bool = True, **more: Any) -> None:
        mode = Mode.TRAIN if training else Mode.EVALUATE
        self.compute.start_round(header(number, num_microbatches, step=number, mode=mode, **more))

    def _note_end(self, header: RoundHeader) -> None:
        self.note("end" if header.number == 1 else f"end@{header.number}")

    def submit(self, *names: str, number: int = 1) -> None:
        """Submit actions of a round; a split backward submits its weight gradient."""
        for name in names:
            action, microbatch = Action(name[0]), int(name[1:])
            task = self.task(name, number)
            if action is B and self.limits.splits:
                task = self._split(name, number)
            self.compute.submit(number, action, microbatch, task)

    def hold(self) -> None:
        """Keep the thread busy until the next `expect`."""
        held = threading.Event()
        self._gate.clear()

        def wait() -> None:
            held.set()
            self._gate.wait(SECONDS)

        self.compute.future(wait)
        assert held.wait(SECONDS)

    def call(self, function: Callable[[], Any]) -> Any:
        """Return the result of `function`, run on the thread."""
        done = threading.Event()
        future = self.compute.future(function)
        future.add_done_callback(lambda _: done.set())
        assert done.wait(SECONDS)  # unlike Future.wait, this can be interrupted
        return future.value()

    def task(self, name: str, number: int = 1) -> Task:
        name = name if number == 1 else f"{name}@{number}"
        return Task([lambda: self.note(name)], 0, lambda: self.note(f"-{name}"))

    def expect(self, names: str) -> None:
        """Wait until as many actions have run, and check that they are these."""
        self._gate.set()
        expected = names.split()
        with self._logged:
            self._logged.wait_for(lambda: len(self.log) >= len(expected), SECONDS)
        for _ in range(3):  # after each call the thread looks for actions that it must not do
            self.call(lambda: None)
        assert self.log == expected

    def _split(self, name: str, number: int) -> Task:
        backward = self.task(name, number)

        def run() -> None:
            self.note(name if number == 1 else f"{name}@{number}")
            self.submit(name.replace("B", "W"), number=number)

        return Task([run], 0, backward.cancel)

    def note(self, name: str) -> None:
        with self._logged:
            self.log.append(name)
            self._logged.notify_all()


# The order of actions.


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("order", ["0123", "3210", "2031"])
def test_actions_run_in_order_however_they_arrive(schedule: str, order: str) -> None:
    stage = Stage(schedule)
    stage.begin(1, 4)
    stage.hold()
    stage.submit(*(f"F{microbatch}" for microbatch in order))
    stage.expect("F0 F1 F2 F3")
    stage.hold()
    stage.submit(*(f"B{microbatch}" for microbatch in order))
    stage.expect("F0 F1 F2 F3 B0 B1 B2 B3 end")


def test_an_action_waits_for_the_one_before() -> None:
    stage = Stage()
    stage.begin(1, 3)
    stage.submit("F1", "F2")
    stage.expect("")
    stage.submit("F0")
    stage.expect("F0 F1 F2")


@pytest.mark.parametrize(
    ("schedule", "limits", "order"),
    [
        ("gpipe", WHOLE, "F0 F1 F2 B0 B1 B2"),
        ("1f1b", WHOLE, "F0 B0 F1 B1 F2 B2"),
        ("zero-bubble", WHOLE, "F0 F1 F2 B0 B1 B2"),
        ("zero-bubble", InFlightLimits(1, 2, True, 0), "F0 B0 F1 W0 B1 F2 W1 B2 W2"),
        ("zero-bubble", InFlightLimits(1, 3, True, 1), "F0 B0 F1 B1 F2 W0 B2 W1 W2"),
    ],
)
def test_the_schedule_chooses_among_ready_actions(
    schedule: str, limits: InFlightLimits, order: str
) -> None:
    stage = Stage(schedule, limits)
    stage.begin(1, 3)

    def forward(microbatch: int) -> Task:
        def run() -> None:
            stage.note(f"F{microbatch}")
            stage.submit(f"B{microbatch}")

        return Task([run], microbatch)

    stage.hold()
    for microbatch in range(3):
        stage.compute.submit(1, F, microbatch, forward(microbatch))
    stage.expect(f"{order} end")


def test_no_more_micro_batches_are_open_than_the_limit() -> None:
    stage = Stage(limits=InFlightLimits(2, 2))
    stage.begin(1, 4)
    stage.submit("F0", "F1", "F2", "F3")
    stage.expect("F0 F1")
    stage.submit("B0")
    stage.expect("F0 F1 B0 F2")


# Micro-batches in flight.


def test_micro_batches_are_in_flight_until_their_backward_is_done() -> None:
    stage = Stage("1f1b")
    stage.begin(1, 3)
    stage.submit("F0", "F1")
    stage.expect("F0 F1")
    assert stage.compute.in_flight == 2
    stage.submit("B0")
    stage.expect("F0 F1 B0")
    assert stage.compute.in_flight == 1
    stage.submit("B1", "F2")
    stage.expect("F0 F1 B0 B1 F2")
    stage.submit("B2")
    stage.expect("F0 F1 B0 B1 F2 B2 end")
    assert stage.compute.in_flight == 0


def test_split_backwards_are_in_flight_until_the_weight_gradient() -> None:
    stage = Stage("zero-bubble", InFlightLimits(1, 2, True, 0))
    seen: dict[str, int] = {}

    def weight() -> None:
        seen["while W0 runs"] = stage.compute.in_flight
        stage.note("W0")

    def backward() -> None:
        stage.note("B0")
        stage.compute.submit(1, W, 0, Task([weight], 0))

    stage.begin(1, 1)
    stage.submit("F0")
    stage.compute.submit(1, B, 0, Task([backward], 0))
    stage.expect("F0 B0 W0 end")
    assert seen == {"while W0 runs": 1}
    assert stage.compute.in_flight == 0


def test_an_evaluation_has_only_forwards_and_keeps_none_in_flight_and_an_abort_resets_it() -> None:
    stage = Stage("gpipe")
    stage.begin(1, 2, training=False)
    stage.submit("F0")
    stage.expect("F0")
    assert stage.compute.in_flight == 0
    assert stage.compute.recorder.total["F"] == 0
    stage.submit("F1")
    stage.expect("F0 F1 end")
    stage.begin(2, 2)
    stage.submit("F0", number=2)
    stage.expect("F0 F1 end F0@2")
    assert stage.compute.in_flight == 1
    stage.compute.abort(2, 2)
    stage.begin(3, 2)
    stage.submit("F0", number=3)
    stage.expect("F0 F1 end F0@2 F0@3")
    assert stage.compute.in_flight == 1


# Rounds.


@pytest.mark.parametrize(("limits", "weight"), [(SPLIT, "W0 "), (WHOLE, "")])
def test_a_round_ends_after_its_last_weight_gradient_and_before_the_next_begins(
    limits: InFlightLimits, weight: str
) -> None:
    stage = Stage(limits=limits)
    stage.begin(1, 1)
    stage.begin(2, 1)
    stage.hold()
    stage.submit("F0", number=2)
    stage.submit("F0", "B0")
    stage.expect(f"F0 B0 {weight}end F0@2")


def test_rounds_run_in_order_even_if_the_later_one_starts_first() -> None:
    stage = Stage()
    stage.begin(2, 1)
    stage.submit("F0", number=2)
    stage.expect("")
    stage.begin(1, 1)
    stage.submit("F0", "B0")
    stage.expect("F0 B0 end F0@2")


def test_a_round_that_has_started_does_not_start_again() -> None:
    stage = Stage()
    stage.begin(1, 2)
    stage.submit("F0")
    stage.expect("F0")
    stage.begin(1, 2)  # the first reader of each micro-batch starts the round
    stage.submit("F1", "B0", "B1")
    stage.expect("F0 F1 B0 B1 end")
    stage.begin(1, 2)
    stage.submit("F0")
    stage.expect("F0 F1 B0 B1 end -F0")


def test_a_held_round_lets_no_other_start_before_its_release() -> None:
    stage = Stage(limits=SPLIT)
    stage.begin(1, 1, after=AfterRound.HOLD)
    stage.begin(2, 1)
    stage.submit("F0", number=2)
    stage.submit("F0", "B0")
    stage.expect("F0 B0 W0")  # and the calls in `expect` have returned
    stage.call(stage.compute.release)
    stage.expect("F0 B0 W0 end F0@2")


def test_a_release_without_a_round_does_nothing() -> None:
    stage = Stage()
    stage.compute.release()
    stage.begin(1, 1, after=AfterRound.HOLD)
    stage.submit("F0", "B0")
    stage.expect("F0 B0")


# Aborts.


def test_an_abort_cancels_waiting_and_later_tasks() -> None:
    stage = Stage()
    stage.begin(1, 4)
    stage.hold()
    stage.submit("F0", "F2", "B0")
    stage.compute.abort(1, 1)
    stage.submit("F1", "B1")
    stage.expect("-F0 -F2 -B0 -F1 -B1")


def test_an_abort_cancels_each_task_once() -> None:
    stage = Stage()
    stage.begin(1, 1)
    stage.hold()
    stage.submit("F0")
    stage.begin(2, 1)
    stage.submit("F0", number=2)
    for _ in range(2):
        stage.compute.abort(1, 1)
    stage.expect("-F0 F0@2")


def test_the_round_after_an_abort_runs() -> None:
    stage = Stage()
    stage.begin(1, 2)
    stage.submit("F0")
    stage.expect("F0")
    stage.compute.abort(1, 2)
    stage.begin(3, 1)
    stage.submit("B0")  # too late
    stage.submit("F0", number=2)  # too late
    stage.submit("F0", "B0", number=3)
    stage.expect("F0 -B0 -F0@2 F0@3 B0@3 end@3")


def test_an_abort_leaves_the_round_before_to_end() -> None:
    stage = Stage(limits=SPLIT)
    stage.begin(1, 2)
    stage.begin(2, 1)
    stage.hold()
    stage.submit("F0", number=2)
    stage.submit("F0", "F1", "B0", "B1")
    stage.compute.abort(2, 3)
    for number in (3, 4):
        stage.begin(number, 1)
        stage.submit("F0", number=number)
    stage.expect("-F0@2 -F0@3 F0 F1 B0 B1 W0 W1 end F0@4")


def test_an_abort_of_a_held_round_lets_the_next_start() -> None:
    stage = Stage()
    stage.begin(1, 1, after=AfterRound.HOLD)
    stage.submit("F0", "B0")
    stage.expect("F0 B0")
    stage.compute.abort(1, 1)
    stage.begin(2, 1)
    stage.submit("F0", number=2)
    stage.expect("F0 B0 F0@2")


def test_the_weight_gradient_of_a_backward_that_was_aborted_while_it_ran_never_runs() -> None:
    stage = Stage(limits=SPLIT)
    stage.begin(1, 2)

    def backward() -> None:
        stage.note("B0")
        stage.compute.abort(1, 1)
        stage.submit("W0")

    stage.submit("F0")
    stage.compute.submit(1, B, 0, Task([backward], 0))
    stage.begin(2, 1)
    stage.submit("F0", number=2)
    stage.expect("F0 B0 -W0 F0@2")


def test_a_round_that_was_aborted_before_it_reached_this_stage_stays_aborted() -> None:
    stage = Stage()
    stage.compute.abort(1, 1)
    stage.begin(1, 1)
    stage.submit("F0")
    stage.expect("-F0")


# Calls.


def test_calls_run_on_the_same_thread_even_without_a_round() -> None:
    stage = Stage()
    assert stage.call(lambda: threading.current_thread().name) == "rpcmp-compute"
    assert stage.call(threading.get_ident) == stage.call(threading.get_ident)


def test_calls_run_in_order_and_before_actions_that_need_other_stages() -> None:
    stage = Stage()
    stage.begin(1, 1)
    stage.hold()
    stage.submit("F0")
    for name in ("scale", "zero_grad"):
        stage.compute.future(functools.partial(stage.note, name))
    stage.expect("scale zero_grad F0")


def test_calls_wait_for_the_local_rest_of_a_round() -> None:
    stage = Stage(limits=SPLIT)
    stage.begin(1, 2)
    stage.begin(2, 1)

    def last_backward() -> None:
        stage.compute.future(lambda: stage.note("call"))
        stage.submit("W1")

    stage.submit("F0", "F1", "B0")
    stage.submit("F0", number=2)
    stage.compute.submit(1, B, 1, Task([last_backward], 1))
    stage.expect("F0 F1 B0 W0 W1 end call F0@2")


@pytest.mark.parametrize(
    ("error", "kind"), [(BusyError("mine"), BusyError), (ValueError("theirs"), JobError)]
)
def test_an_error_of_a_call_is_its_answer(error: Exception, kind: type[Exception]) -> None:
    def fail() -> Any:
        raise error

    stage = Stage()
    raised = stage.call(fail)
    assert isinstance(raised, Raised)
    assert type(from_wire(raised.error)) is kind
    assert str(error) in str(from_wire(raised.error))
    assert stage.call(lambda: "still here") == "still here"


def test_each_micro_batch_of_a_bundle_is_recorded() -> None:
    stage = Stage()
    stage.begin(1, 2)
    stage.compute.recorder.keep(1)
    parts = [functools.partial(stage.note, f"F{microbatch}") for microbatch in range(6)]
    stage.compute.submit(1, F, 1, Task(parts[3:], 3))
    stage.submit("B0")
    stage.compute.submit(1, F, 0, Task(parts[:3], 0))
    stage.expect("F0 F1 F2 F3 F4 F5 B0")
    spans = stage.compute.recorder.read(0)[1]
    assert [(str(span.kind), span.microbatch) for span in spans[:6]] == [
        ("F", microbatch) for microbatch in range(6)
    ]


# Remains of an action.


def test_an_idle_thread_keeps_no_micro_batch_alive() -> None:
    stage = Stage()
    activation = torch.ones(3)
    kept = weakref.ref(activation)
    stage.begin(1, 1)
    run = functools.partial(lambda kept: stage.note("F0"), activation)
    stage.compute.submit(1, F, 0, Task([run], 0))
    del run
    del activation
    stage.expect("F0")
    assert kept() is None


def test_every_action_is_recorded_with_its_step_and_micro_batch() -> None:
    stage = Stage(limits=SPLIT)
    recorder = stage.compute.recorder
    stage.call(lambda: recorder.keep(9))
    for number in (1, 2):
        stage.begin(number, 1)
        stage.submit("F0", "B0", number=number)
    stage.expect("F0 B0 W0 end F0@2 B0@2 W0@2 end@2")
    spans = recorder.read(0)[1]
    names = [(str(span.kind), span.step, span.microbatch) for span in spans]
    assert names == [(kind, step, 0) for step in (1, 2) for kind in "FBW"]
    assert all(span.ready_ns <= span.start_ns <= span.end_ns for span in spans)
    assert all(one.end_ns <= two.start_ns for one, two in itertools.pairwise(spans))


def test_a_thread_that_is_closed_ends() -> None:
    thread = compute_thread("gpipe")
    assert thread.future(lambda: 3).wait() == 3
    thread.close()
    thread._thread.join(30)
    assert not thread._thread.is_alive()
