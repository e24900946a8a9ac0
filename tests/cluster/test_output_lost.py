"""Output that cannot be written, and a lost terminal: the run survives both."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rpcmp.process.interpreter import count_stop_requests
from tests.support.processes import (
    JobFolder,
    Server,
    makes_networks,
    poll_for,
    program,
    rpcmp,
    running,
    running_server,
)
from tests.support.runs import checkpoints_in

WITH_SIGHUP = ["env", "--default-signal=HUP"]
"""Prefix of a command: these tests may run under nohup, which ignores SIGHUP."""

CLUSTER = pytest.mark.cluster

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
LONG = "steps = 100000\nnum_microbatches = 1\n[model]\nlayers = 'zoo:mlp'\nbalance = [4]\n"
SHORT = LONG.replace("100000", "2")
FAILING = SHORT.replace("zoo:mlp", "zoo:broken_layers").replace("[4]", "[2]")
"""A job whose stage cannot be built."""

SLOW = """
steps = 30
num_microbatches = 1
[model]
layers = "zoo:lopsided"
balance = [5]
"""
"""A job that takes two seconds and sleeps for most of them."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Yield a server that several runs share.

    It is not from the pool, because it must accept processes of a shell.
    """
    with running_server("--stage", "0", "--listen", "127.0.0.1:0") as started:
        yield started


def shell(
    command: str, config: Path, server: Server | None = None, shares: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a line of shell code, in which `$RPCMP` and `$CONFIG` are replaced.

    Args:
        server: the server of the job; None: the job starts its own.
        shares: see tests.support.processes.program.
    """
    if server is not None:
        command = command.replace("$CONFIG", f"$CONFIG --connect {server.address}")
    with program(shares) as (rpcmp, fds):
        environment = {**os.environ, "RPCMP": " ".join(rpcmp), "CONFIG": str(config)}
        return subprocess.run(
            ["bash", "-c", command],
            env=environment,
            pass_fds=fds,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )


@pytest.mark.parametrize(
    "options", ["--json", *(pytest.param(o, marks=CLUSTER) for o in ("", "-v", "-q"))]
)
def test_a_full_disk_loses_output_but_no_training(
    job: JobFolder, server: Server, options: str
) -> None:
    ended = shell(f"$RPCMP drive $CONFIG {options} > /dev/full", job.config(SHORT), server)
    assert ended.returncode == 0
    assert ended.stderr.count("No space left on device; the command continues") == 1
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_closed_output_pipe_does_not_end_the_run(job: JobFolder, server: Server) -> None:
    command = "$RPCMP drive $CONFIG -v | head -1; exit ${PIPESTATUS[0]}"
    ended = shell(command, job.config(SHORT), server)
    assert ended.returncode == 0
    first = "job: 2 steps" if makes_networks() else "warning: other users"
    assert ended.stdout.startswith(first)
    assert ended.stderr.count("Broken pipe; the command continues") == 1


@pytest.mark.parametrize(
    "closed",
    [
        "<&- >&- 2>&-",
        *(pytest.param(o, marks=CLUSTER) for o in ("> /dev/full 2> /dev/full", "2>&-")),
    ],
)
def test_the_exit_code_is_right_with_all_streams_closed(
    job: JobFolder, server: Server, closed: str
) -> None:
    """The run starts a server, which inherits the three closed streams."""
    config, failing = job.config(SHORT), job.config(FAILING, "failing.toml")
    driven = rpcmp("drive", failing, "--connect", server.address)
    assert driven.code == 2
    assert "stage 'stage0' failed in build: layer 'bad'" in driven.err
    alone = "<&-" in closed
    command = f"$RPCMP drive $CONFIG {closed}"
    ended = shell(command, config, None if alone else server, shares=not alone)
    assert ended.returncode == 0
    failed = shell(f"$RPCMP drive $CONFIG {closed}", failing, server)
    assert failed.returncode == 2


def test_lost_output_that_was_requested_is_an_error(job: JobFolder) -> None:
    lost = shell("$RPCMP explain $CONFIG --no-measure > /dev/full", job.config(SHORT))
    assert lost.returncode == 1
    assert "No space left on device" in lost.stderr
    assert "Traceback" not in lost.stderr
    enough = shell(
        "$RPCMP explain $CONFIG --no-measure | head -1; exit ${PIPESTATUS[0]}", job.config(SHORT)
    )
    assert (enough.returncode, enough.stderr) == (0, "")


@contextlib.contextmanager
def on_a_terminal(
    folder: Path, *command: str | Path, under: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run `rpcmp COMMAND...` with its own terminal; yield the other end, which the caller closes.

    Args:
        under: a program and its arguments that runs the command.
    """
    ours, theirs = pty.openpty()
    with program() as (rpcmp, fds):
        process = subprocess.Popen(
            [*WITH_SIGHUP, "setsid", "--ctty", *under, *rpcmp, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            pass_fds=fds,
        )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        with contextlib.suppress(OSError):
            os.close(ours)
        process.kill()
        process.wait()


def read_until(terminal: int, text: bytes) -> None:
    seen = b""

    def found() -> bool:
        nonlocal seen
        seen += os.read(terminal, 65536)
        return text in seen

    poll_for(found, f"{text!r} on the terminal")


def test_a_hangup_saves_and_ends_the_run(job: JobFolder, server: Server) -> None:
    config = job.config(LONG)
    command = ("drive", config, "-v", "--connect", server.address)
    with on_a_terminal(job.folder, *command) as (process, terminal):
        read_until(terminal, b"step 3/")
        os.close(terminal)
        assert process.wait(60) == 128 + signal.SIGHUP
    left = checkpoints_in(job.folder / "rpcmp-job").valid()[0].step
    assert left >= 3
    resumed = rpcmp("drive", config, "--json", "--resume", "--set", f"steps={left + 1}")
    assert resumed.event("resumed")["step"] == left


@pytest.mark.parametrize("under", [["nohup"], pytest.param([], marks=CLUSTER)])
def test_a_detached_run_outlives_its_terminal(job: JobFolder, under: list[str]) -> None:
    """nohup ignores the hangup; setsid leaves the run without a terminal."""
    config = job.config(SLOW)
    away = under or ["setsid", "--wait"]
    with on_a_terminal(job.folder, "drive", config, "-v", under=away) as (process, terminal):
        if under:  # nohup writes the output to a file
            poll_for(lambda: (job.folder / "runs").exists(), "the run")
        else:
            read_until(terminal, b"step 3/")
        os.close(terminal)
        if under:
            assert process.wait(60) == 0
        else:
            process.wait(60)  # setsid itself, which waits for the run
    (path,) = (job.folder / "runs").glob("job-*")
    poll_for(lambda: '"outcome": "done"' in (path / "run.json").read_text(), "the end of the run")


def test_a_server_drains_on_hangup(job: JobFolder) -> None:
    serve = ("serve", "--stage", "0", "--listen", "127.0.0.1:0")
    with running(*serve, under=tuple(WITH_SIGHUP)) as run:
        run.wait_for_line("SERVING on")
        os.kill(run.pid, signal.SIGHUP)
        assert run.wait().code == 0


@pytest.mark.parametrize(
    ("received", "found"),
    [
        ([], 0),
        ([INT], 1),
        ([TERM], 1),
        ([HUP], 1),
        ([INT, INT], 2),
        ([TERM, TERM], 2),
        ([TERM, INT], 2),
        ([HUP, HUP], 1),  # from the shell, and from the kernel
        ([HUP, HUP, TERM], 1),  # and from a session manager
        ([TERM, HUP], 1),
        ([HUP, TERM, TERM], 2),
        ([HUP, INT], 2),
    ],
)
def test_several_hangups_count_as_one_signal(received: list[int], found: int) -> None:
    assert count_stop_requests(received) == found
