"""Recovery from any lost process: the run ends with the bits of a run without faults.

tests/long/test_recovery_matrix.py has the whole matrix, {how} x {phase} x {stage}. The cells here
cover every phase, every stage, and every way to fail except for a cut, which is tested in
tests/system/test_cut.py.
"""

from __future__ import annotations

import signal

import pytest

from tests.support.faults import (
    STEP,
    Cell,
    Committed,
    Faults,
    assert_cell,
    assert_recovered,
    committed,
    committed_without_fault,
    drive,
    name_of,
)
from tests.support.processes import JobFolder, running, runs, with_token
from tests.support.runs import checkpoints_in

CELLS: tuple[Cell, ...] = (
    ("SIGKILL", "saving", 0),
    ("SIGSTOP", "backward", 1),
    ("SIGSEGV", "optimizer", 2),
    ("exception", "forward", 1),
    ("deadlock", "joining", 2),
)

FIRST, MIDDLE, LAST = 0, 1, 2


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Return losses and parameters of the same job without a fault."""
    return committed_without_fault(tmp_path_factory.mktemp("fault_free"))


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_the_run_recovers_from_a_fault_with_the_same_bits(
    job: JobFolder, fault_free: Committed, cell: Cell
) -> None:
    assert_cell(job, fault_free, cell)


def test_a_hanging_process_is_named_with_its_stack(job: JobFolder, fault_free: Committed) -> None:
    faults = Faults(job).fail_at(MIDDLE, STEP, "backward", "lock")
    result = drive(faults.config(), "--set", "recovery.watchdog=1.0")
    assert committed(result) == fault_free
    assert_recovered(faults, result)
    error = result.event("fault")["error"]
    assert "stage 'stage1' on" in error
    assert f"in backward of micro-batch 0 at step {STEP}" in error
    assert "faults.py" in error  # the place in the code
    assert "in _strike" in error


def test_a_hang_before_the_first_step_is_named(job: JobFolder, fault_free: Committed) -> None:
    faults = Faults(job).fail_at(LAST, 0, "building", "lock")
    result = drive(faults.config(), "--set", "recovery.watchdog=1.0")
    assert committed(result) == fault_free
    assert_recovered(faults, result)
    error = result.event("fault")["error"]
    assert "stage 'stage2' on" in error
    assert "in build at step 0" in error
    assert "in _strike" in error


@pytest.mark.parametrize("how", ["SIGSTOP", "brittle"])
def test_a_stopped_process_is_named_with_its_state(job: JobFolder, how: str) -> None:
    faults = Faults(job).fail_at(LAST, STEP, "optimizer", how)
    silent = ("--set", "recovery.heartbeat_timeout=1.5", "--set", "recovery.max_restarts=0")
    result = drive(faults.config(), *silent)
    assert result.code == 75
    assert "stage 'stage2' on" in result.err
    assert f"in optimizer at step {STEP}" in result.err
    assert "State: T (stopped)" in result.err, result.err
    assert ("most recent call first" in result.err) == (how == "SIGSTOP")


def test_a_repeating_fault_ends_the_run_with_a_checkpoint(job: JobFolder) -> None:
    faults = Faults(job).fail_at(MIDDLE, STEP, "forward", "exception", again=True)
    result = drive(faults.config())
    assert result.code == 1
    assert "planted: größer als erlaubt" in result.err
    assert "faults.py" in result.err  # the remote traceback
    assert len([event for event in result.events if event["event"] == "recovered"]) == 1
    assert result.event("checkpoint")["step"] == STEP - 1
    assert checkpoints_in(job.folder / "rpcmp-job").valid()[0].step == STEP - 1


def test_restarts_without_progress_end_the_run_with_a_checkpoint(job: JobFolder) -> None:
    faults = Faults(job).fail_at(FIRST, STEP, "backward", "SIGKILL", again=True)
    result = drive(faults.config(), "--set", "recovery.max_restarts=1")
    assert result.code == 75
    assert "gave up after 1 restarts without a new step" in result.err
    assert "the worker of stage 'stage0'" in result.err
    assert checkpoints_in(job.folder / "rpcmp-job").valid()[0].step == STEP - 1


SLOW = """
steps = 50
[model]
layers = "zoo:jittery"
kwargs = { milliseconds = 10.0 }
balance = [2, 3]
"""

MACHINERY = [
    ("rpcmp.process", signal.SIGKILL),  # the fork server
    ("rpcmp.process", signal.SIGSTOP),
    ("serve", signal.SIGSTOP),
]


@pytest.fixture(scope="module")
def slow_fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    job = JobFolder(tmp_path_factory.mktemp("slow") / "job")
    return committed(drive(job.config(SLOW)))


@pytest.mark.usefixtures("own_forks")
@pytest.mark.parametrize(("what", "signum"), MACHINERY)
def test_a_lost_process_that_computes_nothing_is_replaced(
    job: JobFolder, token: str, slow_fault_free: Committed, what: str, signum: signal.Signals
) -> None:
    with running("drive", job.config(SLOW), "--json") as run:
        run.wait_for_line('"step": 5,')
        lost = next(process for process in with_token(token) if runs(process, what))
        lost.send_signal(signum)
        result = run.wait()
    assert committed(result) == slow_fault_free
    assert [event["event"] for event in result.events].count("recovered") == 1
    if signum == signal.SIGSTOP:
        assert f"(pid {lost.pid}) was stopped: it is killed" in result.err
