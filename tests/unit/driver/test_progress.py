"""The training progress that the driver resumes from, and the steps at which the stages save."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.config.schema import Config
from rpcmp.driver import progress as saves_module
from rpcmp.driver.loss_scaler import ScalerState
from rpcmp.driver.progress import (
    DEFAULT_SECONDS,
    MAX_IN_PROGRESS,
    CheckpointCadence,
    TrainingProgress,
)
from tests.support.graphs import chain_of

JOIN_SECONDS = 30.0
"""Seconds to wait for a thread that must end by itself."""

# Progress


def test_progress_sums_up_an_epoch_and_starts_anew_in_the_next_one() -> None:
    progress = TrainingProgress(metrics={"loss": 0.2})
    for step, loss in ((1, 0.5), (2, 0.25), (3, 0.125)):
        progress = progress.after(step, 1, loss)
    assert progress == TrainingProgress(3, 1, 3, 0.125, 0.875, {"loss": 0.2})
    assert progress.mean_loss == 0.875 / 3
    next_one = progress.after(4, 2, 0.5)
    assert next_one == TrainingProgress(4, 2, 1, 0.5, 0.5, {"loss": 0.2})
    assert next_one.mean_loss == 0.5


def test_the_order_says_which_options_a_group_starts_with() -> None:
    wanted, before = [{"schedule": "zero-bubble"}], [{"schedule": "1f1b"}]
    saved = TrainingProgress(step=3, loss=0.5, options=before)
    for progress, expected in (
        (None, TrainingProgress(options=wanted)),
        (asdict(saved), replace(saved, options=wanted)),
    ):
        order = {"progress": progress, "options": wanted}
        found = TrainingProgress.from_order(order)
        assert repr(found) == repr(expected)  # of no step the loss is NaN


def test_progress_resets_the_end_of_an_epoch_after_a_step() -> None:
    ended = TrainingProgress(3, 1, 3, 0.1, 0.9, has_ended_epoch=True)
    assert not ended.after(4, 2, 0.5).has_ended_epoch
    assert not ended.after(4, 1, 0.5).has_ended_epoch


def test_a_step_does_not_change_the_progress_before_it() -> None:
    before = TrainingProgress(metrics={"loss": 0.1})
    message = asdict(before)
    before.after(1, 1, 0.5)
    assert asdict(before)["metrics"] == {"loss": 0.1}
    message["metrics"]["loss"] = 3.0
    assert (before.step, before.metrics) == (0, {"loss": 0.1})


@given(
    st.builds(
        TrainingProgress,
        step=st.integers(0),
        epoch=st.integers(1),
        batch=st.integers(0),
        loss=st.floats(allow_nan=False),
        epoch_loss=st.floats(allow_nan=False),
        metrics=st.dictionaries(st.text(), st.floats(allow_nan=False)),
        is_saved=st.booleans(),
        has_ended_epoch=st.booleans(),
        scaler=st.none() | st.builds(ScalerState, st.floats(1), st.integers(0), st.integers(0)),
    )
)
def test_progress_survives_its_message(progress: TrainingProgress) -> None:
    arrived = json.loads(json.dumps(asdict(progress)))
    assert TrainingProgress.from_message(arrived) == progress
    added = {**arrived, "event": "progress", "told": {"loss": 0.1}, "awaits_save": True}
    assert TrainingProgress.from_message(added) == progress


def test_progress_has_defaults_for_keys_of_newer_versions() -> None:
    found = TrainingProgress.from_message({"step": 3, "epoch": 2})
    assert (found.step, found.epoch, found.batch, found.metrics) == (3, 2, 0, {})
    assert math.isnan(found.loss)


# When to save


class Clock:
    """A `time.monotonic` that the test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Condition(threading.Condition):
    """A condition that releases `entered` whenever a thread begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.entered.release()
        return super().wait(timeout)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(saves_module, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def condition(monkeypatch: pytest.MonkeyPatch) -> Condition:
    """Replace the condition of the `CheckpointCadence` that the test creates."""
    made = Condition()
    monkeypatch.setattr(saves_module, "threading", SimpleNamespace(Condition=lambda: made))
    return made


def config(**section: Any) -> Config:
    """Return a job, with a `[checkpoint]` section if any of its keys are given."""
    return chain_of(2, **({"checkpoint": {"dir": "runs", **section}} if section else {}))


def due(saves: CheckpointCadence, last: int) -> list[int]:
    """Return the steps up to `last` that are due if each save finishes at once."""
    found = []
    for step in range(1, last + 1):
        if saves.start_if_due(step):
            found.append(step)
            saves.finish(step)
    return found


def test_steps_are_due_at_their_interval_and_at_the_end(clock: Clock) -> None:
    saves, without = CheckpointCadence(config(every_steps=4), 10), CheckpointCadence(config(), 3)
    clock.now += 10 * DEFAULT_SECONDS  # seconds do not count if the config has none
    assert due(saves, 10) == [4, 8, 10]
    assert due(without, 3) == []
    assert due(CheckpointCadence(config(every_steps=5), 10), 10) == [5, 10]
    assert due(CheckpointCadence(config(every_steps=99), 10), 10) == [10]


@pytest.mark.parametrize(
    ("section", "seconds"), [({"every_seconds": 7.0}, 7.0), ({"keep": 3}, DEFAULT_SECONDS)]
)
def test_step_is_due_after_enough_seconds(
    clock: Clock, section: dict[str, Any], seconds: float
) -> None:
    saves = CheckpointCadence(config(**section), 100)
    assert not saves.start_if_due(1)
    clock.now += seconds - 0.5
    assert not saves.start_if_due(2)
    clock.now += 0.5
    assert saves.start_if_due(3)
    assert not saves.start_if_due(4)
    clock.now += seconds
    saves.finish(3)
    assert saves.start_if_due(5)


def test_steps_are_due_by_number_or_time_and_a_save_resets_the_clock(clock: Clock) -> None:
    saves = CheckpointCadence(config(every_steps=10, every_seconds=60.0), 100)
    clock.now += 59.0
    assert saves.start_if_due(10)
    clock.now += 59.0
    assert not saves.start_if_due(11)
    clock.now += 1.0
    assert saves.start_if_due(12)
    saves.finish(10)
    clock.now += 59.0
    saves.start(13)  # because of a signal
    saves.finish(12)
    clock.now += 59.0
    assert not saves.start_if_due(14)


def test_checkpoints_in_progress_and_the_last_one_are_included(clock: Clock) -> None:
    saves = CheckpointCadence(config(every_steps=1), 9)
    saves.start(4)
    saves.start(5)
    assert [saves.includes(step) for step in (3, 4, 5, 6)] == [False, True, True, False]
    saves.finish(4)
    saves.finish(5)
    assert [saves.includes(step) for step in (3, 4, 5, 6)] == [False, False, True, False]


def test_what_is_due_would_wait_once_enough_are_in_progress(clock: Clock) -> None:
    saves = CheckpointCadence(config(every_steps=2), 9)
    for step in range(2, 2 * MAX_IN_PROGRESS + 1, 2):
        assert not saves.would_wait(step)
        saves.start(step)
    next_ = 2 * MAX_IN_PROGRESS + 2
    assert [saves.would_wait(step) for step in (next_ - 1, next_)] == [False, True]
    saves.finish(2)
    assert not saves.would_wait(next_)


def test_a_generation_continues_the_seconds_since_the_last_save(clock: Clock) -> None:
    saves = CheckpointCadence(config(every_seconds=60.0), 99, saved=2, since=59.0)
    assert not saves.start_if_due(3)
    clock.now += 1.0
    assert saves.start_if_due(4)


# Waiting for disks


@pytest.fixture
def threads() -> Iterator[list[threading.Thread]]:
    """A list of started threads; each must end before the test does."""
    started: list[threading.Thread] = []
    yield started
    for thread in started:
        thread.join(JOIN_SECONDS)
        assert not thread.is_alive()


def start(threads: list[threading.Thread], function: Callable[[], Any]) -> list[Any]:
    """Call `function` in a new thread, and return a list that will contain its result."""
    returned: list[Any] = []
    threads.append(threading.Thread(target=lambda: returned.append(function()), daemon=True))
    threads[-1].start()
    return returned


def until_waiting(condition: Condition) -> None:
    """Wait until another thread has begun to wait for the condition."""
    assert condition.entered.acquire(timeout=JOIN_SECONDS)


def test_due_checkpoint_waits_while_too_many_are_in_progress(
    condition: Condition, threads: list[threading.Thread]
) -> None:
    saves = CheckpointCadence(config(every_steps=1), 99)
    for step in range(1, MAX_IN_PROGRESS + 1):
        assert saves.start_if_due(step)
    returned = start(threads, lambda: saves.start_if_due(MAX_IN_PROGRESS + 1))
    until_waiting(condition)
    assert returned == []
    assert not saves.includes(MAX_IN_PROGRESS + 1)
    saves.finish(99)  # of another generation
    until_waiting(condition)
    assert returned == []
    saves.finish(2)
    threads[0].join(JOIN_SECONDS)
    assert returned == [True]
    assert [saves.includes(step) for step in (1, 2, 3)] == [True, False, True]


def test_all_that_wait_return_after_all_checkpoints_in_progress(
    condition: Condition, threads: list[threading.Thread]
) -> None:
    saves = CheckpointCadence(config(every_steps=1), 99)
    saves.start(1)
    saves.start(2)
    both = [start(threads, saves.wait) for _ in range(2)]
    for step in (2, 1):
        for _ in both:
            until_waiting(condition)
        assert both == [[], []]
        saves.finish(step)
    for thread in threads:
        thread.join(JOIN_SECONDS)
    assert both == [[None], [None]]


def test_wait_returns_at_once_if_all_checkpoints_are_done(condition: Condition) -> None:
    saves = CheckpointCadence(config(every_steps=1), 99)
    saves.wait()
    for step in range(1, 20):
        saves.start(step)
        saves.finish(step)
        saves.finish(step)
    saves.wait()
    assert not condition.entered.acquire(blocking=False)
