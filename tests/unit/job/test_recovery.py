"""Decisions after a fault, given the error and the faults before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rpcmp import errors
from rpcmp.errors import (
    BusyError,
    CheckpointError,
    ConfigError,
    DeviceLostError,
    DrainingError,
    FactoryError,
    InterruptedJobError,
    JobError,
    LossScaleError,
    NonFiniteLossError,
    RecoveryTimeoutError,
    RpcmpError,
    StageError,
    UnreachableError,
    VersionError,
    WorkerDiedError,
    WorkerHungError,
)
from rpcmp.job.recovery import (
    LONGEST_PAUSE,
    Decision,
    FaultHistory,
    decide,
    is_recoverable,
    location,
)

MAX_RESTARTS = 5


def raised(
    stage: str = "s0", phase: str = "forward", step: int | None = 3, microbatch: int | None = 1
) -> StageError:
    """Return an error of the user's code."""
    return StageError(stage, phase, "ValueError: no", "a traceback", step, microbatch)


def hung(stage: str = "s0") -> WorkerHungError:
    """Return the error of a stuck worker."""
    return WorkerHungError(stage, "host", 7, "forward", 3, 1, 9.0, "")


def after(
    found: Sequence[RpcmpError], max_restarts: int = MAX_RESTARTS, has_begun: bool = True
) -> Decision:
    """Return the decision after the last of these faults; the run recovers from all others."""
    history = FaultHistory()
    for number, error in enumerate(found):
        decision = decide(error, history, max_restarts, has_begun)
        assert (decision.error is None) or number == len(found) - 1
        history = decision.history
    return decision


# Which errors


@pytest.mark.parametrize(
    ("error", "before", "afterwards"),
    [
        (WorkerDiedError("gone"), True, True),
        (DeviceLostError("s0", "forward", "ECC", step=1), True, True),
        (hung(), True, True),
        (UnreachableError("no answer"), False, True),
        (BusyError("another job"), False, True),
        (DrainingError("stops"), False, True),
        (raised(phase="build", step=None, microbatch=None), False, True),
        (raised(phase="forward"), True, True),
        (raised(phase="backward"), True, True),
        (raised(phase="optimizer", microbatch=None), True, True),
        (NonFiniteLossError(float("nan"), 3, 1), True, True),
        (JobError("a dataset raised"), True, True),
        (ConfigError("wrong"), False, False),
        (FactoryError("does not import"), False, False),
        (VersionError("another torch"), False, False),
        (CheckpointError("damaged"), False, False),
        (RecoveryTimeoutError("enough"), False, False),
        (InterruptedJobError(15, 3), False, False),
        (RpcmpError("whatever"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, RpcmpError) else str(value),
)
def test_errors_are_recoverable_if_another_try_may_succeed(
    error: RpcmpError, before: bool, afterwards: bool
) -> None:
    for has_begun, goes_on in ((False, before), (True, afterwards)):
        assert is_recoverable(error, has_begun) == goes_on
        decision = decide(error, FaultHistory(), MAX_RESTARTS, has_begun)
        if goes_on:
            assert (decision.error, decision.pause, decision.history.restarts) == (None, 0.0, 1)
        else:
            assert decision == Decision(error, 0.0, FaultHistory())


@pytest.mark.parametrize("error", [raised(), NonFiniteLossError(float("nan"), 1, 0)])
def test_errors_in_the_first_step_are_final(error: RpcmpError) -> None:
    decision = decide(error, FaultHistory(), MAX_RESTARTS, has_begun=True, has_stepped=False)
    assert decision.error is error
    died = WorkerDiedError("gone")
    assert decide(died, FaultHistory(), MAX_RESTARTS, True, has_stepped=False).error is None


def test_a_final_error_does_not_change_the_history() -> None:
    history = FaultHistory(3, frozenset({("loss", 1, 1)}))
    error = ConfigError("wrong")
    assert decide(error, history, MAX_RESTARTS, True) == Decision(error, 0.0, history)


# Where the user's code raised


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (raised(), raised(stage="s1")),
        (raised(), raised(phase="backward")),
        (raised(), raised(step=4)),
        (raised(), raised(microbatch=0)),
        (raised(), NonFiniteLossError(float("nan"), 3, 1)),
        (NonFiniteLossError(float("nan"), 3, 1), NonFiniteLossError(float("nan"), 4, 1)),
        (LossScaleError(2**-17, 3), LossScaleError(2**-17, 4)),
        (NonFiniteLossError(float("nan"), 3, 1), NonFiniteLossError(float("nan"), 3, 0)),
        (JobError("data: no such file"), JobError("data: out of memory")),
        (JobError("one"), raised()),
    ],
)
def test_errors_at_different_places_have_different_locations(
    one: RpcmpError, other: RpcmpError
) -> None:
    assert location(one) is not None
    assert location(one) != location(other)
    decision = after([one, other])
    assert decision.error is None
    assert decision.history.raised == {location(one), location(other)}


@pytest.mark.parametrize(
    ("one", "again"),
    [
        (raised(), StageError("s0", "forward", "KeyError: 'x'", "another", 3, 1, "from 's'")),
        (raised(step=None, microbatch=None), raised(step=None, microbatch=None)),
        (NonFiniteLossError(float("nan"), 3, 1), NonFiniteLossError(float("inf"), 3, 1)),
        (LossScaleError(2**-17, 3), LossScaleError(2**-18, 3)),
        (JobError("data: no\n at 0x1"), JobError("data: no\n at 0x2")),
    ],
)
def test_a_second_error_at_the_same_location_is_final(one: RpcmpError, again: RpcmpError) -> None:
    assert location(one) == location(again)
    first = after([one])
    assert first.error is None
    decision = after([one, again])
    assert decision == Decision(again, 0.0, first.history)


def test_alternating_locations_are_final_when_the_first_one_returns() -> None:
    one, other = raised(step=3), raised(step=4)
    decision = after([one, other, one])
    assert decision.error is one
    assert decision.history.restarts == 2


def test_a_location_is_remembered_across_other_faults() -> None:
    decision = after([raised(), WorkerDiedError("gone"), hung(), raised()])
    assert isinstance(decision.error, StageError)


@pytest.mark.parametrize(
    "error",
    [
        DeviceLostError("s0", "forward", "ECC"),
        WorkerDiedError("gone"),
        hung(),
        UnreachableError("no answer"),
        BusyError("busy"),
    ],
)
def test_a_lost_process_has_no_location_and_may_repeat(error: RpcmpError) -> None:
    assert location(error) is None
    decision = after([error] * MAX_RESTARTS)
    assert decision.error is None
    assert decision.history == FaultHistory(MAX_RESTARTS)


def test_a_repeated_location_is_reported_even_if_restarts_are_used_up() -> None:
    decision = decide(
        raised(), FaultHistory(MAX_RESTARTS, frozenset({location(raised()) or ()})), 5, True
    )
    assert isinstance(decision.error, StageError)


# How often


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("max_restarts", [0, 1, 5, 20])
def test_restarts_without_a_new_step_are_limited(max_restarts: int, has_begun: bool) -> None:
    lost = WorkerDiedError("the worker of stage 's0' is gone")
    decision = after([lost] * (max_restarts + 1), max_restarts, has_begun)
    assert isinstance(decision.error, RecoveryTimeoutError)
    assert str(decision.error) == (
        f"gave up after {max_restarts} restarts without a new step; the last: {lost}"
    )
    assert errors.exit_code(decision.error) == 75
    assert decision.history.restarts == max_restarts


def test_errors_of_every_kind_count_together() -> None:
    found = [WorkerDiedError("gone"), raised(step=1), hung(), raised(step=2), JobError("data")]
    assert after(found).error is None
    assert isinstance(after([*found, raised(step=3)]).error, RecoveryTimeoutError)


def test_pauses_grow_and_are_bounded() -> None:
    pauses, history = [], FaultHistory()
    for _ in range(40):
        decision = decide(WorkerDiedError("gone"), history, 100, True)
        assert decision.error is None
        pauses.append(decision.pause)
        history = decision.history
    assert pauses[:5] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert pauses[5:] == [LONGEST_PAUSE] * 35


def test_thousands_of_restarts_keep_a_bounded_pause() -> None:
    decision = decide(WorkerDiedError("gone"), FaultHistory(restarts=1025), 10_000, True)
    assert (decision.error, decision.pause) == (None, LONGEST_PAUSE)


# The first group


def test_our_own_servers_are_not_the_users_to_mend() -> None:
    error = UnreachableError("no answer for 6 s")
    decision = decide(error, FaultHistory(), MAX_RESTARTS, has_begun=False, is_local=True)
    assert decision.error is None
