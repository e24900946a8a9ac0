"""The progress of rounds, which run in strict order, whichever starts first."""

from __future__ import annotations

from collections.abc import Iterable

from rpcmp.pipelining.schedule import Action, InFlightLimits
from rpcmp.rpc.messages import Mode
from rpcmp.worker.executor import RoundQueue, RoundState, Task
from tests.support.rounds import header

F, B, W = Action


def a_round(num_bundles: int = 1, training: bool = True) -> RoundState:
    mode = Mode.TRAIN if training else Mode.EVALUATE
    limits = InFlightLimits(4, 4, splits=True)
    return RoundState(header(1, num_bundles, mode=mode), range(num_bundles), limits)


def begun(*numbers: int) -> RoundQueue:
    """Return a queue in which these rounds have started, in this order."""
    rounds = RoundQueue()
    for number in numbers:
        rounds.start(number, a_round)
    return rounds


def task() -> Task:
    return Task([], 0)


def finish(found: RoundState, actions: Iterable[Action]) -> None:
    """Take all actions of these kinds from a round."""
    for action in actions:
        for microbatch in range(len(found.bundles)):
            found.ready[action, microbatch] = task()
            found.take(action)


# One round.


def test_only_the_next_action_of_a_kind_is_ready() -> None:
    found = a_round(num_bundles=2)
    found.ready[F, 1] = task()
    assert not found.is_ready(F)
    found.ready[F, 0] = first = task()
    assert found.is_ready(F)
    assert found.take(F) is first
    assert found.is_ready(F)
    assert not found.is_ready(B)


def test_progress_counts_done_and_ready_actions() -> None:
    found = a_round(num_bundles=3)
    finish(found, [F])
    found.ready[B, 0] = task()
    found.take(B)
    progress = found.progress()
    assert (progress.num_microbatches, progress.forwards, progress.backwards) == (3, 3, 1)
    assert (progress.weights, progress.forward_ready, progress.backward_ready) == (0, False, False)
    found.ready[B, 1] = task()
    assert found.progress().backward_ready


def test_a_training_round_ends_with_its_last_weight_gradient() -> None:
    found = a_round(num_bundles=2)
    for actions, is_local, is_complete in (([F], 0, 0), ([B], 1, 0), ([W], 1, 1)):
        finish(found, actions)
        assert (found.is_done(B), found.is_done(W)) == (is_local, is_complete)


def test_an_evaluation_ends_with_its_last_forward() -> None:
    found = a_round(num_bundles=2, training=False)
    assert not found.is_done(B)
    finish(found, [F])
    assert found.is_done(B)
    assert found.is_done(W)


# Rounds.


def test_rounds_run_in_order_even_if_a_later_one_starts_first() -> None:
    rounds = begun(2)
    assert rounds.current is None
    rounds.start(1, a_round)
    assert rounds.current is rounds.get(1)
    rounds.complete()
    assert rounds.current is rounds.get(2)
    rounds.complete()
    assert rounds.current is None


def test_a_complete_round_is_not_started_again() -> None:
    rounds = begun(1)
    first = rounds.get(1)
    rounds.start(1, a_round)
    assert rounds.get(1) is first
    rounds.complete()
    rounds.start(1, a_round)
    assert rounds.get(1) is None
    assert rounds.current is None


def test_an_abort_returns_waiting_tasks_and_goes_on_with_the_next_round() -> None:
    rounds = begun(1, 2, 3)
    waiting = []
    for number in (1, 2, 3):
        found = rounds.get(number)
        assert found is not None
        found.ready[F, 0] = task()
        waiting.append(found.ready[F, 0])
    assert rounds.abort(1, 2) == waiting[:2]
    assert rounds.current is rounds.get(3)
    assert rounds.current is not None
    assert rounds.get(1) is rounds.get(2) is None


def test_an_abort_lets_the_earlier_round_end_and_is_then_skipped() -> None:
    rounds = begun(1, 2)
    assert rounds.abort(2, 3) == []
    assert rounds.current is rounds.get(1)
    assert rounds.current is not None
    rounds.start(4, a_round)
    rounds.complete()
    assert rounds.current is rounds.get(4)
    assert rounds.current is not None


def test_an_aborted_round_never_starts() -> None:
    rounds = begun(1)
    rounds.abort(2, 2)
    rounds.start(2, a_round)
    assert rounds.get(2) is None
    rounds.complete()
    rounds.start(2, a_round)
    assert rounds.get(2) is None


def test_rounds_that_are_over_cannot_be_aborted() -> None:
    rounds = begun(1, 2)
    rounds.complete()
    rounds.abort(1, 1)
    rounds.abort(1, 1)
    assert rounds.current is rounds.get(2)
    assert rounds.current is not None
