"""The balance of a run that changes, is confirmed by a step, or undone by a fault."""

from __future__ import annotations

import time

import pytest

from rpcmp.errors import (
    CheckpointError,
    ConfigError,
    StageError,
    UnreachableError,
    WorkerDiedError,
)
from rpcmp.job.cuts import with_stages
from rpcmp.job.moving_balance import Change, MovingBalance
from rpcmp.observability.events import Event, RebalanceEvent, ScheduleEvent
from tests.support.graphs import chain_of
from tests.support.runevents import typed

CONFIG = chain_of(2, model={"layers": "m:layers", "balance": [3, 1]})
LAYERS = {"stage0": ["a", "b", "c"], "stage1": ["d"]}


def changed() -> tuple[MovingBalance, list[Event]]:
    events: list[Event] = []
    balance = MovingBalance(CONFIG, events.append)
    balance.start(LAYERS, 1.0)
    balance.want(Change(CONFIG.with_balance([1, 3]), "stage0 is slower"))
    assert balance.config == CONFIG
    assert balance.take_wanted(7) is not None
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


OTHERS = ScheduleEvent(
    step=0, chosen="", schedule="zero-bubble", microbatches_per_message=1, measured={}
)


def test_options_are_left_after_repeated_faults_that_may_be_theirs() -> None:
    moving = MovingBalance(CONFIG, lambda event: None)
    moving.add(OTHERS)
    assert moving.options.schedule == "zero-bubble"
    assert not moving.leave_options(UnreachableError("a link"))
    assert not moving.leaves_options
    assert moving.leave_options(WorkerDiedError("memory"))
    assert moving.leaves_options
    assert moving.options == CONFIG.options
    assert not moving.leave_options(WorkerDiedError("memory"))  # not theirs
    assert moving.leaves_options
    moving.add(typed({"event": "step", "step": 1}))
    assert not moving.leaves_options  # what it finds from now on is another matter


def test_options_of_the_config_are_nothing_to_leave() -> None:
    moving = MovingBalance(CONFIG, lambda event: None)
    assert not moving.leave_options(StageError("stage0", "forward", "bug"))
    assert not moving.leaves_options


def test_layers_that_fit_only_under_the_config_s_own_options_have_them_until_a_step() -> None:
    moving = MovingBalance(CONFIG, lambda event: None)
    moving.add(OTHERS)
    moving.change(Change(CONFIG.with_balance([1, 3]), "", fits_options=False), 7)
    assert moving.leaves_options
    assert moving.options == CONFIG.options
    moving.add(typed({"event": "step", "step": 8}))
    assert not moving.leaves_options


def test_layers_that_go_back_have_the_options_before() -> None:
    moving = MovingBalance(CONFIG, lambda event: None)
    moving.add(OTHERS)
    moving.change(Change(CONFIG.with_balance([1, 3]), "", fits_options=False), 7)
    assert moving.go_back(WorkerDiedError("memory"))
    assert not moving.leaves_options
    assert moving.options.schedule == "zero-bubble"


def test_a_fault_forgets_what_was_wanted() -> None:
    moving = MovingBalance(CONFIG, lambda event: None)
    moving.want(Change(CONFIG.with_balance([1, 3]), ""))
    assert not moving.go_back(WorkerDiedError(""))
    assert moving.take_wanted(7) is None


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


def without_a_host() -> MovingBalance:
    moving = MovingBalance(CONFIG, lambda event: None)
    moving.start(LAYERS, 1.0)
    change = Change(with_stages(CONFIG, {"stage1": 4}), "stage0 has left", [], is_forced=True)
    moving.change(change, 7)
    return moving


def test_a_host_that_has_left_is_done_without_until_that_has_failed_twice() -> None:
    moving = without_a_host()
    assert not moving.go_back(WorkerDiedError("memory"))
    assert not moving.go_back(UnreachableError("a link"), is_repeated=True)
    assert moving.config.stage_names == ["stage1"]
    assert moving.go_back(WorkerDiedError("memory"), is_repeated=True)
    assert moving.config.stage_names == ["stage0", "stage1"]
    assert moving.failed == [frozenset({"stage1"})]


@pytest.mark.parametrize(
    "error", [ConfigError("no such folder"), CheckpointError("the state fits no other cut")]
)
def test_what_cannot_be_without_a_host_is_undone_at_once(error: ConfigError) -> None:
    assert without_a_host().go_back(error)


def test_a_fault_undoes_every_change_that_no_step_has_confirmed() -> None:
    moving, events = changed()
    moving.change(Change(with_stages(CONFIG, {"stage1": 4}), "stage0 has left", is_forced=True), 7)
    moving.change(Change(with_stages(CONFIG, {"stage2": 4}), "another has joined"), 7)
    assert not moving.go_back(WorkerDiedError("memory"))  # one has left: that may have been a fault
    assert moving.go_back(WorkerDiedError("memory"))
    assert moving.config == CONFIG
    (event,) = events
    assert isinstance(event, RebalanceEvent)
    assert (event.balance, event.before) == ([3, 1], [4])
    assert moving.failed == [frozenset({"stage2"})]


def test_changes_that_one_step_confirms_are_told_together() -> None:
    moving, events = changed()
    moving.change(Change(CONFIG.with_balance([2, 2]), "stage1 is slower"), 7)
    moving.confirm(8)
    (event,) = events
    assert isinstance(event, RebalanceEvent)
    assert (event.balance, event.before) == ([2, 2], [3, 1])
    assert event.reason == "stage0 is slower; stage1 is slower"


def test_what_has_worked_without_a_host_goes_on_without_it() -> None:
    moving = without_a_host()
    moving.confirm(8)
    assert not moving.go_back(WorkerDiedError("memory"), is_repeated=True)
    assert moving.config.stage_names == ["stage1"]
