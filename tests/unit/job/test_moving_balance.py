"""The balance of a run that changes, is confirmed by a step, or undone by a fault."""

from __future__ import annotations

import time

import pytest

from rpcmp.config.loader import parse_config
from rpcmp.errors import UnreachableError, WorkerDiedError
from rpcmp.job.moving_balance import MovingBalance
from rpcmp.observability.events import Event, RebalanceEvent

CONFIG = parse_config(
    {"loss": "torch.nn:MSELoss", "model": {"layers": "m:layers", "balance": [3, 1]}}
)
LAYERS = {"stage0": ["a", "b", "c"], "stage1": ["d"]}


def changed() -> tuple[MovingBalance, list[Event]]:
    events: list[Event] = []
    balance = MovingBalance(CONFIG, events.append)
    balance.start(LAYERS, 1.0)
    balance.want([1, 3], "stage0 is slower")
    assert balance.config == CONFIG
    balance.change(7)
    return balance, events


def balance_of(moving: MovingBalance) -> object:
    assert moving.config.model is not None
    return moving.config.model.balance


def test_a_step_under_the_new_balance_confirms_it() -> None:
    moving, events = changed()
    assert balance_of(moving) == [1, 3]
    moving.confirm(7)  # reported late
    assert events == []
    moving.confirm(8)
    moving.confirm(9)
    (event,) = events
    assert isinstance(event, RebalanceEvent)
    assert (event.outcome, event.step, event.reason) == ("moved", 7, "stage0 is slower")
    assert (event.balance, event.before) == ([1, 3], [3, 1])
    assert not moving.go_back(WorkerDiedError("later"))
    assert balance_of(moving) == [1, 3]
    assert moving.num_changes == 1


def test_a_fault_before_that_undoes_it() -> None:
    moving, events = changed()
    assert moving.go_back(WorkerDiedError("out of memory"))
    (event,) = events
    assert isinstance(event, RebalanceEvent)
    assert (event.outcome, event.reason) == ("undone", "out of memory")
    assert (event.balance, event.before) == ([3, 1], [1, 3])
    assert balance_of(moving) == [3, 1]
    assert moving.num_changes == 2
    assert not moving.go_back(WorkerDiedError("again"))


def test_a_fault_forgets_what_was_wanted() -> None:
    moving = MovingBalance(CONFIG, lambda event: None)
    moving.want([1, 3], "")
    assert not moving.go_back(WorkerDiedError(""))
    with pytest.raises(AssertionError):
        moving.change(7)


def test_repeated_deaths_bring_back_the_last_balance_that_worked_once() -> None:
    moving, events = changed()
    moving.confirm(8)
    assert not moving.go_back(WorkerDiedError("memory"))
    assert not moving.go_back(UnreachableError("a link"), is_repeated=True)
    assert moving.go_back(WorkerDiedError("memory"), is_repeated=True)
    assert balance_of(moving) == [3, 1]
    assert isinstance(events[-1], RebalanceEvent)
    assert (events[-1].outcome, events[-1].before) == ("undone", [1, 3])
    assert not moving.go_back(WorkerDiedError("memory"), is_repeated=True)


def test_the_first_step_is_no_time_without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    moving, events = changed()
    now[0] = 12.0
    moving.start({"stage0": ["a"], "stage1": ["b", "c", "d"]}, 1.0)
    now[0] = 20.0
    moving.confirm(8)
    (event,) = events
    assert isinstance(event, RebalanceEvent)
    assert event.seconds == 2.0
