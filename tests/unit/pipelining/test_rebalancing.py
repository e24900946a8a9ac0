"""Noticing slower hosts, on machines whose times are computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rpcmp.config.schema import Config
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.partition import StageHost
from rpcmp.pipelining.rebalancing import BalanceWatch, Proposal
from rpcmp.pipelining.simulation import ActionTimes
from tests.support.profiles import host, layer
from tests.support.settings import chain

MICROBATCHES = 4
LAYER_S = 0.01
"""Of one layer and micro-batch, on a host of usual speed."""

FORMS_S = 2.0
ENOUGH = 10_000
"""Steps until the end of a run that can afford anything."""


@dataclass
class Step:
    """A step as its event tells."""

    step: int
    step_s: float
    busy_seconds: Mapping[str, Mapping[str, float]]
    samples_per_s: float
    data_share: float = 0.0
    core_seconds: Mapping[str, Mapping[str, float]] | None = None


@dataclass
class Machine:
    """A chain of two stages with equal layers, whose hosts have a speed each."""

    watch: BalanceWatch
    config: Config
    balance: list[int]
    slowness: list[float] = field(default_factory=lambda: [1.0, 1.0])
    data_share: float = 0.0
    samples: int = 16
    number: int = 0
    layer_s: float = LAYER_S

    def times(self, balance: Sequence[int]) -> dict[str, ActionTimes]:
        return {
            name: ActionTimes(*3 * [count * slowness * self.layer_s / 3])
            for name, count, slowness in zip(
                self.config.stage_names, balance, self.slowness, strict=True
            )
        }

    def step_s(self, balance: Sequence[int]) -> float:
        times = self.times(balance)
        return cost_model.step_seconds(self.config, times, dict.fromkeys(times, 0.0))

    def run(self, steps: int = 150, left: int = ENOUGH, lost: str = "") -> Proposal | None:
        """Do steps until one of them suggests something."""
        busy = {
            name: {"F": MICROBATCHES * each.forward, "B": MICROBATCHES * 2 * each.backward}
            for name, each in self.times(self.balance).items()
            if name != lost
        }
        seconds = self.step_s(self.balance)
        for _ in range(steps):
            self.number += 1
            step = Step(self.number, seconds, busy, self.samples / seconds, self.data_share)
            if (proposal := self.watch.add(step, left)) is not None:
                return proposal
        return None

    def suggested(self) -> Proposal:
        """Do steps until one of them suggests something, as it has to."""
        proposal = self.run()
        assert proposal is not None
        return proposal

    def move(self, balance: list[int], cost_s: float = FORMS_S) -> None:
        self.balance = balance
        self.watch.start(balance, cost_s)


def machine(hosts: Sequence[StageHost] = (), layer_s: float = LAYER_S, **changed: Any) -> Machine:
    """Return a machine that has settled, unless `hosts` say otherwise."""
    config = chain(schedule="1f1b", **changed)
    made = Machine(BalanceWatch(config, hosts), config, [3, 3], layer_s=layer_s)
    made.move([3, 3])
    assert made.run() is None
    return made


def slowed(slowness: list[float], hosts: Sequence[StageHost] = (), **changed: Any) -> Machine:
    """Return a machine whose hosts have become so slow since it has settled."""
    made = machine(hosts, **changed)
    made.slowness = slowness
    return made


def test_layers_leave_a_host_that_has_become_slower() -> None:
    made = slowed([1.0, 2.0])
    proposal = made.suggested()
    assert proposal.balance == [4, 2]
    assert "stage 'stage1' computes 2.00 times as long" in proposal.reason
    made.move(proposal.balance)
    assert made.run() is None
    made.slowness = [1.0, 1.0]  # whatever it was has ended
    proposal = made.suggested()
    assert proposal.balance == [3, 3]
    assert "computes 0.50 times as long" in proposal.reason


def test_measured_layers_say_which_ones_to_move() -> None:
    """The last three layers of the model take 1, 1 and 10 parts of its time."""
    seconds = [4.0, 4.0, 4.0, 1.0, 1.0, 10.0]
    layers = [layer(LAYER_S * 3 * each / 12) for each in seconds]
    hosts = [host(layers, index, num_microbatches=MICROBATCHES) for index in range(2)]
    assert slowed([1.0, 2.0], hosts).suggested().balance == [5, 1]


@pytest.mark.parametrize("limits", [(350, None), (50, 50)])
def test_what_does_not_fit_into_memory_is_not_proposed_even_if_what_runs_does_not_either(
    limits: tuple[int | None, int | None],
) -> None:
    layers = [layer(LAYER_S, state=100) for _ in range(6)]
    hosts = [
        host(layers, index, limit=limit, num_microbatches=MICROBATCHES)
        for index, limit in enumerate(limits)
    ]
    assert slowed([1.0, 2.0], hosts).run() is None  # the first has no room for a fourth layer


def test_a_stage_that_waits_for_a_slower_one_is_not_faster() -> None:
    """With pauses, a host with a processor limit computes faster; with more layers it would not."""
    assert slowed([2.0, 0.6]).suggested().balance == [2, 4]


@pytest.mark.parametrize("slowness", [[1.0, 1.1], [1.0, 1.2], [1.15, 1.2], [2.0, 2.0]])
def test_a_small_change_is_none_and_neither_is_one_of_all_hosts(slowness: list[float]) -> None:
    assert slowed(slowness).run() is None


def test_a_short_change_is_none() -> None:
    made = machine()
    for _ in range(10):
        made.slowness = [1.0, 2.0]
        assert made.run(steps=8) is None
        made.slowness = [1.0, 1.0]
        assert made.run(steps=20) is None


def test_what_does_not_pay_back_is_not_proposed() -> None:
    assert slowed([1.0, 2.0]).run(left=5) is None
    assert slowed([1.0, 2.0], rebalance_within=5).run() is None


def test_steps_that_wait_for_samples_are_not_the_hosts_fault() -> None:
    made = slowed([1.0, 2.0])
    made.data_share = 0.6
    assert made.run() is None


def test_smaller_mini_batches_and_lost_reports_do_not_count() -> None:
    made = slowed([1.0, 2.0])
    made.samples = 7
    assert made.run() is None
    made.samples = 16
    assert made.run(lost="stage1") is None
    assert made.run() is not None


def test_a_fault_does_not_make_slow_hosts_usual() -> None:
    made = slowed([1.0, 2.0])
    assert made.run(steps=8) is None
    made.move([3, 3])
    assert made.suggested().balance == [4, 2]


def moved(slowness: list[float]) -> Machine:
    """Return a machine whose second host has become slow, after layers have left it."""
    made = slowed([1.0, 2.0])
    made.move(made.suggested().balance)
    made.slowness = slowness
    return made


def test_a_balance_that_is_not_faster_is_given_up_and_not_proposed_again() -> None:
    made = moved([2.0, 2.0])  # the layers that have moved are slow there, too
    refused = made.balance
    back = made.suggested()
    assert back.balance == [3, 3]
    assert "before" in back.reason
    made.move(back.balance)
    assert made.watch.refused == [refused]
    made.slowness = [1.0, 2.0]
    assert made.run(steps=1000) is None


@pytest.mark.parametrize("slowness", [[2.0, 4.0], [1.3, 2.6]])
def test_hosts_that_have_changed_meanwhile_do_not_undo_a_move(slowness: list[float]) -> None:
    """The balance before would be slower still, though its steps were faster then."""
    assert moved(slowness).run() is None


def test_the_first_steps_of_a_balance_may_suggest_a_further_one() -> None:
    made = moved([1.0, 6.0])
    proposal = made.suggested()
    assert proposal.balance == [5, 1]
    assert "3.00 times as long as it was expected" in proposal.reason
    made.move(proposal.balance)
    assert made.run() is None
    assert made.watch.refused == []
    made.slowness = [1.0, 1.0]  # which is known from before its layers left
    assert made.suggested().balance == [3, 3]


@pytest.mark.parametrize(("step_s", "most"), [(0.02, 100), (0.5, 9), (1.0, 6), (2.0, 3), (5.0, 3)])
def test_long_steps_are_not_waited_for(step_s: float, most: int) -> None:
    """A changed host is known after three blocks, of a second or more, and three steps or more, if
    these do not take longer than three seconds."""
    made = slowed([1.0, 2.0], layer_s=LAYER_S * step_s / machine().step_s([3, 3]))
    before = made.number
    assert made.run() is not None
    assert made.number - before <= most


def test_going_back_has_to_pay_and_is_not_to_a_refused_balance() -> None:
    assert moved([2.0, 2.0]).run(left=5) is None
    made = moved([2.0, 2.0])
    made.watch.refused.append([3, 3])
    assert made.run() is None


def test_a_balance_that_the_user_has_asked_for_is_the_users_to_judge() -> None:
    made = machine()
    made.move([1, 5])
    assert made.run() is None


def test_at_most_four_moves_follow_from_a_change() -> None:
    made, moves = machine(), 0
    for _ in range(20):
        most = made.balance.index(max(made.balance))
        # Whoever has most layers turns out to be slow with them.
        made.slowness = [4.0 if index == most else 1.0 for index in range(2)]
        if (proposal := made.run(steps=40)) is not None:
            moves += 1
            made.move(proposal.balance)
    assert 2 <= moves <= 4


def test_moves_come_to_an_end_if_the_host_that_gets_layers_is_the_slow_one() -> None:
    made, moves = machine(), 0
    for _ in range(20):
        made.slowness = [2.0, 1.0] if made.balance[0] > 3 else [1.0, 2.0]
        if (proposal := made.run()) is not None:
            moves += 1
            made.move(proposal.balance)
    assert moves <= 4


def test_a_stage_with_limited_memory_gets_no_layers_of_unknown_sizes() -> None:
    config = chain(
        schedule="1f1b", stages=[{"name": "stage0", "memory": "1GB"}, {"name": "stage1"}]
    )
    limited = Machine(BalanceWatch(config), config, [3, 3])
    limited.move([3, 3])
    assert limited.run() is None
    limited.slowness = [1.0, 2.0]
    assert limited.run() is None
    limited.slowness = [2.0, 1.0]
    assert limited.run() is not None


def guessed(slowness: list[float], guesses: list[float]) -> Machine:
    """Return a machine that has just been formed of hosts whose speeds were guessed."""
    config = chain(schedule="1f1b")
    hosts = [
        host([layer(LAYER_S * guess) for _ in range(6)], index, num_microbatches=MICROBATCHES)
        for index, guess in enumerate(guesses)
    ]
    made = Machine(BalanceWatch(config, hosts, are_guessed=True), config, [3, 3], slowness)
    made.move([3, 3])
    return made


def test_the_first_steps_of_a_new_host_tell_its_speed() -> None:
    proposal = guessed([1.0, 2.0], [1.0, 1.0]).suggested()
    assert proposal.balance == [4, 2]
    assert "times as long as it was expected" in proposal.reason


def test_a_new_host_that_is_as_fast_as_was_guessed_keeps_its_layers() -> None:
    assert guessed([1.0, 1.0], [1.0, 1.0]).run() is None
    assert guessed([0.5, 0.5], [1.0, 1.0]).run() is None  # as against each other


def test_hosts_are_known_from_their_steps() -> None:
    watch = machine().watch
    assert [each.stage for each in watch.hosts] == ["stage0", "stage1"]
    seconds = [each.seconds(0, 6) for each in watch.hosts]
    assert seconds == pytest.approx(2 * [6 * MICROBATCHES * LAYER_S])
    assert BalanceWatch(chain(schedule="1f1b")).hosts == []
