"""Lost hosts: a run recovers whether they come back or not, even without their data.

In tests/system/test_machines.py the hosts share neither memory nor disks.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.faults import Committed, committed
from tests.support.hosts import LOSING, SLOW, assert_went_on, committed_without_fault, slow_config
from tests.support.lan import cli, issue
from tests.support.pool import lend_server_at, lend_servers
from tests.support.processes import (
    JobFolder,
    RunningHere,
    Server,
    connect,
    forked,
    rpcmp,
    rpcmp_process,
    running,
    running_server,
    with_token,
)
from tests.support.runs import checkpoints_in

AT_ONCE = 20.0
"""Seconds in which a drained server must end; it stops waiting for a job after 30."""


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """Return the commits of a run without a loss."""
    return committed_without_fault(tmp_path_factory.mktemp("fault_free"))


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_server_rejoins_its_job(job: JobFolder, fault_free: Committed, lost: int) -> None:
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(lend_servers(2))

        def lose(run: RunningHere) -> None:
            run.wait_for_line(LOSING)
            servers[lost].end()
            run.wait_for_line('"waiting"')
            stack.enter_context(lend_server_at(servers[lost].address))

        where = ("--connect", connect(servers))
        result = rpcmp("drive", slow_config(job), "--json", *where, during=lose)
    assert_went_on(result, fault_free)
    lost_at = servers[lost].address
    assert f"at {lost_at}: the server closed the connection" in result.event("fault")["error"]


def test_a_server_that_says_nothing_is_named(job: JobFolder, fault_free: Committed) -> None:
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
    assert committed(result) == fault_free
    (text,) = [e["text"] for e in result.events if e["event"] == "log" and "nothing" in e["text"]]
    assert text.startswith(f"the server of stage 'stage1' at {servers[1].address} has said nothing")


@pytest.mark.parametrize("every", [0, 4])
def test_a_fault_costs_at_most_the_steps_since_the_last_snapshot(
    job: JobFolder, fault_free: Committed, every: int
) -> None:
    def lose(run: RunningHere) -> None:
        run.wait_for_line('"event": "step", "step": 7')
        forked("rpcmp.worker")[0].kill()

    more = ("--set", f"recovery.mirror_every_steps={every}")
    result = rpcmp("drive", slow_config(job), "--json", *more, during=lose)
    assert_went_on(result, fault_free, steps=max(1, every))


@pytest.mark.usefixtures("own_forks")
def test_a_server_started_by_the_job_is_restarted(
    job: JobFolder, fault_free: Committed, token: str
) -> None:
    def lose(run: RunningHere) -> None:
        run.wait_for_line(LOSING)
        [victim] = [process for process in with_token(token) if _serves(process, stage=1)]
        victim.kill()

    assert_went_on(rpcmp("drive", slow_config(job), "--json", during=lose), fault_free)


def _serves(process: psutil.Process, stage: int) -> bool:
    line = " ".join(process.cmdline()).split()
    return "serve" in line and line[line.index("--stage") + 1] == str(stage)


@pytest.mark.parametrize("is_secured", [False, True])
def test_a_spare_takes_the_stage_of_a_lost_host(
    job: JobFolder, fault_free: Committed, tmp_path: Path, is_secured: bool
) -> None:
    """A spare may be any stage, so neighbours with certificates serve it the snapshot too."""
    certs = made_certs(tmp_path) if is_secured else None
    with lend_servers(3) if certs is None else secured(certs) as (first, second, spare):
        options = [f"recovery.spares=['{spare.address}']", "recovery.replace_after=0.5"]
        settings = [part for option in options for part in ("--set", option)]
        settings += ["--certs", str(certs / "driver")] if certs is not None else []

        def lose(run: RunningHere) -> None:
            run.wait_for_line(LOSING)
            psutil.Process(second.pid).kill()

        where = ("--connect", connect([first, second]))
        result = rpcmp("drive", slow_config(job), "--json", *where, *settings, during=lose)
    assert_went_on(result, fault_free)
    replaced = result.event("replaced")
    assert (replaced["lost"], replaced["address"]) == (second.address, spare.address)


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_server_that_comes_back_without_its_certificate_is_not_yet_back(
    job: JobFolder, fault_free: Committed, tmp_path: Path, is_mended: bool
) -> None:
    """The run warns and waits for the right one; if that does not come, it saves its state."""
    certs = made_certs(tmp_path)
    with contextlib.ExitStack() as stack:
        first, second, _ = stack.enter_context(secured(certs))
        again = ("--stage", "1", "--listen", second.address)

        def lose(run: RunningHere) -> None:
            run.wait_for_line(LOSING)
            psutil.Process(second.pid).kill()
            run.wait_for_line('"waiting"')
            with running_server(*again):
                run.wait_for_line("does not speak TLS at all")
            if is_mended:
                serve = (*again, "--certs", str(certs / "stage1"))
                stack.enter_context(running_server(*serve))

        settings = ["--certs", str(certs / "driver"), "--json"]
        settings += [] if is_mended else ["--set", "recovery.give_up_after=6"]
        where = ("--connect", connect([first, second]))
        result = rpcmp("drive", slow_config(job), *where, *settings, during=lose)
    if is_mended:
        assert_went_on(result, fault_free)
        return
    assert result.code == 75
    left = checkpoints_in(job.folder / "rpcmp-job").valid()[0]
    assert result.event("step")["step"] - left.step <= 1


@contextlib.contextmanager
def secured(certs: Path) -> Iterator[list[Server]]:
    """Start servers of two stages and a spare, which accept only peers with certificates."""
    with contextlib.ExitStack() as stack:
        servers = []
        for which in ("--stage 0", "--stage 1", "--spare"):
            who = which.replace("--", "").replace(" ", "")
            serve = (*which.split(), "--listen", "127.0.0.1:0", "--certs", str(certs / who))
            servers.append(stack.enter_context(running_server(*serve)))
        yield servers


def made_certs(folder: Path) -> Path:
    """Issue certificates for two stages, a spare and a driver."""
    certs = issue(folder / "certs", "127.0.0.1", "127.0.0.1")
    cli(certs, "issue", "--spare", "--host", "127.0.0.1")
    return certs


def test_a_host_lost_for_good_ends_the_run_with_a_checkpoint(
    job: JobFolder, fault_free: Committed
) -> None:
    config = slow_config(job)
    with lend_servers(2) as servers:

        def lose(run: RunningHere) -> None:
            run.wait_for_line(LOSING)
            servers[1].end()

        at_once = ("--set", "recovery.give_up_after=0.5")
        where = ("--connect", connect(servers))
        result = rpcmp("drive", config, "--json", *where, *at_once, during=lose)
    assert result.code == 75
    assert f"stage 'stage1' at {servers[1].address} did not come back" in result.err
    left = checkpoints_in(job.folder / "rpcmp-job").valid()[0]
    last = result.event("step")["step"]
    assert last - left.step <= 1
    resumed = rpcmp("drive", config, "--resume", "--json")
    steps, parameters = committed(resumed)
    assert (steps, parameters) == (fault_free[0][left.step :], fault_free[1])


@pytest.mark.parametrize("how", ["SIGTERM", "rpcmp drain"])
def test_a_drained_server_hands_its_state_over(
    job: JobFolder, fault_free: Committed, how: str
) -> None:
    config = slow_config(job, milliseconds=4 * SLOW)  # leaves time for the command to start
    with contextlib.ExitStack() as stack:
        servers = stack.enter_context(lend_servers(2))

        def drain(run: RunningHere) -> None:
            run.wait_for_line(LOSING)
            if how == "SIGTERM":
                servers[1].process.terminate()
            else:
                assert rpcmp_process("drain", servers[1].address, timeout=AT_ONCE).code == 0
            assert servers[1].process.wait(AT_ONCE) == 0
            run.wait_for_line('"waiting"')
            stack.enter_context(lend_server_at(servers[1].address))

        result = rpcmp("drive", config, "--json", "--connect", connect(servers), during=drain)
    assert_went_on(result, fault_free)
    (fault,) = [event["error"] for event in result.events if event["event"] == "fault"]
    assert "the server of stage 'stage1' is being stopped" in fault


def test_a_killed_driver_leaves_idle_servers_and_can_be_resumed(
    job: JobFolder, fault_free: Committed
) -> None:
    config = slow_config(job)
    saves = ("--set", "checkpoint.dir=saved", "--set", "checkpoint.every_steps=2")
    with lend_servers(2) as servers:
        where = ("--connect", connect(servers))
        with running("drive", config, "--json", *saves, *where) as run:
            run.wait_for_line('"event": "checkpoint"')
            run.process.send_signal(signal.SIGKILL)
            run.wait()
        result = rpcmp("drive", config, "--resume", "--json", *saves, *where)
    begin = result.event("resumed")["step"]
    assert begin >= 2
    assert committed(result) == (fault_free[0][begin:], fault_free[1])
