"""A driver is lost: another one goes on from what the stage servers hold, and only one."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.server.client import StageClient
from rpcmp.v1 import control_pb2 as pb
from tests.support.faults import Committed, Faults, committed, drive
from tests.support.halfprecision import SCALED
from tests.support.hosts import LOSING, SLOW, committed_without_fault, slow_config
from tests.support.longjob import LONG_JOB
from tests.support.processes import (
    JobFolder,
    Result,
    Server,
    connect,
    describe,
    poll_for,
    rpcmp,
    running,
    running_server,
    running_servers,
    status,
)
from tests.zoo import architectures

Servers = list[Server]


@pytest.fixture(scope="module")
def fault_free(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """The commits of a run without a loss."""
    return committed_without_fault(tmp_path_factory.mktemp("fault_free"))


@pytest.fixture
def servers() -> Iterator[Servers]:
    with running_servers(2) as started:
        yield started


def lose_driver(config: Path, servers: Servers, *options: str, line: str = LOSING) -> Result:
    """Run a job up to a line of its output, and kill all processes of its driver."""
    where = ("--connect", connect(servers))
    with running("drive", config, "--json", *where, *options) as run:
        run.wait_for_line(line)
        os.killpg(run.pid, signal.SIGKILL)
        run.process.wait()
        result = run.wait()
    poll_for(lambda: is_held(config, servers), "the servers to notice it")
    return result


def is_held(config: Path, servers: Servers) -> bool:
    return all(stage["state"] == "holding" for stage in status(config, servers))


def assert_goes_on(before: Result, after: Result, fault_free: Committed) -> None:
    """Check that the next driver began where the servers were, and ended with the same bits."""
    resumed = after.event("resumed")
    assert resumed["from_memory"], after.err
    assert resumed["step"] >= before.event("step")["step"] - 1
    assert committed(after) == (fault_free[0][resumed["step"] :], fault_free[1])
    assert after.event("generation")["generation"] == 2


def test_another_driver_goes_on_where_the_servers_are(
    job: JobFolder, fault_free: Committed, servers: Servers
) -> None:
    """From another folder, as on another host, where there are no checkpoints."""
    before = lose_driver(slow_config(job), servers)
    config = slow_config(JobFolder(job.folder.with_name("elsewhere")))
    shown = rpcmp("status", config, "--connect", connect(servers))
    assert "job (held, " in shown.out
    after = rpcmp("drive", config, "--resume", "--json", "--connect", connect(servers))
    assert_goes_on(before, after, fault_free)
    assert {stage["state"] for stage in status(config, servers)} == {"idle"}


@pytest.mark.parametrize(("every", "ending", "code"), [(1, None, 1), (4, signal.SIGTERM, 143)])
def test_steps_that_could_not_be_saved_are_held(
    job: JobFolder,
    fault_free: Committed,
    servers: Servers,
    every: int,
    ending: signal.Signals | None,
    code: int,
) -> None:
    """Whether the run ends for that, or by a signal meanwhile."""
    config = slow_config(job)
    saving = ("--set", "checkpoint.dir=saved", "--set", f"checkpoint.every_steps={every}")
    command: list[str | Path] = ["drive", config, "--json", "--connect", connect(servers), *saving]
    folder = job.folder / "saved"
    with running(*command) as run:
        run.wait_for_line('"event": "checkpoint", "step": 4,')
        folder.rename(job.folder / "away")
        folder.write_text("a file in the way")
        if ending is not None:
            run.wait_for_line("no checkpoint of step")
            os.kill(run.pid, ending)
        before = run.wait()
    assert before.code == code
    assert "hold the newest steps for 600 s: the same command with --resume" in before.err
    poll_for(lambda: is_held(config, servers), "the servers to notice it")
    folder.unlink()
    assert_goes_on(before, rpcmp(*command, "--resume"), fault_free)


def test_the_driver_and_a_server_are_lost(
    job: JobFolder, fault_free: Committed, servers: Servers
) -> None:
    """The neighbour's copy of the stage's snapshots is enough. A try that fails drops nothing."""
    config = slow_config(job)
    before = lose_driver(config, servers)
    lost = servers[1]
    psutil.Process(lost.pid).kill()
    lost.run.wait()
    failed = rpcmp("drive", config, "--resume", "--json", "--connect", connect(servers))
    assert failed.code == 75
    assert lost.address in failed.err
    with running_server("--stage", "1", "--listen", lost.address, owner="stage 1") as again:
        where = connect([servers[0], again])
        after = rpcmp("drive", config, "--resume", "--json", "--connect", where)
    assert_goes_on(before, after, fault_free)


def test_a_spare_that_has_taken_a_stage_is_found(
    job: JobFolder, fault_free: Committed, servers: Servers
) -> None:
    config = slow_config(job, milliseconds=4 * SLOW)
    with running_server("--spare", "--listen", "127.0.0.1:0", owner="spare") as spare:
        settings = [f"recovery.spares=['{spare.address}']", "recovery.replace_after=0.5"]
        where = ["--connect", connect(servers)]
        where += [part for setting in settings for part in ("--set", setting)]
        with running("drive", config, "--json", *where) as run:
            run.wait_for_line(LOSING)
            psutil.Process(servers[1].pid).kill()
            run.wait_for_line('"recovered"')
            run.wait_for_line('"event": "step", "step": 9,')
            os.killpg(run.pid, signal.SIGKILL)
            run.process.wait()
            before = run.wait()
        poll_for(lambda: describe(spare).holds_s, "the spare to notice it")
        after = rpcmp("drive", config, "--resume", "--json", *where)
    replaced = after.event("replaced")
    assert (replaced["lost"], replaced["address"]) == (servers[1].address, spare.address)
    resumed = after.event("resumed")["step"]
    assert resumed >= before.event("step")["step"] - 1
    assert committed(after) == (fault_free[0][resumed:], fault_free[1])


OF_ALL_KINDS = """
[early_stopping]
patience = 20
[data]
train = "zoo:regression"
test = "zoo:regression"
batch_size = 10
"""


def test_the_drivers_own_state_is_the_same(job: JobFolder, servers: Servers) -> None:
    """The loss scale, the evaluations, the counter of early stopping, the epoch's mean loss."""
    text = f"steps = 20\nevaluate_every_steps = 3\n{SCALED}"
    config = Faults(job).config(text, 2, 10.0, OF_ALL_KINDS)
    whole = drive(config)
    before = lose_driver(config, servers)
    after = rpcmp("drive", config, "--resume", "--json", "--connect", connect(servers))
    assert_goes_on(before, after, committed(whole))
    begin = after.event("resumed")["step"]
    ours, theirs = (
        [
            (e["step"], e["loss"])
            for e in result.events
            if e["event"] == "eval" and e["step"] > begin
        ]
        for result in (whole, after)
    )
    assert ours == theirs
    kept = ("loss_scale", "skipped_steps", "metrics")
    assert [whole.event("summary")[key] for key in kept] == [
        after.event("summary")[key] for key in kept
    ]


@pytest.mark.long
def test_a_checkpoint_of_a_later_step_is_used_instead(
    job: JobFolder, fault_free: Committed, servers: Servers
) -> None:
    """Snapshots are taken every tenth step here, checkpoints every third."""
    config = slow_config(job)
    seldom = [
        part
        for setting in (
            "checkpoint.dir=saved",
            "checkpoint.every_steps=3",
            "recovery.mirror_every_steps=10",
        )
        for part in ("--set", setting)
    ]
    before = lose_driver(config, servers, *seldom, line='"event": "checkpoint", "step": 6,')
    where = ("--connect", connect(servers))
    after = rpcmp("drive", config, "--resume", "--json", *where, *seldom)
    resumed = after.event("resumed")
    assert resumed["step"] in (6, 9)
    assert before.event("checkpoint")["step"] <= resumed["step"]
    assert committed(after) == (fault_free[0][resumed["step"] :], fault_free[1])


def test_a_held_job_is_not_dropped_by_accident(job: JobFolder, servers: Servers) -> None:
    config = slow_config(job)
    where = ("--connect", connect(servers))
    lose_driver(config, servers)
    again = rpcmp("drive", config, "--json", *where)
    assert again.code == 75
    assert "holds job 'job' up to step" in again.err
    assert "`rpcmp drive --resume` with its config goes on with it" in again.err
    other = config.with_name("other.toml")
    other.write_text(config.read_text())
    refused = rpcmp("drive", other, "--json", "--resume", *where)
    assert refused.code == 75
    assert "holds job 'job' up to step" in refused.err
    assert is_held(config, servers)
    fresh = rpcmp("drive", other, "--json", "--fresh", *where)
    assert fresh.code == 0, fresh.err
    assert fresh.event("generation")["generation"] == 1


def test_a_driver_that_was_lost_while_it_ended_its_job_blocks_no_server(
    job: JobFolder, fault_free: Committed, servers: Servers
) -> None:
    config, where = slow_config(job), ("--connect", connect(servers))
    lose_driver(config, servers)

    async def end_first() -> None:
        dialer = Dialer(Security(None))
        async with StageClient("", servers[0].address, dialer) as client:
            await client.connect(10.0, starting=False)
            held = await client.recall()
            await client.stop(
                pb.StopRequest(
                    job_id=held.job_id, generation=held.generation, driver_id=held.driver_id
                )
            )

    asyncio.run(end_first())
    assert [stage["state"] for stage in status(config, servers)] == ["idle", "holding"]
    assert rpcmp("drive", config, "--json", *where).code == 75
    after = rpcmp("drive", config, "--json", "--resume", *where)
    assert committed(after) == fault_free


def test_a_server_that_is_stopped_when_a_run_ends_does_not_hold_it_afterwards(
    job: JobFolder, servers: Servers
) -> None:
    config, where = slow_config(job), ("--connect", connect(servers))
    with running("drive", config, "--json", *where) as run:
        run.wait_for_line('"event": "summary"')
        servers[0].run.process.send_signal(signal.SIGSTOP)
        assert run.wait().code == 0
    servers[0].run.process.send_signal(signal.SIGCONT)
    assert_idle(config, servers)
    assert rpcmp("drive", config, "--json", "--fresh", *where).code == 0


def test_a_driver_that_is_killed_after_its_summary_leaves_nothing_held(
    job: JobFolder, fault_free: Committed, servers: Servers
) -> None:
    """And nothing is trained a second time, unless it is another run."""
    config, where = slow_config(job), ("--connect", connect(servers), "--json")
    with running("drive", config, *where) as run:
        run.wait_for_line('"event": "summary"')
        os.killpg(run.pid, signal.SIGKILL)
        run.process.wait()
        before = run.wait()
    assert_idle(config, servers)
    again = rpcmp("drive", config, "--resume", *where)
    assert (again.code, again.event("resumed")["is_complete"]) == (0, True)
    assert again.event("run")["job_id"] == before.event("run")["job_id"]
    assert committed(again) == ([], fault_free[1])
    first, second = (
        {key: value for key, value in result.event("summary").items() if key != "time"}
        for result in (before, again)
    )
    assert first == second
    traced = rpcmp("drive", config, "--resume", *where, "--trace", job.folder / "trace.json")
    assert committed(traced) == fault_free
    (job.folder / "another.py").write_text("")
    assert committed(rpcmp("drive", config, "--resume", *where)) == fault_free
    longer = rpcmp("drive", config, "--resume", *where, "--steps", "21")
    assert (longer.event("resumed")["step"], longer.event("summary")["steps"]) == (0, 21)
    fresh = rpcmp("drive", config, "--fresh", *where)
    assert committed(fresh) == fault_free


def test_a_complete_run_of_a_module_that_was_cut_is_known_again(
    job: JobFolder, servers: Servers
) -> None:
    config = job.config(architectures.job("language", 2, "1f1b"))
    where = ("--connect", connect(servers), "--json")
    before = rpcmp("drive", config, *where)
    again = rpcmp("drive", config, "--resume", *where)
    assert again.event("resumed")["is_complete"]
    assert committed(again) == ([], before.event("summary")["parameters_sha256"])


def assert_idle(config: Path, servers: Servers) -> None:
    """Wait until no server is claimed, and check that none holds a job."""

    def free() -> list[str]:
        states = [stage["state"] for stage in status(config, servers)]
        return states if {*states} <= {"idle", "holding"} else []

    assert poll_for(free, "free servers") == ["idle", "idle"]


def test_servers_are_idle_again_when_no_driver_comes(job: JobFolder, servers: Servers) -> None:
    config = slow_config(job)
    lose_driver(config, servers, "--set", "recovery.keep_after_driver=1.0")
    poll_for(
        lambda: {stage["state"] for stage in status(config, servers)} == {"idle"},
        "the servers to be idle",
    )
    after = rpcmp("drive", config, "--json", "--connect", connect(servers), "--steps", "1")
    assert after.code == 0, after.err


def test_a_job_has_one_driver(job: JobFolder, servers: Servers) -> None:
    """A second one is refused, until the first is suspended; that is refused when it comes back."""
    config, where = job.config(LONG_JOB), ("--connect", connect(servers), "--json")
    with running("drive", config, *where, shares=False) as first:
        first.wait_for_line('"event": "step", "step": 7,')
        second = rpcmp("drive", config, "--resume", *where)
        assert second.code == 75
        assert "busy with job 'long-job', whose driver is at work" in second.err
        family = [first.pid, *(p.pid for p in psutil.Process(first.pid).children(recursive=True))]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        steps = first.result().event("step")["step"] + 20

        def taken() -> Result | None:
            result = rpcmp("drive", config, "--resume", *where, "--steps", str(steps))
            return None if result.code == 75 else result

        result = poll_for(taken, "the first driver to count as gone")
        resumed = result.event("resumed")
        assert resumed["from_memory"]
        assert result.event("step")["step"] == steps
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        late = first.wait()
    assert late.code == 76
    assert late.event("step")["step"] <= resumed["step"] + 1
