"""A run that loses something goes on by itself and ends with the bits of one that has not.

`pytest -m long` runs the whole matrix, {how} x {phase} x {stage}; some of its cells run always.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Iterator

import pytest

from tests.support.faults import HOWS, PHASES, STEP, Faults, committed, drive
from tests.support.processes import JobFolder, Result
from tests.support.runs import checkpoints_in

ALWAYS = {
    ("SIGKILL", "saving", 0),
    ("SIGSTOP", "backward", 1),
    ("SIGSEGV", "optimizer", 2),
    ("exception", "forward", 1),
    ("deadlock", "joining", 2),
    ("cut", "backward", 0),
}
"""Cells of the matrix that the short suite runs: every way to fail, every phase, every stage."""

FIRST, MIDDLE, LAST = 0, 1, 2

Committed = tuple[list[tuple[int, str]], str]


def cells() -> Iterator[object]:
    """The matrix; what is not in ALWAYS is long."""
    for cell in itertools.product(HOWS, PHASES, (FIRST, MIDDLE, LAST)):
        marks = [] if cell in ALWAYS else [pytest.mark.long]
        yield pytest.param(*cell, marks=marks, id="-".join(map(str, cell)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Losses and parameters of the same job without a fault."""
    job = JobFolder(tmp_path_factory.mktemp("undisturbed") / "job")
    return committed(drive(Faults(job).config()))


def recovered_once(faults: Faults, result: Result) -> None:
    """One process was hit, in the phase that was planned, and one more generation was formed."""
    (planned,), (struck,) = faults.planned, faults.struck
    assert [struck[key] for key in ("stage", "phase", "step")] == planned
    (fault,) = [event for event in result.events if event["event"] == "fault"]
    (recovered,) = [event for event in result.events if event["event"] == "recovered"]
    assert fault["generation"] == 1
    if struck["how"] != "cut":  # who is cut off and who cuts off is a matter of view
        assert (fault["stage"], fault["host"]) == (f"stage{struck['stage']}", platform.node())
    groups = [event for event in result.events if event["event"] == "generation"]
    assert [(group["generation"], group["step"]) for group in groups] == [
        (1, 0),
        (2, recovered["step"]),
    ][-len(groups) :]  # a fault before the first group has begun leaves one
    assert recovered["generation"] == 2
    assert fault["step"] - recovered["step"] <= 1  # at most one step that was told is done again


@pytest.mark.parametrize(("how", "phase", "stage"), list(cells()))
def test_every_fault_in_every_phase_is_recovered_from(
    job: JobFolder,
    undisturbed: Committed,
    namespace: tuple[str, ...],
    how: str,
    phase: str,
    stage: int,
) -> None:
    faults = Faults(job).fail_at(stage, 0 if phase == "joining" else STEP, phase, how)
    result = drive(
        faults.config(),
        *("--set", "recovery.heartbeat_timeout=2.0"),
        under=namespace if how == "cut" else (),
        timeout=90,
    )
    assert committed(result) == undisturbed
    recovered_once(faults, result)


def test_what_hangs_is_named_with_its_stack(job: JobFolder, undisturbed: Committed) -> None:
    faults = Faults(job).fail_at(MIDDLE, STEP, "backward", "lock")
    result = drive(faults.config(), "--set", "recovery.watchdog=2.0")
    assert committed(result) == undisturbed
    recovered_once(faults, result)
    error = result.event("fault")["error"]
    assert "stage 'stage1' on" in error
    assert f"in backward of micro-batch 0 at step {STEP}" in error
    assert "faults.py" in error  # where in its code
    assert "in _strike" in error


@pytest.mark.long
def test_what_hangs_before_the_first_step_is_named(job: JobFolder, undisturbed: Committed) -> None:
    faults = Faults(job).fail_at(LAST, 0, "building", "lock")
    result = drive(faults.config(), "--set", "recovery.watchdog=2.0")
    assert committed(result) == undisturbed
    recovered_once(faults, result)
    error = result.event("fault")["error"]
    assert "stage 'stage2' on" in error
    assert "in build at step 0" in error
    assert "in _strike" in error


@pytest.mark.long
def test_what_stops_is_named_with_its_state(job: JobFolder) -> None:
    faults = Faults(job).fail_at(LAST, STEP, "optimizer", "SIGSTOP")
    silent = ("--set", "recovery.heartbeat_timeout=1.5", "--set", "recovery.max_restarts=0")
    result = drive(faults.config(), *silent)
    assert result.code == 75
    assert "stage 'stage2' on" in result.err
    assert f"in optimizer at step {STEP}" in result.err
    assert "State: T (stopped)" in result.err
    assert "most recent call first" in result.err


def test_a_fault_that_comes_back_ends_the_run_with_a_checkpoint(job: JobFolder) -> None:
    faults = Faults(job).fail_at(MIDDLE, STEP, "forward", "exception", again=True)
    result = drive(faults.config())
    assert result.code == 1
    assert "planted: größer als erlaubt" in result.err
    assert "faults.py" in result.err  # the remote traceback
    assert len([event for event in result.events if event["event"] == "recovered"]) == 1
    assert result.event("checkpoint")["step"] == STEP - 1
    assert checkpoints_in(job.folder / "rpcmp-job").valid()[0].step == STEP - 1


@pytest.mark.long
def test_restarts_that_lead_nowhere_end_the_run_with_a_checkpoint(job: JobFolder) -> None:
    faults = Faults(job).fail_at(FIRST, STEP, "backward", "SIGKILL", again=True)
    result = drive(faults.config(), "--set", "recovery.max_restarts=1")
    assert result.code == 75
    assert "gave up after 1 restarts without a new step" in result.err
    assert "the worker of stage 'stage0'" in result.err
    assert checkpoints_in(job.folder / "rpcmp-job").valid()[0].step == STEP - 1
