"""Layers that move between stages: a run ends as one whose layers stay where they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rpcmp.observability.events import (
    CheckpointEvent,
    MeasuringEvent,
    RebalanceEvent,
    RecoveredEvent,
    ResumedEvent,
    StepEvent,
    WarningEvent,
)
from tests.support.controlplane.cluster import Cluster, Committed, in_event_loop

AUTO = 'rebalance="auto"'

FIRST, OTHER = [4, 1, 1], [1, 4, 1]


@in_event_loop
async def test_layers_move_there_and_back(tmp_path: Path, undisturbed: Committed) -> None:
    async with Cluster(tmp_path, stages=3) as cluster:
        cluster.move_after(4, OTHER)
        cluster.move_after(9, FIRST)
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=FIRST))
    assert run.moves == [("moved", OTHER, FIRST), ("moved", FIRST, OTHER)]
    assert run.committed == undisturbed
    assert run.repeated == 0


@in_event_loop
async def test_snapshots_of_some_steps_cost_no_more_than_those_between(
    tmp_path: Path, undisturbed: Committed
) -> None:
    """A pause takes one, so that nothing is repeated."""
    async with Cluster(tmp_path, stages=3) as cluster:
        cluster.move_after(5, OTHER)
        config = cluster.config(AUTO, "recovery.mirror_every_steps=3", steps=40, balance=FIRST)
        run = await cluster.drive(config)
    assert run.moves == [("moved", OTHER, FIRST)]
    assert run.committed == undisturbed
    assert run.repeated == 0


@pytest.mark.parametrize("lost", ["worker", "server"])
@in_event_loop
async def test_a_fault_before_the_first_step_undoes_the_change(
    tmp_path: Path, undisturbed: Committed, lost: str
) -> None:
    async with Cluster(tmp_path, stages=3) as cluster:
        cluster.move_after(4, OTHER)
        if lost == "worker":
            cluster.fail_at(1, 5, "SIGKILL")
        else:
            cluster.fail_at(1, 5, "hang")
            cluster.lose_at(1, 5)
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=FIRST))
    assert run.moves == [("undone", FIRST, OTHER)]
    assert run.committed == undisturbed


@pytest.mark.parametrize("why", ["has 6 layers", "fits no other cut"])
@in_event_loop
async def test_a_balance_with_which_no_group_forms_is_undone_and_says_why(
    tmp_path: Path, undisturbed: Committed, why: str
) -> None:
    balance = [1, 1, 1] if why == "has 6 layers" else OTHER
    async with Cluster(tmp_path, stages=3) as cluster:
        cluster.move_after(4, balance)
        if balance == OTHER:
            cluster.fail_at(1, 0, "refusal", "build", after=1)
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=FIRST))
    assert run.moves == [("undone", FIRST, balance)]
    assert why in run.only(RebalanceEvent).reason
    assert run.committed == undisturbed


@in_event_loop
async def test_a_fault_after_the_first_step_keeps_the_new_balance(
    tmp_path: Path, undisturbed: Committed
) -> None:
    """The servers then hold snapshots of both cuts, and perhaps no step of one of them."""
    async with Cluster(tmp_path, stages=3) as cluster:
        cluster.move_after(4, OTHER)
        cluster.fail_at(2, 6, "SIGKILL")
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=FIRST))
    assert run.moves == [("moved", OTHER, FIRST)]
    assert run.only(RecoveredEvent).step == 5
    assert run.committed == undisturbed


@in_event_loop
async def test_checkpoints_after_a_change_resume_under_any_balance(
    tmp_path: Path, undisturbed: Committed
) -> None:
    saves = ("checkpoint.dir=saved", "checkpoint.every_steps=10")
    async with Cluster(tmp_path, stages=3) as cluster:
        cluster.move_after(14, OTHER)
        run = await cluster.drive(cluster.config(AUTO, *saves, steps=25, balance=FIRST))
        assert [event.step for event in run.of(CheckpointEvent)] == [10, 20, 25]
        config = cluster.config(*saves, steps=40, balance=[2, 2, 2])
        resumed = await cluster.drive(config, start="resume")
    assert resumed.only(ResumedEvent).step == 25
    assert resumed.committed == (undisturbed[0][25:], undisturbed[1])


SLOWED = 50


async def change_of_slowed(cluster: Cluster, rebalance: str, balance: list[int]) -> RebalanceEvent:
    """Run a job until it says that its second host has become three times as slow."""

    async def slow_down() -> None:
        cluster.servers[1].forks.slowness = 3.0

    cluster.at(SLOWED, slow_down)
    cluster.hold(300, lambda: cluster.run.of(RebalanceEvent))
    config = cluster.config(f'rebalance="{rebalance}"', steps=320, balance=balance)
    run = await cluster.drive(config)
    change = run.of(RebalanceEvent)[0]
    assert change.step > SLOWED
    return change


@pytest.mark.parametrize(("rebalance", "outcome"), [("auto", "moved"), ("suggest", "suggested")])
@in_event_loop
async def test_a_host_that_has_become_slower_is_noticed(
    tmp_path: Path, rebalance: str, outcome: str
) -> None:
    async with Cluster(tmp_path) as cluster:
        change = await change_of_slowed(cluster, rebalance, [3, 3])
    assert change.outcome == outcome
    assert (change.before, change.balance) == ([3, 3], [5, 1])
    assert "stage 'stage1' computes" in change.reason


@in_event_loop
async def test_which_layers_move_is_known_where_hosts_were_measured(tmp_path: Path) -> None:
    """The fourth layer takes most of the time: without it, its stage has nothing to give away.

    Layers of equal times would be cut [5, 1]; these not before a host is five times as slow.
    """
    async with Cluster(tmp_path) as cluster:
        for number, tenths in enumerate([1, 1, 1, 12, 2, 1]):
            cluster.group.layer_seconds[f"layer{number}"] = tenths / 10
        change = await change_of_slowed(cluster, "auto", [3, 3])
    assert change.balance == [4, 2]


@in_event_loop
async def test_a_run_whose_hosts_cannot_be_measured_says_so_and_trains(
    tmp_path: Path, undisturbed: Committed
) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.fail_at("task", 0, "exception", "profile", times=9)
        run = await cluster.drive(cluster.config('rebalance="suggest"', steps=40, balance=[3, 3]))
    names = [type(event) for event in run.events]
    assert names.index(MeasuringEvent) < names.index(WarningEvent) < names.index(StepEvent)
    assert run.only(WarningEvent).text.startswith(
        "the hosts could not be measured, so `rebalance` takes them for equally fast"
    )
    assert run.committed == undisturbed
