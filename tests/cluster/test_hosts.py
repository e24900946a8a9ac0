"""Hosts that go, with all that they held, and come back or do not: the run goes on all the same."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.faults import Faults, committed
from tests.support.lan import cli, issue
from tests.support.processes import (
    JobFolder,
    Result,
    Running,
    Server,
    connect,
    rpcmp,
    rpcmp_process,
    running,
    runs,
    with_token,
)
from tests.support.runs import checkpoints_in

STEPS = "steps = 30"
SLOW = 10.0
"""Milliseconds that a forward takes, so that there is time to lose something."""

AT_ONCE = 20.0
"""Seconds in which a server that is drained has to be gone; after 30 it would give up waiting."""

Committed = tuple[list[tuple[int, str]], str]


def slow_config(job: JobFolder, stages: int = 2, milliseconds: float = SLOW) -> Path:
    return Faults(job).config(STEPS, stages, milliseconds)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Committed:
    """What a run commits that loses nothing."""
    config = slow_config(JobFolder(tmp_path_factory.mktemp("undisturbed") / "job"))
    return committed(rpcmp("drive", config, "--json"))


@contextlib.contextmanager
def server(
    stage: int | None,
    address: str = "127.0.0.1:0",
    under: tuple[str, ...] = (),
    certs: Path | None = None,
) -> Iterator[Server]:
    """A stage server, or a spare.

    Args:
        certs: folder of everybody's certificates; None: it has none.
    """
    which = ["--spare"] if stage is None else ["--stage", str(stage)]
    if certs is not None:
        which += ["--certs", str(certs / ("spare" if stage is None else f"stage{stage}"))]
    with running("serve", *which, "--listen", address, under=under) as run:
        yield Server(run, run.wait_for_line(r"SERVING on (\S+)")[1])


@contextlib.contextmanager
def driving(config: Path, servers: list[Server], *options: str) -> Iterator[Running]:
    """A run that has done a few steps."""
    with running("drive", config, "--connect", connect(servers), "--json", *options) as run:
        run.wait_for_line('"event": "step", "step": 5')
        yield run


def faults_of(result: Result) -> list[str]:
    return [event["error"] for event in result.events if event["event"] == "fault"]


def assert_went_on(result: Result, undisturbed: Committed, steps: int = 1) -> None:
    """One generation more, from memory, the same bits, and at most `steps` done again."""
    assert committed(result) == undisturbed
    (recovered,) = [event for event in result.events if event["event"] == "recovered"]
    (fault,) = [event for event in result.events if event["event"] == "fault"]
    assert recovered["generation"] == 2
    assert fault["step"] - recovered["step"] <= steps


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.long)])
def test_a_server_that_was_killed_is_taken_back(
    job: JobFolder, undisturbed: Committed, lost: int
) -> None:
    with server(0) as first, server(1) as second:
        servers = [first, second]
        with driving(slow_config(job), servers) as run:
            servers[lost].run.process.kill()
            servers[lost].run.process.wait()
            run.wait_for_line('"waiting"')
            with server(lost, servers[lost].address):
                assert_went_on(run.wait(), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("every", [0, 4])
@pytest.mark.usefixtures("own_forks")
def test_snapshots_every_few_steps_cost_no_more_than_these(
    job: JobFolder, undisturbed: Committed, token: str, every: int
) -> None:
    more = ("--set", f"recovery.mirror_every_steps={every}")
    with running("drive", slow_config(job), "--json", *more) as run:
        run.wait_for_line('"event": "step", "step": 7')
        worker = next(p for p in with_token(token) if runs(p, "rpcmp.worker"))
        worker.kill()
        assert_went_on(run.wait(), undisturbed, steps=max(1, every))


@pytest.mark.usefixtures("own_forks")
def test_a_server_that_the_job_started_is_started_again(
    job: JobFolder, undisturbed: Committed, token: str
) -> None:
    with running("drive", slow_config(job), "--json") as run:
        run.wait_for_line('"event": "step", "step": 5')
        [victim] = [process for process in with_token(token) if _serves(process, stage=1)]
        victim.kill()
        assert_went_on(run.wait(), undisturbed)


@pytest.mark.long
@pytest.mark.usefixtures("own_forks")
def test_a_fork_server_that_was_killed_is_started_again(
    job: JobFolder, undisturbed: Committed, token: str
) -> None:
    """With it go the driver process and all workers, and every server is as it was."""
    with running("drive", slow_config(job), "--json") as run:
        run.wait_for_line('"event": "step", "step": 5')
        [victim] = [process for process in with_token(token) if runs(process, "rpcmp.process")]
        victim.kill()
        assert_went_on(run.wait(), undisturbed)


def _serves(process: psutil.Process, stage: int) -> bool:
    line = process.cmdline()
    return "serve" in line and line[line.index("--stage") + 1] == str(stage)


@pytest.mark.parametrize("is_secured", [False, True])
def test_a_spare_takes_the_stage_of_a_host_that_stays_away(
    job: JobFolder, undisturbed: Committed, tmp_path: Path, is_secured: bool
) -> None:
    """With certificates too a neighbour gives it the stage's snapshot: it may be any stage."""
    certs = made_certs(tmp_path) if is_secured else None
    with (
        server(0, certs=certs) as first,
        server(1, certs=certs) as second,
        server(None, certs=certs) as spare,
    ):
        options = [f"recovery.spares=['{spare.address}']", "recovery.replace_after=0.5"]
        settings = [part for option in options for part in ("--set", option)]
        settings += ["--certs", str(certs / "driver")] if certs is not None else []
        with driving(slow_config(job), [first, second], *settings) as run:
            second.run.process.kill()
            result = run.wait()
    assert_went_on(result, undisturbed)
    replaced = result.event("replaced")
    assert (replaced["lost"], replaced["address"]) == (second.address, spare.address)


def made_certs(folder: Path) -> Path:
    """Certificates for two stages, a spare and a driver."""
    certs = issue(folder / "certs", "127.0.0.1", "127.0.0.1")
    cli(certs, "issue", "--spare", "--host", "127.0.0.1")
    return certs


@pytest.mark.long
def test_a_host_that_stays_away_ends_the_run_with_a_checkpoint(
    job: JobFolder, undisturbed: Committed
) -> None:
    config = slow_config(job)
    at_once = ("--set", "recovery.give_up_after=0.5")
    with (
        server(0) as first,
        server(1) as second,
        driving(config, [first, second], *at_once) as run,
    ):
        second.run.process.kill()
        result = run.wait()
    assert result.code == 75
    assert f"stage 'stage1' at {second.address} did not come back" in result.err
    left = checkpoints_in(job.folder / "rpcmp-job").valid()[0]
    last = result.event("step")["step"]
    assert last - left.step <= 1
    resumed = rpcmp("drive", config, "--resume", "--json")
    steps, parameters = committed(resumed)
    assert (steps, parameters) == (undisturbed[0][left.step :], undisturbed[1])


@pytest.mark.parametrize("how", [pytest.param("SIGTERM", marks=pytest.mark.long), "rpcmp drain"])
def test_a_server_that_is_drained_hands_its_state_over(
    job: JobFolder, undisturbed: Committed, how: str
) -> None:
    config = slow_config(job, milliseconds=4 * SLOW)  # a command takes a while to start
    with server(0) as first, server(1) as second, driving(config, [first, second]) as run:
        if how == "SIGTERM":
            second.run.process.terminate()
        else:
            assert rpcmp_process("drain", second.address, timeout=AT_ONCE).code == 0
        assert second.run.wait(AT_ONCE).code == 0
        run.wait_for_line('"waiting"')
        with server(1, second.address):
            result = run.wait()
    assert_went_on(result, undisturbed)
    assert "the server of stage 'stage1' is being stopped" in faults_of(result)[0]


@pytest.mark.long
def test_a_driver_that_was_killed_leaves_idle_servers_and_can_be_resumed(
    job: JobFolder, undisturbed: Committed
) -> None:
    config = slow_config(job)
    saves = ("--set", "checkpoint.dir=saved", "--set", "checkpoint.every_steps=2")
    with server(0) as first, server(1) as second:
        with driving(config, [first, second], *saves) as run:
            run.wait_for_line('"event": "checkpoint"')
            run.process.send_signal(signal.SIGKILL)
            run.wait()
        where = ("--connect", connect([first, second]))
        result = rpcmp("drive", config, "--resume", "--json", *saves, *where)
    begin = result.event("resumed")["step"]
    assert begin >= 2
    assert committed(result) == (undisturbed[0][begin:], undisturbed[1])


@pytest.fixture
def another_machine(tmp_path: Path) -> tuple[str, ...]:
    """A command that runs another as if on another machine, that has been booted for itself."""
    boot = tmp_path / "boot_id"
    boot.write_text("another-machine\n")
    script = f'mount --bind {boot} /proc/sys/kernel/random/boot_id && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, "sh")


@pytest.fixture
def elsewhere(another_machine: tuple[str, ...], job: JobFolder) -> tuple[str, ...]:
    """On another machine, with a disk of its own where the checkpoints go."""
    disk = job.folder / "saved"
    disk.mkdir()
    return (*another_machine, "sh", "-c", f'mount -t tmpfs rpcmp {disk} && exec "$@"', "sh")


def test_a_lost_machine_costs_one_step_at_most(
    job: JobFolder, undisturbed: Committed, elsewhere: tuple[str, ...]
) -> None:
    """The machines do not share memory: snapshots travel from one to the other."""
    with (
        server(0) as here,
        server(1, under=elsewhere) as there,
        driving(slow_config(job), [here, there]) as run,
    ):
        psutil.Process(there.pid).kill()
        run.wait_for_line('"waiting"')
        with server(1, there.address, under=elsewhere):
            assert_went_on(run.wait(), undisturbed)


@pytest.mark.long
def test_a_machine_with_an_empty_disk_fetches_its_files(
    job: JobFolder, undisturbed: Committed, elsewhere: tuple[str, ...]
) -> None:
    config = slow_config(job)
    saves = ("--set", "checkpoint.dir=saved", "--set", "checkpoint.every_steps=10")
    with server(0) as here:
        with server(1, under=elsewhere) as there:
            where = ("--connect", connect([here, there]))
            first = rpcmp("drive", config, "--json", "--steps", "10", *saves, *where)
            assert first.event("checkpoint")["step"] == 10
        with server(1, under=elsewhere) as fresh:
            where = ("--connect", connect([here, fresh]))
            result = rpcmp("drive", config, "--resume", "--json", *saves, *where)
    assert committed(result) == (undisturbed[0][10:], undisturbed[1])


@pytest.mark.long
def test_machines_with_empty_disks_get_what_the_driver_has(
    job: JobFolder, undisturbed: Committed, elsewhere: tuple[str, ...]
) -> None:
    config = slow_config(job)
    saves = ("--set", "checkpoint.dir=saved", "--set", "checkpoint.every_steps=10")
    assert rpcmp("drive", config, "--json", "--steps", "10", *saves).code == 0
    with server(0, under=elsewhere) as first, server(1, under=elsewhere) as second:
        where = ("--connect", connect([first, second]))
        result = rpcmp("drive", config, "--resume", "--json", *saves, *where)
    assert committed(result) == (undisturbed[0][10:], undisturbed[1])


@pytest.mark.long
def test_machines_may_share_a_disk(
    job: JobFolder, undisturbed: Committed, another_machine: tuple[str, ...]
) -> None:
    config = slow_config(job)
    section = {"dir": '"saved"', "every_steps": 5, "keep": 2, "shared": "true"}
    saves = [part for key in section for part in ("--set", f"checkpoint.{key}={section[key]}")]
    with server(0) as here, server(1, under=another_machine) as there:
        where = ("--connect", connect([here, there]))
        first = rpcmp("drive", config, "--json", "--steps", "20", *saves, *where)
        folder = checkpoints_in(job.folder / "saved")
        assert [manifest.step for manifest in folder.valid()] == [20, 15]
        names = ["manifest.json", "stage0.safetensors", "stage1.safetensors"]
        assert sorted(file.name for file in folder.path_of(20).iterdir()) == names
        assert not folder.path_of(10).exists()
        assert not [event for event in first.events if event["event"] == "warning"]
        result = rpcmp("drive", config, "--resume", "--json", *saves, *where)
    assert committed(result) == (undisturbed[0][20:], undisturbed[1])


def test_what_a_failed_run_has_left_is_removed_on_every_machine(
    job: JobFolder, elsewhere: tuple[str, ...]
) -> None:
    config = job.config("""
        steps = 10
        [model]
        layers = "zoo:mlp"
        balance = [2, 2]
        [checkpoint]
        dir = "saved"
        every_steps = 1000
        [data]
        train = { callable = "zoo:Unreadable", kwargs = { at = 37 } }
        batch_size = 10
        shuffle = false
    """)
    disk = job.folder / "saved"
    with server(0) as here, server(1, under=elsewhere) as there:
        of_there = Path(f"/proc/{there.pid}/root{disk}")
        where = ("--connect", connect([here, there]), "--json")
        assert rpcmp("drive", config, *where).code == 1
        left = {path.name for path in disk.iterdir()}
        assert len(left) == 1
        assert {path.name for path in of_there.iterdir()} == left
        mended = rpcmp("drive", config, *where, "--set", "data.train.kwargs.at=-1")
        assert mended.code == 0, mended.err
        for one in (disk, of_there):
            (kept,) = one.iterdir()
            assert kept.name not in left
            assert [path.name for path in kept.iterdir()] == ["step-00000010"]
