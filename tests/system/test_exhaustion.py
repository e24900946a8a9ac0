"""What runs out: room for checkpoints and in /dev/shm, the right to write, memory."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rpcmp.checkpoint.folder import remove
from tests.support.cgroups import control_group
from tests.support.chaosjobs import write
from tests.support.faults import committed, drive
from tests.support.lan import mounted
from tests.support.leftovers import MENDED, Failed, left_in, warned
from tests.support.needs import needs
from tests.support.processes import (
    JobFolder,
    Result,
    RunningHere,
    poll_for,
    rpcmp,
    running,
    small_disk,
)
from tests.support.resuming import BODY, STEPS, after, checkpoints, whole_in


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[JobFolder, Result]:
    """An uninterrupted run and its files; do not change them."""
    return whole_in(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("on_error", ["fail", "warn"])
def test_leftovers_stay_if_the_next_run_could_not_save(job: JobFolder, on_error: str) -> None:
    failed = Failed(job, '[checkpoint]\ndir = "kept"\nevery_steps = 100\n')
    with small_disk(job.folder / "other", "100k"):
        left = next(failed.folder.iterdir())
        shutil.move(left, job.folder / "other" / left.name)
        larger = ("--set", "model.kwargs.blocks=90", "--set", "model.balance=[2, 89]")
        where = ("--set", "checkpoint.dir=other", "--set", f"checkpoint.on_error={on_error}")
        ended = drive(failed.config, *MENDED, *larger, *where)
        assert ended.code == (on_error == "fail")
        assert "No space left on device" in warned(ended)
        assert left_in(job.folder / "other") == [failed.step]


def test_a_full_disk_loses_checkpoints_but_no_training(
    whole: tuple[JobFolder, Result], job: JobFolder
) -> None:
    config = job.config(BODY)
    more = ("--set", "checkpoint.keep=50", "--set", "checkpoint.every_steps=1")
    with small_disk(job.folder / "saved", "100k"):
        result = drive(config, *more, "--set", "checkpoint.on_error=warn")
        assert committed(result) == committed(whole[1])
        warnings = [event["text"] for event in result.events if event["event"] == "warning"]
        assert any("No space left on device" in text for text in warnings)
        good = checkpoints(job).valid()
        assert good
        assert good[0].step < STEPS
        remove(checkpoints(job).path_of(good[-1].step))  # a run does not begin on a full disk
        seldom = ("--set", "checkpoint.every_steps=100", "--set", "checkpoint.on_error=warn")
        resumed = drive(config, "--resume", *seldom)
        assert after(resumed, 0) == after(whole[1], good[0].step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("checkpoint.every_steps=1", "checkpoint.keep=50"), "(3 in a row; the newest is of step "),
        (
            ("checkpoint.every_steps=100", "model.kwargs.blocks=90"),
            "(the last one; there is none)",
        ),
    ],
)
def test_a_run_with_lost_checkpoints_ends_with_an_error(
    job: JobFolder, options: tuple[str, ...], message: str
) -> None:
    config = job.config(BODY.replace("[model]", "[model]\nkwargs = { blocks = 3 }"))
    with small_disk(job.folder / "saved", "100k"):
        more = [part for option in options for part in ("--set", option)]
        balance = "[2, 89]" if "blocks=90" in options[-1] else "[2, 2]"
        result = drive(config, *more, "--set", f"model.balance={balance}")
    assert result.code == 1
    assert message in result.err
    assert "No space left on device" in result.err
    assert 'checkpoint.on_error = "warn"' in result.err
    reported = [event["event"] for event in result.events]
    assert ("summary" in reported) == ("the last one" in message)


@pytest.mark.parametrize("on_error", ["fail", "warn"])
def test_a_folder_that_becomes_read_only(
    whole: tuple[JobFolder, Result], job: JobFolder, on_error: str
) -> None:
    folder = job.folder / "saved"

    def remount(run: RunningHere) -> None:
        run.wait_for_line('"event": "checkpoint", "step": 2,')
        command = [needs("mount"), "-o", "remount,ro", str(folder)]
        poll_for(lambda: not subprocess.run(command, capture_output=True).returncode, "the mount")

    with small_disk(folder, "10m"):
        more = ("--set", "checkpoint.every_steps=1", "--set", f"checkpoint.on_error={on_error}")
        result = rpcmp("drive", job.config(BODY), "--json", *more, during=remount)
        newest = checkpoints(job).valid()[0].step
    assert newest >= 2
    assert "Read-only file system" in warned(result)
    if on_error == "warn":
        assert committed(result) == committed(whole[1])
    else:
        assert result.code == 1
        assert f"the newest is of step {newest}" in result.err


def test_no_room_for_loaders_is_named(tmp_path: Path) -> None:
    config = write("replicas", tmp_path / "job", saves=False)
    under = mounted("-t tmpfs -o size=8k rpcmp /dev/shm")
    with running("drive", config, "--set", "log.folder=", under=under) as run:
        result = run.wait()
    assert result.code == 1
    assert "there is no room in /dev/shm" in result.err
    assert "set data.num_workers = 0" in result.err


@pytest.mark.usefixtures("own_forks")
def test_a_worker_that_is_ended_for_memory_is_named_and_replaced(job: JobFolder) -> None:
    config = job.config("""
        steps = 100
        loss_scope = "micro-batch" # the layer keeps something of each
        [model]
        layers = "zoo:leaking"
        kwargs = { leak = 4000000 }
        balance = [1, 2]
    """)
    with (
        control_group("memory") as group,
        running("drive", config, "--json", under=group.inside) as run,
    ):
        run.wait_for_line('"event": "step", "step": 2,')
        group.limit_memory(300 * 2**20)  # then the worker is the largest process
        result = run.wait()
    assert result.code == 0, result.err
    error = result.event("fault")["error"]
    assert "the worker of stage 'stage1' on" in error
    assert "was ended by the kernel for memory in" in error
    assert "MiB; give the stage fewer layers" in error
    assert result.event("step")["step"] == 100
