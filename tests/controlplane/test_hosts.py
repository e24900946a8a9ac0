"""Lost hosts: a run recovers whether they come back or not, even without their data.

In tests/system/test_machines.py the hosts share neither memory nor disks.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from rpcmp.checkpoint.folder import newest_in
from rpcmp.errors import DrainingError, RecoveryTimeoutError, UnreachableError, exit_code
from rpcmp.job import worker_group
from rpcmp.job.checkpoints import Checkpoints
from rpcmp.job.server_calls import drain
from rpcmp.net.security import Security
from rpcmp.observability.events import (
    FaultEvent,
    LogEvent,
    RecoveredEvent,
    ReplacedEvent,
    ResumedEvent,
    WaitingEvent,
    WarningEvent,
)
from rpcmp.server import stage_server
from rpcmp.server.snapshot_store import SnapshotStore
from rpcmp.v1 import control_pb2 as pb
from tests.support.controlplane.cluster import Cluster, Run, Server, in_event_loop, reference
from tests.support.lan import cli, issue


def assert_went_on(run: Run, steps: int = 1) -> FaultEvent:
    """Check that there is one new generation, the same bits, and few repeated steps."""
    assert run.committed == reference()
    fault = run.only(FaultEvent)
    assert run.only(RecoveredEvent).generation == 2
    assert fault.step - run.only(RecoveredEvent).step <= steps
    return fault


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Issue certificates for two stages, a spare and a driver."""
    folder = issue(tmp_path_factory.mktemp("certs"), "127.0.0.1", "127.0.0.1")
    cli(folder, "issue", "--spare", "--host", "127.0.0.1")
    return folder


def left_in(folder: Path) -> int:
    """Return the step of the newest checkpoint that a run left there."""
    run = newest_in(folder)
    return 0 if run is None else run.last_step


@pytest.mark.parametrize("lost", [0, 1])
@in_event_loop
async def test_a_lost_server_rejoins_its_job(tmp_path: Path, lost: int) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.at(5, cluster.servers[lost].lose)
        cluster.hold(7, lambda: cluster.run.of(RecoveredEvent))
        cluster.when(WaitingEvent, 1, lambda _: cluster.replace(lost))
        fault = assert_went_on(await cluster.drive(cluster.config()))
        lost_at = cluster.servers[lost].address
        assert f"'stage{lost}' at {lost_at}: the server closed the connection" in fault.error


@in_event_loop
async def test_a_lost_server_ends_a_job_without_recovery(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.at(5, (lost := cluster.servers[1]).lose)
        cluster.hold(7, lambda: False)
        run = await cluster.drive(cluster.config("recovery.enabled=false"))
        assert isinstance(run.error, UnreachableError)
        where = f"lost stage 'stage1' at {lost.address}: the server closed the connection"
        assert where in str(run.error)
        await cluster.until(lambda: cluster.servers[0].state == "idle")


@in_event_loop
async def test_a_server_that_says_nothing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it counts as lost: it goes on here, and so does the run."""
    monkeypatch.setattr(stage_server, "VITALS_SECONDS", 600.0)
    monkeypatch.setattr(worker_group, "SILENT_SECONDS", 0.3)
    async with Cluster(tmp_path) as cluster:

        def named() -> list[str]:
            return [e.text for e in cluster.run.of(LogEvent) if "nothing" in e.text]

        cluster.hold(5, lambda: len(named()) == 2)
        run = await cluster.drive(cluster.config())
        assert run.committed == reference()
        for index, text in enumerate(sorted(named())):
            address = cluster.servers[index].address
            assert text.startswith(f"the server of stage 'stage{index}' at {address} has said not")


@pytest.mark.parametrize("every", [0, 4])
@in_event_loop
async def test_a_fault_costs_at_most_the_steps_since_the_last_snapshot(
    tmp_path: Path, every: int
) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.fail_at(0, 8, "SIGKILL")
        config = cluster.config(f"recovery.mirror_every_steps={every}")
        assert_went_on(await cluster.drive(config), steps=max(1, every))


@pytest.mark.parametrize("is_secured", [False, True])
@in_event_loop
async def test_a_spare_takes_the_stage_of_a_lost_host(
    tmp_path: Path, certs: Path, is_secured: bool
) -> None:
    """A spare may be any stage, so neighbours with certificates serve it the snapshot too."""
    async with Cluster(tmp_path, certs=certs if is_secured else None) as cluster:
        lost, spare = cluster.servers[1], await cluster.serve(None)
        cluster.at(5, lost.lose)
        cluster.hold(7, lambda: cluster.run.of(RecoveredEvent))
        spares = f"recovery.spares=['{spare.address}']"
        run = await cluster.drive(cluster.config(spares, "recovery.replace_after=0.1"))
        assert_went_on(run)
        replaced = run.only(ReplacedEvent)
        assert (replaced.lost, replaced.address) == (lost.address, spare.address)


@pytest.mark.parametrize("is_mended", [True, False])
@in_event_loop
async def test_a_server_that_comes_back_without_its_certificate_is_not_yet_back(
    tmp_path: Path, certs: Path, is_mended: bool
) -> None:
    """The run warns and waits for the right one; if that does not come, it saves its state."""
    async with Cluster(tmp_path, certs=certs) as cluster:
        lost = cluster.servers[1]
        again: list[Server] = []

        async def come_back(_: WaitingEvent) -> None:
            again.append(await cluster.serve(1, lost.address, certificate=""))

        async def mend(warning: WarningEvent) -> None:
            assert "does not speak TLS at all" in warning.text
            if is_mended:
                await again[0].end()
                await cluster.replace(1)

        cluster.at(5, lost.lose)
        cluster.hold(7, lambda: cluster.run.of(RecoveredEvent))
        cluster.when(WaitingEvent, 1, come_back)
        cluster.when(WarningEvent, 1, mend)
        run = await cluster.drive(cluster.config(*([] if is_mended else [GIVES_UP])))
        if is_mended:
            assert_went_on(run)
            return
        assert run.of(WarningEvent)
        assert isinstance(run.error, RecoveryTimeoutError)
        assert left_in(tmp_path / "rpcmp-job") >= run.step - 1


GIVES_UP = "recovery.give_up_after=5.0"


@in_event_loop
async def test_a_host_lost_for_good_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        lost = cluster.servers[1]
        cluster.at(5, lost.lose)
        cluster.hold(7, lambda: cluster.run.of(ResumedEvent))
        run = await cluster.drive(cluster.config("recovery.give_up_after=0.1"))
        assert isinstance(run.error, RecoveryTimeoutError)
        assert exit_code(run.error) == 75
        assert f"stage 'stage1' at {lost.address} did not come back" in str(run.error)
        left = left_in(tmp_path / "rpcmp-job")
        assert left >= run.step - 1
        await cluster.replace(1)
        resumed = await cluster.drive(cluster.config(), start="resume")
        assert (resumed.only(ResumedEvent).step, resumed.committed) == (left, reference(after=left))


@in_event_loop
async def test_a_drained_server_hands_its_state_over(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        drained = cluster.servers[1]

        async def replace(_: WaitingEvent) -> None:
            await drained.ending
            await cluster.replace(1)

        cluster.at(5, lambda: drain(drained.address, False, Security()))
        cluster.hold(9, lambda: cluster.run.generation == 2)
        cluster.when(WaitingEvent, 1, replace)
        fault = assert_went_on(await cluster.drive(cluster.config()))
        assert "the server of stage 'stage1' is being stopped" in fault.error


@in_event_loop
async def test_a_drained_server_ends_a_job_that_does_not_wait_after_its_step(
    tmp_path: Path,
) -> None:
    async with Cluster(tmp_path) as cluster:
        drained = cluster.servers[0]
        cluster.at(5, lambda: drain(drained.address, False, Security()))
        cluster.hold(9, lambda: False)
        run = await cluster.drive(cluster.config("recovery.enabled=false"))
        assert isinstance(run.error, DrainingError)
        assert "the server of stage 'stage0' is being stopped" in str(run.error)
        await drained.ending


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("saves", [True, False])
@in_event_loop
async def test_a_signal_ends_the_run_after_its_step(
    tmp_path: Path, signum: signal.Signals, saves: bool
) -> None:
    """Ctrl-C saves only if the config asks for checkpoints."""
    async with Cluster(tmp_path) as cluster:
        cluster.at(5, lambda: cluster.interrupt(signum))
        cluster.hold(9, lambda: cluster.run.of(ResumedEvent))
        config = cluster.config(*(["checkpoint.dir=saved"] if saves else []))
        run = await cluster.drive(config)
        assert run.error is not None
        assert exit_code(run.error) == 128 + signum
        assert f"ended by {signum.name} after step {run.step}" in str(run.error)
        left = left_in(tmp_path / ("saved" if saves else "rpcmp-job"))
        is_saved = saves or signum is signal.SIGTERM
        assert left == (run.step if is_saved else 0)
        notes = getattr(run.error, "__notes__", [])
        assert any("nothing was saved: add a [checkpoint]" in note for note in notes) != is_saved
        assert [server.state for server in cluster.servers] == ["idle", "idle"]
        if is_saved:
            resumed = await cluster.drive(config, start="resume")
            assert resumed.committed == reference(after=left)


@in_event_loop
async def test_the_second_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.fail_at(1, 6, "hang")

        async def interrupt_twice() -> None:
            await cluster.until(lambda: cluster.group.happened["stage1", 6, "forward"])
            await cluster.interrupt(signal.SIGINT)
            await cluster.interrupt(signal.SIGTERM)

        cluster.at(5, interrupt_twice)
        run = await cluster.drive(cluster.config())
        assert run.error is not None
        assert exit_code(run.error) == 143


@in_event_loop
async def test_the_second_signal_ends_a_run_that_saves_between_two_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is too slow to wait for."""
    saving: list[Checkpoints] = []

    async def saves_for_ever(checkpoints: Checkpoints) -> None:
        saving.append(checkpoints)
        await asyncio.Event().wait()

    monkeypatch.setattr(Checkpoints, "leave", saves_for_ever)
    async with Cluster(tmp_path) as cluster:

        async def interrupt_twice(_: WaitingEvent) -> None:
            await cluster.interrupt(signal.SIGTERM)
            await cluster.until(lambda: saving)
            await cluster.interrupt(signal.SIGINT)

        cluster.at(5, cluster.servers[1].lose)
        cluster.hold(7, lambda: False)
        cluster.when(WaitingEvent, 1, interrupt_twice)
        run = await cluster.drive(cluster.config())
        assert run.error is not None
        assert exit_code(run.error) == 130


@in_event_loop
async def test_the_file_of_a_stage_at_a_spare_is_saved_at_a_server_of_the_config_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run without [checkpoint] that gives up: it is resumed where the config says."""
    saved: list[tuple[str, bool]] = []
    save = SnapshotStore.save

    async def noted(store: SnapshotStore, stage_name: str, step: int, cut: int) -> pb.Saved:
        saved.append((stage_name, store is spare.served.snapshot_store))
        return await save(store, stage_name, step, cut)

    monkeypatch.setattr(SnapshotStore, "save", noted)
    async with Cluster(tmp_path) as cluster:
        spare = await cluster.serve(None)
        cluster.at(4, cluster.servers[1].lose)
        cluster.hold(7, lambda: cluster.run.of(RecoveredEvent))
        cluster.fail_at(0, 9, "SIGKILL", times=9)
        spares = f"recovery.spares=['{spare.address}']"
        run = await cluster.drive(cluster.config(spares, "recovery.replace_after=0.1"))
        assert isinstance(run.error, RecoveryTimeoutError)
        assert sorted(saved) == [("stage0", False), ("stage1", False), ("stage1", True)]
