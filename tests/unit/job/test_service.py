"""The calls of a program that a new generation has to repeat."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.driver.operations import OPERATIONS, Effect
from rpcmp.errors import JobError
from rpcmp.job.service import NUM_KEPT, Call, CallHistory
from tests.support.examples import examples

READING = sorted(name for name, each in OPERATIONS.items() if each.effect is Effect.READS)
CHANGING = OPERATIONS.keys() - READING
DIFFERENTIATING = {"train_step", "forward_backward"}

Made = tuple[str, tuple[object, ...]]
"""A call that the model has seen: its name and arguments."""


def after(steps: int) -> dict[str, object]:
    """What the driver is after so many steps."""
    return {"step": steps} if steps else {}


def make(history: CallHistory, name: str, *arguments: object, step: int = 0, kept: int = 0) -> Call:
    """Make a call that is answered."""
    call = history.new_call(name, arguments)
    history.record_done(call, after(step), kept)
    return call


def names(calls: Iterable[Call]) -> list[str]:
    """Return the names of the calls."""
    return [call.name for call in calls]


def train(history: CallHistory, first: int, last: int) -> None:
    """Train steps, each of which all stages keep."""
    for step in range(first, last + 1):
        make(history, "train_step", f"batch {step}", step=step, kept=step)


def test_calls_that_change_something_are_numbered() -> None:
    history = CallHistory()
    assert history.new_call("train_step", (1,)) == Call(1, "train_step", (1,))
    assert history.new_call("train_step", (2,)).version == 1  # the first was never answered
    for version, name in enumerate(sorted(CHANGING), start=1):
        assert make(history, name, version) == Call(version, name, (version,))
        for reading in READING:
            assert make(history, reading, 3) == Call(0, reading, (3,))
    assert names(history.since(0)) == sorted(CHANGING)


def test_since_returns_the_unseen_calls_in_order() -> None:
    history = CallHistory()
    train(history, 1, 2)
    make(history, "forward_backward", 1, step=2, kept=2)
    make(history, "clip_grad_norm_", 1.0, 2.0, step=2, kept=2)
    make(history, "optimizer_step", step=3, kept=5)
    make(history, "step_scheduler", 0.1, step=3, kept=5)
    assert history.states == {1: after(1), 2: after(2), 5: after(3)}
    assert list(history.since(2)) == [
        Call(3, "forward_backward", (1,)),
        Call(4, "clip_grad_norm_", (1.0, 2.0)),
        Call(5, "optimizer_step", ()),
        Call(6, "step_scheduler", (0.1,)),
    ]
    assert names(history.since(5)) == ["step_scheduler"]
    assert list(history.since(6)) == []


def test_since_raises_for_versions_before_the_oldest_kept_one() -> None:
    history = CallHistory()
    train(history, 1, 5)
    assert len(list(history.since(3))) == 2
    for version in (0, 2):
        with pytest.raises(JobError, match=f"begins at call {version}, of which too much is forg"):
            history.since(version)


def test_repeated_calls_are_not_recorded_again() -> None:
    history = CallHistory()
    train(history, 1, 2)
    make(history, "forward_backward", step=2, kept=2)
    before, known = list(history.since(0)), history.states
    for call in history.since(0):
        history.record_done(call, after(1), call.version)
        history.record_failed(call)
    assert list(history.since(0)) == before
    assert history.states == known


def test_calls_may_change_while_they_are_repeated() -> None:
    history = CallHistory()
    train(history, 1, 3)
    repeated = []
    for call in history.since(1):
        repeated.append(call.version)
        make(history, "train_step", step=10, kept=history.new_call("train_step", ()).version)
    assert repeated == [2, 3]


def test_take_has_new_call_is_true_once_per_completed_call() -> None:
    history = CallHistory()
    assert not history.take_has_new_call()
    call = make(history, "train_step")
    assert history.take_has_new_call()
    assert not history.take_has_new_call()
    history.record_done(call, after(1), 1)  # repeated
    assert not history.take_has_new_call()
    history.record_failed(history.new_call("train_step", ()))
    assert not history.take_has_new_call()


class Batch:
    """An object that only the history keeps alive."""


def test_arguments_of_forgotten_calls_are_freed() -> None:
    history = CallHistory()
    alive: list[weakref.ref[Batch]] = []

    def call(step: int, kept: int) -> None:
        batch = Batch()
        alive.append(weakref.ref(batch))
        make(history, "train_step", batch, step=step, kept=kept)

    for step in range(1, 200):
        call(step, step - step % 4)
        gc.collect(0)
        assert sum(batch() is not None for batch in alive) <= 4 * NUM_KEPT
        assert len(history.states) <= NUM_KEPT
    gc.collect()
    oldest = min(history.states)
    assert [batch() is not None for batch in alive] == [step > oldest for step in range(1, 200)]


# All of it

CALLS = st.lists(
    st.tuples(
        st.sampled_from([*sorted(CHANGING), *READING]),
        st.sampled_from(["done", "kept", "failed", "lost"]),
    ),
    max_size=60,
)


@examples(300)
@given(CALLS)
def test_repeating_calls_from_any_kept_version_gives_the_same_model(
    calls: list[tuple[str, str]],
) -> None:
    history = CallHistory()
    model: list[Made] = []
    steps, kept = [0], [0]
    for number, (name, outcome) in enumerate(calls):
        call = history.new_call(name, (number,))
        if outcome == "lost":  # with the group: the call is made again, as the same or another
            assert rebuilt(history, model) == [model] * len(history.states)
            continue
        if outcome == "failed":
            history.record_failed(call)
        if outcome == "failed" and name not in DIFFERENTIATING:
            continue
        if call.version == 0:
            history.record_done(call, after(steps[-1]), kept[-1])
            continue
        assert call.version == len(model) + 1
        steps.append(steps[-1] + (outcome != "failed" and name == "train_step"))
        if outcome == "failed":
            model.append(("zero_grad", ()))
        else:
            model.append((name, (number,)))
            if outcome == "kept":
                kept.append(call.version)
            history.record_done(call, after(steps[-1]), kept[-1])
        assert history.states == {version: after(steps[version]) for version in kept[-NUM_KEPT:]}
        assert rebuilt(history, model) == [model] * len(history.states)
        memory = len(list(history.since(min(history.states))))
        assert memory == len(model) - kept[-NUM_KEPT:][0]


def rebuilt(history: CallHistory, model: list[Made]) -> list[list[Made]]:
    """Return the models of groups that start at each known version."""
    return [
        model[:version] + [(call.name, call.arguments) for call in history.since(version)]
        for version in history.states
    ]
