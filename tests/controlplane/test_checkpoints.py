"""Checkpoints of runs, also of those that had to end: kept, resumed, damaged, removed."""

from __future__ import annotations

import shutil
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rpcmp.checkpoint.folder import CheckpointFolder, newest_in, runs_in
from rpcmp.errors import CheckpointConflictError, CheckpointError, ConfigError, StageError
from rpcmp.observability.events import (
    CheckpointEvent,
    GenerationEvent,
    ResumedEvent,
    StepEvent,
    WarningEvent,
)
from tests.support.controlplane.cluster import Cluster, Run, in_event_loop, reference

SAVES = ("checkpoint.dir=saved", "checkpoint.every_steps=3")


def checkpoints_in(folder: Path) -> CheckpointFolder:
    """Return the checkpoints of the run that wrote last."""
    run = newest_in(folder)
    assert run is not None
    return run.folder


def steps_in(folder: Path) -> list[int]:
    return [manifest.step for manifest in checkpoints_in(folder).valid()]


def left_in(folder: Path) -> list[int]:
    """Return the last step of each run that left checkpoints, the newest run first."""
    return [run.last_step for run in runs_in(folder)]


def warned(run: Run) -> str:
    return "\n".join(event.text for event in run.of(WarningEvent))


@in_event_loop
async def test_a_run_keeps_its_newest_checkpoints(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        run = await cluster.drive(cluster.config(*SAVES, steps=14))
        assert steps_in(tmp_path / "saved") == [14, 12, 9]
        saved = run.of(CheckpointEvent)
        assert [event.step for event in saved] == [3, 6, 9, 12, 14]
        newest = checkpoints_in(tmp_path / "saved").valid()[0]
        assert newest.layers == ["layer0", "layer1", "layer2", "layer3"]
        assert saved[-1].bytes == sum(stage.size for stage in newest.stages)
        assert saved[-1].path == str(checkpoints_in(tmp_path / "saved").path_of(14))


@in_event_loop
async def test_a_run_resumes_under_any_balance(tmp_path: Path) -> None:
    async with Cluster(tmp_path, stages=4) as cluster:
        step = 6
        await cluster.drive(cluster.config(*SAVES, steps=step, balance=[2, 2]))
        for balance in ([1, 3], [4], [1, 1, 1, 1]):
            config = cluster.config(*SAVES, steps=step + 2, balance=balance)
            run = await cluster.drive(config, start="resume")
            assert run.only(ResumedEvent).step == step
            assert run.committed == reference(step + 2, after=step)
            step += 2


@in_event_loop
async def test_a_finished_run_that_is_resumed_trains_no_step(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        config = cluster.config(*SAVES, steps=3)
        await cluster.drive(config)
        assert (await cluster.drive(config, "resume")).committed == reference(3, after=3)


@in_event_loop
async def test_resuming_without_a_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        run = await cluster.drive(cluster.config(*SAVES, steps=1), "resume")
        assert (run.only(ResumedEvent).step, run.committed) == (0, reference(1))


@in_event_loop
async def test_a_checkpoint_is_used_if_the_servers_hold_nothing(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        config = cluster.config(*SAVES)
        cluster.hold(6, lambda: cluster.run.of(CheckpointEvent) or cluster.run.of(ResumedEvent))
        await cluster.drive(config, lost_at=7, holders=[])
        for index, server in enumerate(cluster.servers):
            await server.lose()
            await cluster.replace(index)
        run = await cluster.drive(config, "resume")
        resumed = run.only(ResumedEvent)
        assert resumed.step in (3, 6)  # the last one may not have been complete
        assert not resumed.from_memory
        assert run.committed == reference(after=resumed.step)


@in_event_loop
async def test_damaged_checkpoints_are_never_loaded(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        config = cluster.config(*SAVES)
        await cluster.drive(config)
        folder = checkpoints_in(tmp_path / "saved")
        flip_a_bit(folder.path_of(12) / "stage1.safetensors")
        with (folder.path_of(9) / "stage0.safetensors").open("r+b") as file:
            file.truncate(100)
        run = await cluster.drive(config, "resume")
        assert (run.only(ResumedEvent).step, run.committed) == (6, reference(after=6))
        for name in ("stage1", "stage0"):
            assert any(
                f"{name}.safetensors" in event.text and "damaged" in event.text
                for event in run.of(WarningEvent)
            )
        for step in steps_in(tmp_path / "saved"):
            flip_a_bit(folder.path_of(step) / "stage0.safetensors")
        refused = await cluster.drive(config, "resume")
        assert isinstance(refused.error, CheckpointError)
        assert "no checkpoint can be used" in str(refused.error)
        assert "stage0.safetensors" in str(refused.error)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


@in_event_loop
async def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.drive(cluster.config(*SAVES, steps=3))
        run = await cluster.drive(cluster.config(*SAVES, balance=[2, 3]), "resume")
        assert isinstance(run.error, CheckpointError)
        assert "layer4" in str(run.error)


@in_event_loop
async def test_an_unwritable_folder_fails_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "saved").write_text("a file in the way")
    async with Cluster(tmp_path) as cluster:
        run = await cluster.drive(cluster.config(*SAVES))
        assert isinstance(run.error, ConfigError | CheckpointError)
        assert f"cannot be written to {tmp_path / 'saved'} on " in str(run.error)
        assert not run.of(GenerationEvent)


@in_event_loop
async def test_a_deleted_folder_is_created_again(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:

        async def remove_all(_: CheckpointEvent) -> None:
            shutil.rmtree(checkpoints_in(tmp_path / "saved").path, ignore_errors=True)

        cluster.when(CheckpointEvent, 1, remove_all)
        run = await cluster.drive(
            cluster.config("checkpoint.dir=saved", "checkpoint.every_steps=1")
        )
        assert run.committed == reference()
        assert steps_in(tmp_path / "saved")[0] == 12


LEFT = 5


async def fail(cluster: Cluster, *settings: str) -> None:
    """Let a run end by an error of the user's, which leaves a checkpoint of step LEFT."""
    if settings == KEPT:
        cluster.hold(LEFT + 1, lambda: is_saved(cluster.run) or cluster.run.of(ResumedEvent))
    cluster.fail_at(1, LEFT + 1, "exception", times=2)
    run = await cluster.drive(cluster.config(*settings))
    assert isinstance(run.error, StageError)
    assert is_saved(run)


def is_saved(run: Run) -> bool:
    return LEFT in [event.step for event in run.of(CheckpointEvent)]


KEPT = ("checkpoint.dir=kept", "checkpoint.every_steps=1")
"""Settings of a run that saves each step before it fails."""


@in_event_loop
async def test_a_corrected_run_starts_at_once_and_removes_leftovers(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await fail(cluster)
        short = await cluster.drive(cluster.config("seed=1", steps=1), "either")
        assert short.committed == reference(1)
        assert f"(step {LEFT}, written" in warned(short)
        assert "--resume continues from it" in warned(short)
        assert left_in(tmp_path / "rpcmp-job") == [LEFT]  # the short run has not come so far
        assert (await cluster.drive(cluster.config(), "either")).committed == reference()
        assert not (tmp_path / "rpcmp-job").exists()


@in_event_loop
async def test_leftovers_are_resumed_on_request(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await fail(cluster)
        run = await cluster.drive(cluster.config(), "resume")
        assert (run.only(ResumedEvent).step, run.committed) == (LEFT, reference(after=LEFT))
        assert not (tmp_path / "rpcmp-job").exists()


@in_event_loop
async def test_old_leftovers_are_removed_and_not_offered(tmp_path: Path) -> None:
    folder = tmp_path / "rpcmp-job"
    async with Cluster(tmp_path) as cluster:
        await fail(cluster)
        age(folder, days=15)
        short = cluster.config("seed=1", "recovery.keep_days=16", steps=1)
        assert "--resume" in warned(await cluster.drive(short, "either"))
        assert left_in(folder) == [LEFT]
        removing = await cluster.drive(cluster.config("seed=1", steps=1), "either")
        assert "--resume" not in warned(removing)
        assert not folder.exists()


def age(folder: Path, **by: float) -> None:
    """Backdate the checkpoint of the run that left one."""
    (run,) = runs_in(folder)
    assert run.newest is not None
    written = (datetime.now(UTC) - timedelta(**by)).isoformat(timespec="seconds")
    CheckpointFolder(run.folder.path).commit(run.newest.model_copy(update={"written": written}))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
@in_event_loop
async def test_a_run_whose_config_asks_for_checkpoints_asks_whether_to_resume(
    tmp_path: Path, signum: signal.Signals
) -> None:
    async with Cluster(tmp_path) as cluster:
        cluster.at(5, lambda: cluster.interrupt(signum))
        cluster.hold(9, lambda: False)
        config = cluster.config("checkpoint.dir=kept", "checkpoint.every_steps=1000")
        await cluster.drive(config)
        left = left_in(tmp_path / "kept")
        assert len(left) == 1
        again = await cluster.drive(config, "either")
        assert isinstance(again.error, CheckpointConflictError)
        assert "go on with --resume, or begin anew beside them with --fresh" in str(again.error)
        assert not again.of(StepEvent)
        assert left_in(tmp_path / "kept") == left


@in_event_loop
async def test_a_fresh_run_keeps_checkpoints_that_the_config_asked_for(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await fail(cluster, *KEPT)
        assert (await cluster.drive(cluster.config(*KEPT), "fresh")).committed == reference()
        assert left_in(tmp_path / "kept") == [12, LEFT]
        longer = await cluster.drive(cluster.config(*KEPT, steps=14), "resume")
        assert longer.only(ResumedEvent).step == 12
        (older,) = [run for run in runs_in(tmp_path / "kept") if run.last_step == LEFT]
        of_that = cluster.config(f"checkpoint.dir=kept/{older.name}")
        first = await cluster.drive(of_that, "resume")
        assert (first.only(ResumedEvent).step, first.committed) == (LEFT, reference(after=LEFT))


@in_event_loop
async def test_automatic_leftovers_do_not_block_configured_checkpoints(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await fail(cluster, "checkpoint.dir=kept", "checkpoint.every_steps=10")
        mended = cluster.config("checkpoint.dir=kept", "checkpoint.every_steps=10")
        assert (await cluster.drive(mended, "either")).committed == reference()
        assert left_in(tmp_path / "kept") == [12]


@in_event_loop
async def test_a_damaged_run_is_not_skipped_for_an_older_one(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await fail(cluster, *KEPT)
        age(tmp_path / "kept", days=1)
        (older,) = runs_in(tmp_path / "kept")
        await cluster.drive(cluster.config("seed=1", *KEPT, steps=2), "fresh")
        newer = next(run for run in runs_in(tmp_path / "kept") if run.name != older.name)
        for manifest in newer.folder.path.glob("*/manifest.json"):
            manifest.write_text("{}")
        refused = await cluster.drive(cluster.config(*KEPT), "resume")
        assert isinstance(refused.error, CheckpointError)
        assert "no checkpoint can be used" in str(refused.error)
        assert newer.name in str(refused.error)
        going_on = f"checkpoint.dir={older.folder.path}"
        assert f"left {older}; --resume --set {going_on} goes on from it" in str(refused.error)
        config = cluster.config(*KEPT, going_on)
        assert (await cluster.drive(config, "resume")).committed == reference(after=LEFT)


@in_event_loop
async def test_a_failed_recovery_names_the_fault_before_it(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:

        async def plant(_: StepEvent) -> None:
            cluster.fail_at("driver", 0, "exception", "plan", times=6)

        cluster.when(StepEvent, 4, plant)
        cluster.fail_at(1, 6, "SIGKILL")
        run = await cluster.drive(cluster.config())
        assert run.error is not None
        shown = "\n".join([str(run.error), *getattr(run.error, "__notes__", [])])
        assert "this followed a fault after step" in shown
        assert "the worker of stage 'stage1'" in shown
