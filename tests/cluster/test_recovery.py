"""Recovery from real faults: the run ends with the bits of a run without faults.

tests/controlplane/test_recovery.py and test_hosts.py have the matrix, in one event loop, and
tests/long/test_recovery_matrix.py has it with real processes. Here is what only those show: each
kind of fault once, except for a cut, which is in tests/system/test_cut.py.
"""

from __future__ import annotations

import contextlib
import signal

import pytest

from tests.support.faults import (
    STEP,
    Committed,
    Faults,
    assert_recovered,
    committed,
    committed_without_fault,
    drive,
)
from tests.support.hosts import LOSING, SLOW, assert_went_on, slow_config
from tests.support.hosts import committed_without_fault as slow_without_fault
from tests.support.pool import lend_server_at, lend_servers
from tests.support.processes import (
    DEADLINE,
    JobFolder,
    RunningHere,
    connect,
    rpcmp,
    running,
    runs,
    with_token,
)

FIRST, MIDDLE, LAST = 0, 1, 2


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Return losses and parameters of the same job without a fault."""
    return committed_without_fault(tmp_path_factory.mktemp("fault_free"))


@pytest.fixture(scope="module")
def slow_fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """The same of a slow job of two stages."""
    return slow_without_fault(tmp_path_factory.mktemp("slow"))


@pytest.mark.parametrize(
    "faults_by_step",
    [
        pytest.param(
            [("SIGKILL", "saving", FIRST), ("SIGSEGV", "optimizer", LAST)],
            marks=pytest.mark.cluster,
        ),
        [("exception", "forward", MIDDLE), ("SIGSTOP", "backward", MIDDLE)],
        pytest.param([("deadlock", "join", LAST)], marks=pytest.mark.cluster),
    ],
)
def test_the_run_recovers_from_faults_with_the_same_bits(
    job: JobFolder, fault_free: Committed, faults_by_step: list[tuple[str, str, int]]
) -> None:
    faults = Faults(job)
    for step, (how, phase, stage) in enumerate(faults_by_step, start=STEP):
        faults.fail_at(stage, 0 if phase == "join" else step, how, phase)
    result = drive(faults.config(), "--set", "recovery.heartbeat_timeout=2.0")
    assert committed(result) == fault_free
    found = [event for event in result.events if event["event"] == "fault"]
    assert [fault["stage"] for fault in found] == [f"stage{s}" for _, _, s in faults_by_step]
    triggered = [(each["stage"], each["phase"], each["step"]) for each in faults.triggered]
    assert triggered == [tuple(each) for each in faults.planned]
    recovered = [event for event in result.events if event["event"] == "recovered"]
    for fault, event in zip(found, recovered, strict=True):
        assert fault["step"] - event["step"] <= 1  # at most one reported step is repeated


def test_a_hanging_process_is_named_with_its_stack(job: JobFolder, fault_free: Committed) -> None:
    faults = Faults(job).fail_at(MIDDLE, STEP, "lock", "backward")
    result = drive(faults.config(), "--set", "recovery.watchdog=1.0")
    assert committed(result) == fault_free
    assert_recovered(faults, result)
    error = result.event("fault")["error"]
    assert "stage 'stage1' on" in error
    assert f"in backward of micro-batch 0 at step {STEP}" in error
    assert "faults.py" in error  # the place in the code
    assert "in _strike" in error


def test_a_stage_that_fails_where_it_would_save_ends_the_run(job: JobFolder) -> None:
    """The next checkpoint that is due would wait for one that never comes."""
    faults = Faults(job).fail_at(0, 3, "exception", "optimizer", again=True)
    config = faults.config(stages=2, sections='[checkpoint]\ndir = "kept"\nevery_steps = 1')
    result = drive(config, timeout=60)
    assert result.code == 1, result.err
    assert "stage 'stage0' failed in optimizer at step 3" in result.err


@pytest.mark.cluster
def test_a_hang_before_the_first_step_is_named(job: JobFolder, fault_free: Committed) -> None:
    faults = Faults(job).fail_at(LAST, 0, "lock", "build")
    result = drive(faults.config(), "--set", "recovery.watchdog=1.0")
    assert committed(result) == fault_free
    assert_recovered(faults, result)
    error = result.event("fault")["error"]
    assert "stage 'stage2' on" in error
    assert "in build at step 0" in error
    assert "in _strike" in error


@pytest.mark.cluster
@pytest.mark.parametrize("how", ["SIGSTOP", "brittle"])
def test_a_stopped_process_is_named_with_its_state(job: JobFolder, how: str) -> None:
    faults = Faults(job).fail_at(LAST, STEP, how, "optimizer")
    silent = ("--set", "recovery.heartbeat_timeout=1.5", "--set", "recovery.max_restarts=0")
    result = drive(faults.config(), *silent)
    assert result.code == 75
    assert "stage 'stage2' on" in result.err
    assert f"in optimizer at step {STEP}" in result.err
    assert "State: T (stopped)" in result.err, result.err
    assert ("most recent call first" in result.err) == (how == "SIGSTOP")


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.cluster)])
def test_a_server_that_ends_rejoins_its_job(
    job: JobFolder, slow_fault_free: Committed, how: str
) -> None:
    """One that is stopped in good order hands its state over first."""
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(lend_servers(2))

        def end(run: RunningHere) -> None:
            run.wait_for_line(LOSING)
            servers[1].process.send_signal(signal.Signals[how])
            servers[1].process.wait(DEADLINE)
            run.wait_for_line('"waiting"')
            servers[1].end()
            stack.enter_context(lend_server_at(servers[1].address))

        where = ("--connect", connect(servers))
        result = rpcmp("drive", slow_config(job, 2 * SLOW), "--json", *where, during=end)
    assert_went_on(result, slow_fault_free)
    what = "closed the connection" if how == "SIGKILL" else "is being stopped"
    assert what in result.event("fault")["error"]


@pytest.mark.cluster
def test_a_server_that_says_nothing_is_named(job: JobFolder, slow_fault_free: Committed) -> None:
    """Before it counts as lost: it goes on here, and so does the run, with the same bits."""
    with lend_servers(2) as servers:

        def suspend(run: RunningHere) -> None:
            run.wait_for_line(LOSING)
            servers[1].process.send_signal(signal.SIGSTOP)
            try:
                run.wait_for_line("has said nothing for 4 s")
            finally:
                servers[1].process.send_signal(signal.SIGCONT)

        where = ("--connect", connect(servers))
        result = rpcmp("drive", slow_config(job), "--json", *where, during=suspend)
    assert committed(result) == slow_fault_free


MACHINERY = [
    ("serve", signal.SIGKILL),
    ("serve", signal.SIGSTOP),
    ("rpcmp.process", signal.SIGKILL),  # the fork server
    ("rpcmp.process", signal.SIGSTOP),
]


@pytest.mark.cluster
@pytest.mark.usefixtures("own_forks")
@pytest.mark.parametrize(("what", "signum"), MACHINERY)
def test_a_lost_process_that_computes_nothing_is_replaced(
    job: JobFolder, token: str, slow_fault_free: Committed, what: str, signum: signal.Signals
) -> None:
    with running("drive", slow_config(job, 8 * SLOW), "--json") as run:
        run.wait_for_line(LOSING)
        lost = next(process for process in with_token(token) if runs(process, what))
        lost.send_signal(signum)
        result = run.wait()
    assert committed(result) == slow_fault_free
    assert [event["event"] for event in result.events].count("recovered") == 1
    if signum == signal.SIGSTOP:
        assert f"(pid {lost.pid}) was stopped: it is killed" in result.err
