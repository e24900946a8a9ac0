"""Hosts that join and leave a run: it ends with the losses and the parameters of one that stays."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from rpcmp.job import driver_record, membership
from rpcmp.job.driver_record import invitation
from rpcmp.job.server_calls import drain, join
from rpcmp.net.security import Security
from rpcmp.observability.events import (
    FaultEvent,
    GenerationEvent,
    LogEvent,
    RecoveredEvent,
    ReplacedEvent,
    ResumedEvent,
    RunEvent,
    SummaryEvent,
    WarningEvent,
)
from rpcmp.server.driver_memory import DriverMemory
from rpcmp.v1 import control_pb2 as pb
from tests.support.controlplane import cluster as controlplane
from tests.support.controlplane.cluster import Call, Cluster, Committed, Server, in_event_loop
from tests.support.lan import cli, issue

AUTO = 'rebalance="auto"'


def joins(new: Server, server: Server, seconds: float = 20.0) -> Call:
    return lambda: join(new.address, server.address, Security(), seconds)


def leaves(server: Server) -> Call:
    return lambda: drain(server.address, False, Security(), leaves=True)


@in_event_loop
async def test_a_host_joins_and_another_leaves(tmp_path: Path, undisturbed: Committed) -> None:
    async with Cluster(tmp_path) as cluster:
        first, second = cluster.servers
        spare = await cluster.serve(None)
        cluster.at(8, joins(spare, first))
        cluster.hold(20, lambda: cluster.run.generation >= 2)
        cluster.at(24, leaves(second))
        cluster.hold(36, lambda: cluster.run.generation >= 3)
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=[3, 3]))
        await second.ending
    assert run.committed == undisturbed
    assert run.stages == [["stage0", "stage2", "stage1"], ["stage0", "stage2"]]
    assert run.moves[0] == ("moved", [2, 2, 2], [3, 3])
    assert run.repeated <= 1


@in_event_loop
async def test_only_who_was_invited_by_a_driver_joins(
    tmp_path: Path, undisturbed: Committed
) -> None:
    """A stage's server that tells of a spare by itself, or of one that joined another run."""
    certs = issue(tmp_path / "certs", "127.0.0.1", "127.0.0.1")
    cli(certs, "issue", "--spare", "--host", "127.0.0.1")
    mine = Security(certs / "driver")
    async with Cluster(tmp_path, certs=certs) as cluster:
        first, second = cluster.servers
        spare, invited = await cluster.serve(None), await cluster.serve(None)

        async def tell() -> None:
            claim = first.served.claim
            assert claim is not None
            now, job_id = int(time.time()), first.served.driver.job_id
            for forged in (
                pb.JoinRequest(address=spare.address, at=now),
                invitation(mine, "another run", spare.address, now),
                invitation(mine, job_id, spare.address, now - 3600),
            ):
                await claim.take_in(forged)
            await join(invited.address, second.address, mine, 0.0)

        cluster.at(8, tell)
        cluster.hold(20, lambda: cluster.run.generation >= 2)
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=[3, 3]))
        assert spare.served.driver.job_id == ""
    assert run.committed == undisturbed
    assert run.stages == [["stage0", "stage2", "stage1"]]
    told = [event.text for event in run.of(LogEvent) if "no driver has invited" in event.text]
    assert [text.partition("run: ")[2] for text in told] == [
        "no driver has signed it",
        "its signature is of something else",
        "its invitation is of another time: ask again, or set the clocks of both hosts",
    ]


@pytest.mark.parametrize("lost", ["worker", "server"])
@in_event_loop
async def test_the_first_stage_leaves_and_another_host_is_lost_at_once(
    tmp_path: Path, undisturbed: Committed, lost: str
) -> None:
    """What only a mirror has of the host that left must be there until all have new snapshots."""
    async with Cluster(tmp_path, stages=3) as cluster:
        first, _, third = cluster.servers
        config = cluster.config(AUTO, steps=40)
        cluster.at(8, leaves(first))
        cluster.hold(20, lambda: cluster.run.generation >= 2)

        async def strike(_: GenerationEvent) -> None:
            if lost == "worker":
                third.worker.strike(signal.SIGKILL)
            else:
                await third.lose()
                await cluster.replace(2)

        cluster.when(GenerationEvent, 2, strike)
        run = await cluster.drive(config)
    assert run.committed == undisturbed
    assert run.stages == [["stage1", "stage2"]]
    assert run.only(RecoveredEvent).step >= run.of(GenerationEvent)[1].step - 1
    assert run.repeated <= 1


@pytest.mark.parametrize("tries", [1, 2])
@in_event_loop
async def test_a_host_that_is_lost_while_it_joins_has_not_joined_and_may_try_again(
    tmp_path: Path, undisturbed: Committed, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    monkeypatch.setattr(membership, "REFUSED_SECONDS", 0.0)
    async with Cluster(tmp_path) as cluster:
        first, _ = cluster.servers
        spare = await cluster.serve(None)
        cluster.fail_at("stage2", 0, "SIGKILL", "join")
        cluster.at(8, joins(spare, first))
        cluster.hold(20, lambda: cluster.run.moves)
        if tries == 2:
            cluster.at(24, joins(spare, first))
            cluster.hold(36, lambda: cluster.run.generation >= 3)
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=[3, 3]))
    assert run.committed == undisturbed
    assert run.moves[0] == ("undone", [3, 3], [2, 2, 2])
    if tries == 2:
        assert run.moves[1] == ("moved", [2, 2, 2], [3, 3])
        assert run.stages[-1] == ["stage0", "stage3", "stage1"]


@in_event_loop
async def test_a_complete_run_stays_so_if_a_host_joins_then(
    tmp_path: Path, undisturbed: Committed
) -> None:
    async with Cluster(tmp_path) as cluster:
        spare = await cluster.serve(None)
        cluster.at(40, joins(spare, cluster.servers[0]))
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=[3, 3]))
    assert run.committed == undisturbed
    assert not run.only(SummaryEvent).is_cut_short


@pytest.mark.parametrize("how", ["lost", "drained"])
@in_event_loop
async def test_the_others_take_over_the_layers_of_a_host_that_is_gone(
    tmp_path: Path, undisturbed: Committed, how: str
) -> None:
    async with Cluster(tmp_path, stages=3) as cluster:
        second = cluster.servers[1]
        drained = lambda: drain(second.address, False, Security())  # noqa: E731
        cluster.at(8, second.lose if how == "lost" else drained)
        cluster.hold(20, lambda: cluster.run.generation >= 2)
        config = cluster.config(AUTO, "recovery.replace_after=0.1", steps=40)
        run = await cluster.drive(config)
    assert run.committed == undisturbed
    assert run.stages == [["stage0", "stage2"]]
    assert run.repeated <= 1


@in_event_loop
async def test_a_spare_takes_the_stage_of_a_host_that_leaves(
    tmp_path: Path, undisturbed: Committed
) -> None:
    """At once, whatever `replace_after` says; and that host is no longer waited for."""
    async with Cluster(tmp_path) as cluster:
        spare = await cluster.serve(None)
        cluster.at(8, leaves(cluster.servers[1]))
        cluster.hold(20, lambda: cluster.run.generation >= 2)
        spares = f"recovery.spares=['{spare.address}']"
        run = await cluster.drive(cluster.config(AUTO, spares, steps=40, balance=[3, 3]))
    assert run.committed == undisturbed
    assert run.only(ReplacedEvent).address == spare.address
    assert run.stages == []


@in_event_loop
async def test_a_host_that_leaves_waits_while_the_driver_is_heard(
    tmp_path: Path, undisturbed: Committed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that takes longer than any limit ends before it goes."""
    heard: list[DriverMemory] = []
    record = DriverMemory.record

    def noted(memory: DriverMemory, request: pb.RecordRequest) -> None:
        heard.append(memory)
        record(memory, request)

    monkeypatch.setattr(DriverMemory, "record", noted)
    monkeypatch.setattr(driver_record, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(controlplane, "DRAIN_SECONDS", 1.0)
    async with Cluster(tmp_path) as cluster:
        leaving = cluster.servers[1]
        cluster.at(8, leaves(leaving))
        cluster.hold(9, lambda: len(heard) > 300)  # of two servers, each in 0.01 s
        run = await cluster.drive(cluster.config(AUTO, steps=40, balance=[3, 3]))
        await leaving.ending
    assert run.committed == undisturbed
    assert run.of(FaultEvent) == []


@in_event_loop
async def test_one_host_after_the_other_leaves(tmp_path: Path, undisturbed: Committed) -> None:
    """The second is told to as soon as the first has ended, whose layers it may have."""
    async with Cluster(tmp_path, stages=3) as cluster:
        first, second, _ = cluster.servers

        async def leave_one_by_one() -> None:
            await leaves(first)()
            await first.ending
            await leaves(second)()

        cluster.at(8, leave_one_by_one)
        cluster.hold(20, lambda: cluster.run.generation >= 2)
        cluster.hold(32, lambda: cluster.run.generation >= 3)
        run = await cluster.drive(cluster.config(AUTO, steps=40))
    assert run.committed == undisturbed
    assert run.stages[-1] == ["stage2"]
    assert run.repeated <= 1


@in_event_loop
async def test_checkpoints_of_other_stages_resume_under_the_configs_own(
    tmp_path: Path, undisturbed: Committed
) -> None:
    async with Cluster(tmp_path) as cluster:
        spare = await cluster.serve(None)
        saves = (AUTO, "checkpoint.dir=saved", "checkpoint.every_steps=10")
        cluster.at(8, joins(spare, cluster.servers[0]))
        cluster.hold(18, lambda: cluster.run.generation >= 2)
        run = await cluster.drive(cluster.config(*saves, steps=30, balance=[3, 3]))
        assert run.stages == [["stage0", "stage2", "stage1"]]
        config = cluster.config(*saves, steps=40, balance=[3, 3])
        resumed = await cluster.drive(config, start="resume")
    assert resumed.only(ResumedEvent).step == 30
    assert resumed.committed == (undisturbed[0][30:], undisturbed[1])


@in_event_loop
async def test_another_driver_goes_on_with_the_stages_that_the_run_had(
    tmp_path: Path, undisturbed: Committed
) -> None:
    async with Cluster(tmp_path) as cluster:
        first, second = cluster.servers
        spare = await cluster.serve(None)
        cluster.at(8, joins(spare, second))
        cluster.hold(16, lambda: cluster.run.generation >= 2)
        cluster.at(18, leaves(first))
        cluster.hold(26, lambda: cluster.run.generation >= 3)
        config = cluster.config(AUTO, steps=40, balance=[3, 3])
        await cluster.drive(config, lost_at=30, holders=[spare, second])
        run = await cluster.drive(config, start="resume")
    resumed = run.only(ResumedEvent)
    assert resumed.from_memory
    assert resumed.step >= 29
    assert run.committed == (undisturbed[0][resumed.step :], undisturbed[1])
    (graph,) = [event.workers for event in run.of(RunEvent)]
    assert [worker["stage"] for worker in graph] == ["stage2", "stage1"]


@in_event_loop
async def test_a_host_that_cannot_join_is_told_why(tmp_path: Path, undisturbed: Committed) -> None:
    """One that is a spare of the run already, and one more than there are layers."""
    async with Cluster(tmp_path) as cluster:
        spare, more = await cluster.serve(None), await cluster.serve(None)
        for step, each in ((4, spare), (8, more)):
            cluster.at(step, joins(each, cluster.servers[0], seconds=0.0))
        cluster.hold(12, lambda: len(refusals(cluster)) == 2)
        config = cluster.config(AUTO, f"recovery.spares=['{spare.address}']", balance=[1, 1])
        await cluster.drive(config)
        assert refusals(cluster) == [
            f"{spare.address} cannot join the run: it is one of `recovery.spares`, and stays one",
            f"{more.address} cannot join the run: each stage has but one layer already",
        ]


def refusals(cluster: Cluster) -> list[str]:
    return [e.text for e in cluster.run.of(WarningEvent) if "cannot join" in e.text]
