"""Checkpoints that a failed run leaves automatically, and their use by the next run."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcmp.checkpoint.folder import runs_in
from tests.support.faults import committed, drive
from tests.support.leftovers import BODY, MENDED, Failed, left_in, warned
from tests.support.processes import JobFolder, RunningHere, rpcmp

EVERY_STEP = '[checkpoint]\ndir = "kept"\nevery_steps = 1\n'


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Failed:
    """Return leftovers of a job without a [checkpoint] section; do not change them."""
    return Failed(JobFolder(tmp_path_factory.mktemp("once") / "job"))


@pytest.fixture(scope="module")
def once_keeping(tmp_path_factory: pytest.TempPathFactory) -> Failed:
    """Return leftovers of a job with a checkpoint per step; do not change them."""
    return Failed(JobFolder(tmp_path_factory.mktemp("keeping") / "job"), EVERY_STEP)


@pytest.fixture
def failed(once: Failed, tmp_path: Path) -> Failed:
    return once.copied(tmp_path / "job")


@pytest.fixture
def keeping(once_keeping: Failed, tmp_path: Path) -> Failed:
    return once_keeping.copied(tmp_path / "job")


def test_a_corrected_run_starts_at_once_and_removes_leftovers(failed: Failed) -> None:
    wrong = drive(failed.config, *MENDED, "--set", "optimizer.kwargs.lrr=1")
    assert "lrr" in wrong.err  # the new error, and not the leftovers
    short = drive(failed.config, *MENDED, "--set", "steps=1", "--set", "seed=1")
    assert short.code == 0
    assert f"(step {failed.step}, written" in warned(short)
    assert "--resume continues from it" in warned(short)
    assert left_in(failed.folder) == [failed.step] * (failed.step > 1)  # this run may reach it
    mended = drive(failed.config, *MENDED)
    assert mended.code == 0
    assert not failed.folder.exists()


def test_leftover_checkpoints_are_resumed_on_request(failed: Failed) -> None:
    resumed = drive(failed.config, *MENDED, "--resume")
    assert resumed.event("resumed")["step"] == failed.step
    assert resumed.code == 0
    assert not failed.folder.exists()
    assert committed(resumed)[1] == committed(drive(failed.config, *MENDED))[1]


def test_a_checkpoint_of_another_run_is_never_offered(failed: Failed) -> None:
    failed.age(seconds=2)
    ended = rpcmp("drive", failed.config, "--set", "data.train.kwargs.at=0")
    assert ended.code == 1
    assert "--resume" not in ended.err.partition("try:")[2]
    again = rpcmp("drive", failed.config)
    assert "--resume" in again.err.partition("try:")[2]


def test_old_leftovers_are_removed_and_not_offered(failed: Failed) -> None:
    failed.age(days=15)
    fails = ("--set", "data.train.kwargs.at=0", "--set", "num_microbatches=1")
    drive(failed.config, *fails, "--set", "recovery.keep_days=16")
    assert left_in(failed.folder) == [failed.step]
    removing = drive(failed.config, *fails)
    assert "--resume" not in warned(removing)
    assert left_in(failed.folder) == []


@pytest.fixture
def _hears_hangups() -> Iterator[None]:
    """Restore the default of SIGHUP, which the tests ignore if nohup started them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_hears_hangups")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_a_checkpoint_if_the_config_asks_for_them(
    job: JobFolder, signum: signal.Signals
) -> None:
    """The next run asks whether to resume, because the config asked for the checkpoint."""
    body = BODY.replace("steps = 6", "steps = 1000000")
    config = job.config(body + '[checkpoint]\ndir = "kept"\nevery_steps = 1000000\n')

    def send(run: RunningHere) -> None:
        run.wait_for_line('"event": "step"')
        run.signal(signum)

    ended = rpcmp("drive", config, "--json", *MENDED, during=send)
    assert ended.code == 128 + signum
    assert len(left_in(job.folder / "kept")) == 1
    again = rpcmp("drive", config, *MENDED)
    assert again.code == 2
    assert "go on with --resume, or begin anew beside them with --fresh" in again.err


def test_a_damaged_run_is_not_skipped_for_an_older_one(keeping: Failed) -> None:
    failed, exported_to = keeping, keeping.config.with_name("model.safetensors")
    failed.age(days=1)
    (older,) = runs_in(failed.folder)
    assert drive(failed.config, *MENDED, "--fresh", "--set", "steps=5", "--set", "seed=1").code == 0
    newer = next(run for run in runs_in(failed.folder) if run.name != older.name)
    for manifest in newer.folder.path.glob("*/manifest.json"):
        manifest.write_text("{}")
    refused = rpcmp("drive", failed.config, *MENDED, "--resume")
    assert refused.code != 0
    assert "no checkpoint can be used" in refused.err
    assert newer.name in refused.err
    going_on = f"--set checkpoint.dir={older.folder.path}"
    assert f"an earlier run left {older}; --resume {going_on} goes on from it" in refused.err
    exported = rpcmp("export", failed.folder, exported_to)
    assert exported.code != 0
    assert "can be exported" in exported.err
    assert drive(failed.config, *MENDED, "--resume", *going_on.split()).code == 0


def test_resume_and_fresh_together_are_refused(failed: Failed) -> None:
    both = rpcmp("drive", failed.config, *MENDED, "--resume", "--fresh")
    assert both.code == 2
    assert "give one of them" in both.err
    assert left_in(failed.folder) == [failed.step]


def test_a_fresh_run_keeps_checkpoints_that_the_config_asked_for(keeping: Failed) -> None:
    failed, exported_to = keeping, keeping.config.with_name("model.safetensors")
    refused = rpcmp("drive", failed.config, *MENDED)
    assert refused.code == 2
    assert "begin anew beside them with --fresh" in refused.err
    assert "--resume" in refused.err.partition("try:")[2]
    fresh = drive(failed.config, *MENDED, "--fresh")
    assert fresh.code == 0
    assert left_in(failed.folder) == [6, failed.step]
    exported = rpcmp("export", failed.folder, exported_to)
    assert exported.out.startswith("step 6")
    resumed = drive(failed.config, *MENDED, "--resume", "--steps", "8")
    assert resumed.event("resumed")["step"] == 6
    assert left_in(failed.folder) == [8, failed.step]
    (older,) = [run for run in runs_in(failed.folder) if run.last_step == failed.step]
    of_that = ("--set", f"checkpoint.dir=kept/{older.name}")
    first = drive(failed.config, *MENDED, "--resume", *of_that)
    assert first.event("resumed")["step"] == failed.step
    assert committed(first)[1] == committed(fresh)[1]


def test_automatic_leftovers_do_not_block_configured_checkpoints(job: JobFolder) -> None:
    failed = Failed(job, '[checkpoint]\ndir = "kept"\nevery_steps = 5\n')
    mended = drive(failed.config, *MENDED)
    assert mended.code == 0
    assert left_in(failed.folder) == [6]


def test_a_failed_recovery_names_the_fault_before_it(job: JobFolder) -> None:
    """The error names both faults."""
    data = '\nbatch_size = 10\nshuffle = false\ntrain = { callable = "zoo:lost", kwargs = { '
    marker = f'marker = "{job.folder / "opened"}" }} }}'
    ended = rpcmp("drive", job.config(BODY.partition("[data]")[0] + "[data]" + data + marker))
    assert ended.code == 2
    last = ended.err[ended.err.rindex("rpcmp: ") :]
    (run,) = (job.folder / "runs").glob("*/run.json")
    assert "this followed a fault after step" in json.loads(run.read_text())["error"]
    assert "the disk is gone" in last
    assert "this followed a fault after step" in last
    assert "sample 37 is no picture" in last
