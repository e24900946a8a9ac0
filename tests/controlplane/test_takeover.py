"""A driver is lost: another one goes on from what the stage servers hold, and only one."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest

from rpcmp.errors import (
    BusyError,
    InterruptedJobError,
    SavingError,
    TakenOverError,
    UnreachableError,
    exit_code,
)
from rpcmp.job import takeover
from rpcmp.job.driver_record import end_of, signed
from rpcmp.job.server_pool import ServerPool
from rpcmp.job.takeover import identity_of
from rpcmp.net.security import Security
from rpcmp.observability.events import (
    CheckpointEvent,
    GenerationEvent,
    RecoveredEvent,
    ReplacedEvent,
    ResumedEvent,
    RunEvent,
    StepEvent,
    SummaryEvent,
    WaitingEvent,
    WarningEvent,
)
from rpcmp.server import driver_memory
from rpcmp.v1 import control_pb2 as pb
from tests.support.controlplane.cluster import Cluster, Run, in_event_loop, reference
from tests.support.lan import issue


def assert_goes_on(before: Run, after: Run, generation: int = 2) -> None:
    """Check that the next driver began where the servers were, and ended with the same bits."""
    resumed = after.only(ResumedEvent)
    assert resumed.from_memory
    assert resumed.step >= before.step - 1
    assert after.committed == reference(after=resumed.step)
    assert after.only(GenerationEvent).generation == generation


def states(cluster: Cluster) -> list[str]:
    return [server.state for server in cluster.servers]


@in_event_loop
async def test_another_driver_goes_on_where_the_servers_are(tmp_path: Path) -> None:
    """From another folder, as on another host, where there are no checkpoints."""
    async with Cluster(tmp_path) as cluster:
        config = cluster.config()
        before = await cluster.drive(config, lost_at=5)
        assert states(cluster) == ["holding", "holding"]
        (elsewhere := tmp_path / "elsewhere").mkdir()
        assert_goes_on(before, await cluster.drive(config.with_folder(elsewhere), start="resume"))
        assert states(cluster) == ["idle", "idle"]


@pytest.mark.parametrize(
    ("every", "ending", "error"), [(1, None, SavingError), (4, "SIGTERM", InterruptedJobError)]
)
@in_event_loop
async def test_steps_that_could_not_be_saved_are_held(
    tmp_path: Path, every: int, ending: str | None, error: type[Exception]
) -> None:
    """Whether the run ends for that, or by a signal meanwhile."""
    async with Cluster(tmp_path) as cluster:
        config = cluster.config("checkpoint.dir=saved", f"checkpoint.every_steps={every}")
        folder = tmp_path / "saved"
        failures = lambda: [e for e in cluster.run.of(WarningEvent) if "no chec" in e.text]  # noqa: E731

        async def obstruct(_: CheckpointEvent) -> None:
            folder.rename(tmp_path / "away")
            folder.write_text("a file in the way")
            if ending is not None:
                await cluster.until(failures)
                await cluster.interrupt(signal.Signals[ending])

        cluster.when(CheckpointEvent, 1, obstruct)
        cluster.hold(every + 1, folder.is_file)
        if ending is not None:
            cluster.hold(2 * every + 1, lambda: False)
        before = await cluster.drive(config)
        assert isinstance(before.error, error)
        assert "hold the newest steps for 600 s: the same command" in before.error.__notes__[0]
        await cluster.until(lambda: states(cluster) == ["holding", "holding"])
        folder.unlink()
        cluster.group.held.clear()
        assert_goes_on(before, await cluster.drive(config, start="resume"))


@in_event_loop
async def test_the_driver_and_a_server_are_lost(tmp_path: Path) -> None:
    """The neighbour's copy of the stage's snapshots is enough. A try that fails drops nothing."""
    async with Cluster(tmp_path) as cluster:
        config = cluster.config()
        before = await cluster.drive(config, lost_at=5)
        await cluster.servers[1].lose()
        failed = await cluster.drive(config, start="resume")
        assert isinstance(failed.error, UnreachableError)
        assert cluster.servers[1].address in str(failed.error)
        await cluster.replace(1)
        assert_goes_on(before, await cluster.drive(config, start="resume"))


@in_event_loop
async def test_a_spare_that_has_taken_a_stage_is_found(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        lost, spare = cluster.servers[1], await cluster.serve(None)
        cluster.at(4, lost.lose)
        cluster.hold(8, lambda: cluster.run.of(RecoveredEvent))
        spares = f"recovery.spares=['{spare.address}']"
        config = cluster.config(spares, "recovery.replace_after=0.1")
        before = await cluster.drive(config, lost_at=9, holders=[cluster.servers[0], spare])
        after = await cluster.drive(config, start="resume")
        assert_goes_on(before, after, generation=3)
        replaced = after.only(ReplacedEvent)
        assert (replaced.lost, replaced.address) == (lost.address, spare.address)


@in_event_loop
async def test_a_spare_has_its_turn_if_a_host_is_lost_with_the_driver(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        lost, spare = cluster.servers[1], await cluster.serve(None)
        spares = f"recovery.spares=['{spare.address}']"
        config = cluster.config(spares, "recovery.replace_after=0.1")
        before = await cluster.drive(config, lost_at=5)
        await lost.lose()
        after = await cluster.drive(config, start="resume")
        assert_goes_on(before, after)
        assert after.only(WaitingEvent).address == lost.address
        assert after.only(ReplacedEvent).address == spare.address


@in_event_loop
async def test_a_run_goes_on_from_its_last_checkpoint_if_that_is_newer(tmp_path: Path) -> None:
    """Than its last snapshot: those are taken every tenth step here, checkpoints every third."""
    async with Cluster(tmp_path) as cluster:
        saves = ("checkpoint.dir=saved", "checkpoint.every_steps=3")
        config = cluster.config(*saves, "recovery.mirror_every_steps=10")
        cluster.hold(
            7, lambda: len(cluster.run.of(CheckpointEvent)) == 2 or cluster.run.of(ResumedEvent)
        )
        await cluster.drive(config, lost_at=7)
        after = await cluster.drive(config, start="resume")
        assert after.only(ResumedEvent).step == 6
        assert after.committed == reference(after=6)


@in_event_loop
async def test_a_held_job_is_not_dropped_by_accident(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        config = cluster.config()
        await cluster.drive(config, lost_at=5)
        other = cluster.config("name=other")
        for refused in (
            await cluster.drive(config, "either"),
            await cluster.drive(other, start="resume"),
        ):
            assert isinstance(refused.error, BusyError)
            assert "holds job 'job' up to step" in str(refused.error)
            assert "`rpcmp drive --resume` with its config goes on with it" in str(refused.error)
        assert states(cluster) == ["holding", "holding"]
        fresh = await cluster.drive(other, start="fresh")
        assert fresh.committed == reference()
        assert fresh.only(GenerationEvent).generation == 1


@in_event_loop
async def test_a_driver_that_was_lost_while_it_ended_its_job_blocks_no_server(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path) as cluster:
        config = cluster.config()
        await cluster.drive(config, lost_at=5)
        async with cluster.client(cluster.servers[0]) as client:
            held = await client.recall()
            stop = pb.StopRequest(
                job_id=held.job_id, generation=held.generation, driver_id=held.driver_id
            )
            await client.stop(stop)
        assert states(cluster) == ["idle", "holding"]
        assert isinstance((await cluster.drive(config, "either")).error, BusyError)
        assert (await cluster.drive(config, start="resume")).committed == reference()


@pytest.mark.parametrize("lost", ["the driver", "its last call"])
@in_event_loop
async def test_a_complete_run_leaves_nothing_held(
    tmp_path: Path, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the servers are never asked to stop, since the driver, or the call, is lost."""
    async with Cluster(tmp_path) as cluster:
        config = cluster.config(steps=3)
        if lost == "the driver":
            cluster.when(SummaryEvent, 1, lambda _: cluster.lose_driver())
        stopped: list[str] = []

        async def stop(pool: ServerPool, label: str, *_: object) -> None:
            stopped.append(label)

        monkeypatch.setattr(ServerPool, "_try_stop", stop)
        run = await cluster.drive(config)
        assert run.only(SummaryEvent).steps == 3
        assert stopped == ["stage0", "stage1"][: None if lost == "its last call" else 0]
        await cluster.until(lambda: states(cluster) == ["idle", "idle"])


@in_event_loop
async def test_a_complete_run_is_known_again(tmp_path: Path) -> None:
    """Nothing is trained a second time, unless it is another run."""
    async with Cluster(tmp_path) as cluster:
        config = cluster.config(steps=3)
        before = await cluster.drive(config)
        again = await cluster.drive(config, start="resume")
        assert again.only(ResumedEvent).is_complete
        assert again.only(RunEvent).job_id == before.only(RunEvent).job_id
        assert again.committed == reference(3, after=3)
        first, second = (
            dataclasses.replace(run.only(SummaryEvent), time=0.0) for run in (before, again)
        )
        assert first == second
        traced = await cluster.drive(config, start="resume", trace=tmp_path / "trace.json")
        assert traced.committed == reference(3)
        (tmp_path / "another.py").write_text("")
        assert (await cluster.drive(config, start="resume")).committed == reference(3)
        longer = await cluster.drive(cluster.config(steps=4), start="resume")
        assert (longer.only(ResumedEvent).step, longer.committed) == (0, reference(4))
        assert (await cluster.drive(config, start="fresh")).committed == reference(3)


@in_event_loop
async def test_servers_are_idle_again_when_no_driver_comes(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.drive(cluster.config("recovery.keep_after_driver=0.2"), lost_at=5, holders=[])
        await cluster.until(lambda: states(cluster) == ["idle", "idle"])
        assert (await cluster.drive(cluster.config(steps=1))).committed == reference(1)


@in_event_loop
async def test_a_job_has_one_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one is refused, until the first says nothing; that is refused when it comes back."""
    monkeypatch.setattr(takeover, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(takeover, "MORE_SECONDS", 0.0)
    async with Cluster(tmp_path) as cluster:
        config = cluster.config()
        cluster.hold(6, lambda: cluster.run.of(ResumedEvent))
        driving = asyncio.create_task(cluster.drive(config))
        await cluster.until(lambda: cluster.run.step == 5)
        first = cluster.run
        second = await cluster.drive(config, start="resume")
        assert isinstance(second.error, BusyError)
        assert "busy with job 'job', whose driver is at work" in str(second.error)
        monkeypatch.setattr(driver_memory, "SILENT_SECONDS", 0.0)
        taken = await cluster.drive(config, start="resume")
        assert_goes_on(first, taken)
        late = await driving
        assert isinstance(late.error, TakenOverError)
        assert exit_code(late.error) == 76
        assert len(late.of(StepEvent)) <= taken.only(ResumedEvent).step + 1


@in_event_loop
async def test_nothing_is_dropped_and_nobody_followed_on_the_word_of_a_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server says that the run has ended, and another is complete, and where to go on."""
    certs = issue(tmp_path / "certs", "127.0.0.1", "127.0.0.1")
    async with Cluster(tmp_path, certs=certs) as cluster:
        config = cluster.config()
        before = await cluster.drive(config, lost_at=5)
        first, second = cluster.servers
        lie = second.served.driver.recall(is_claimed=False)
        lie.ended.append(pb.EndedJob(job_id=lie.job_id))
        lie.about = lie.about.replace(first.address, second.address)
        lie.generation = lie.about_generation = 99
        for state in lie.states:
            state.state = "{}"
        run: dict[str, Any] = {"job": "job", "job_id": "f", "identity": identity_of(config)}
        lie.completed.CopyFrom(pb.CompletedRun(about=lie.about, **run))
        monkeypatch.setattr(second.served.driver, "recall", lambda is_claimed: lie)
        after = await cluster.drive(config, start="resume")
        assert_goes_on(before, after, generation=100)  # a claim's number needs no proof


@in_event_loop
async def test_a_driver_that_was_taken_over_from_ends_nothing_and_one_that_left_blocks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its signature is real; the run is another driver's by now. Another server has left since."""
    certs = issue(tmp_path / "certs", "127.0.0.1", "127.0.0.1")
    mine = Security(certs / "driver")
    async with Cluster(tmp_path, certs=certs) as cluster:
        config = cluster.config()
        await cluster.drive(config, lost_at=3)
        second = cluster.servers[1]
        old = second.served.driver.recall(is_claimed=False)
        before = await cluster.drive(config, start="resume", lost_at=6)
        lie = second.served.driver.recall(is_claimed=False)
        ids = {"job_id": old.job_id, "driver_id": old.driver_id}
        lie.ended.append(pb.EndedJob(**ids, signature=signed(mine, end_of(**ids))))
        lie.about, lie.about_generation = old.about, old.about_generation
        lie.about_signature.CopyFrom(old.about_signature)
        lie.has_driver = True
        monkeypatch.setattr(second.served.driver, "recall", lambda is_claimed: lie)
        assert_goes_on(before, await cluster.drive(config, start="resume"), generation=3)
