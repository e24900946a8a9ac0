"""Faults of real processes: a clear error, and stage servers that are idle again afterwards.

Recovery is off in most of these tests, so that the first error ends the job. test_recovery.py tests
recovery, and tests/controlplane what does not take real processes.
"""

from __future__ import annotations

import mmap
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.support.places import EXAMPLES
from tests.support.pool import PooledServer, lend_servers
from tests.support.processes import (
    DEADLINE,
    FORKS,
    JobFolder,
    RunningHere,
    connect,
    describe,
    forked,
    poll_for,
    program,
    rpcmp,
    running,
    running_servers,
    runs,
    with_token,
)


@pytest.fixture
def shared_servers() -> Iterator[list[PooledServer]]:
    """Yield servers that all tests of this module share, since they must survive every fault."""
    with lend_servers(2) as servers:
        yield servers
        assert not any(server.has_ended for server in servers)


def drive(job: JobFolder, servers: list[PooledServer], text: str, *options: str) -> tuple[int, str]:
    """Run a job on `servers`, which must then be idle; return exit code and standard error."""
    config = job.config(text)
    at_once = ("--set", "recovery.enabled=false")
    result = rpcmp("drive", config, "--connect", connect(servers), *at_once, *options)
    for server in servers:
        found = describe(server)
        assert (found.job, found.worker_pid, found.draining) == ("", 0, False)
    return result.code, result.err


def troubled(balance: str, **arguments: object) -> str:
    kwargs = ", ".join(f"{key} = {value!r}" for key, value in arguments.items())
    return f'[model]\nlayers = "zoo:troubled"\nbalance = {balance}\nkwargs = {{ {kwargs} }}'


ENDLESS = "steps = 100000\nrecovery = { enabled = false }"


def test_an_exception_in_the_model_names_stage_step_and_microbatch(
    job: JobFolder, shared_servers: list[PooledServer]
) -> None:
    """This is one of the cases of tests/group/test_failures.py, through the command line."""
    text = troubled("[2, 2]", phase="backward", position=2, step=2)
    code, err = drive(job, shared_servers, text, "--set", "schedule=zero-bubble")
    assert code == 1
    assert "stage 'stage1' failed in backward of micro-batch 0 at step 2: ValueError" in err
    assert "planted: größer als erlaubt" in err
    assert "zoo.py" in err  # the remote traceback, in the user's own file
    assert "in trouble" in err


def test_a_dead_worker_that_has_forked_is_named(
    job: JobFolder, shared_servers: list[PooledServer]
) -> None:
    """Its child has a copy of its channel."""
    text = troubled("[2, 2]", phase="backward", position=0, step=2, kind="fork")
    code, err = drive(job, shared_servers, text)
    assert code == 1
    assert "the worker of stage 'stage0'" in err
    assert "signal 9" in err


def test_the_first_signal_finishes_the_step_and_ends_the_job(
    job: JobFolder, shared_servers: list[PooledServer]
) -> None:
    config = job.config('steps = 100000\n[model]\nlayers = "zoo:jittery"\nbalance = [3, 2]')

    def send(run: RunningHere) -> None:
        run.wait_for_line('"event": "step"')
        run.signal(signal.SIGINT)

    where = ("--connect", connect(shared_servers))
    result = rpcmp("drive", config, "--json", *where, during=send)
    assert result.code == 130
    assert result.event("summary")["steps"] == result.event("step")["step"]
    assert "ended by SIGINT after step" in result.err
    assert "nothing was saved: add a [checkpoint] section" in result.err
    assert "--resume" not in result.err
    assert [describe(server).job for server in shared_servers] == ["", ""]


@pytest.mark.cluster
@pytest.mark.usefixtures("own_forks")
def test_a_signal_to_all_processes_acts_like_one_to_the_driver(job: JobFolder, token: str) -> None:
    config = job.config('steps = 100000\n[model]\nlayers = "zoo:jittery"\nbalance = [5]')
    with running("drive", config, "--json") as run:
        run.wait_for_line('"event": "step"')
        servers = [p for p in with_token(token) if runs(p, "serve")]
        for process in with_token(token):
            if process not in servers:
                process.terminate()
        result = run.wait()
    assert result.code == 143
    assert result.event("summary")["steps"] == result.event("step")["step"]


@pytest.mark.cluster
def test_ctrl_c_on_a_busy_server_ends_the_job_after_the_running_step(job: JobFolder) -> None:
    config = job.config(f'{ENDLESS}\n[model]\nlayers = "zoo:jittery"\nbalance = [5]')
    with lend_servers(1) as (server,):

        def interrupt(run: RunningHere) -> None:
            run.wait_for_line('"event": "step"')
            server.process.send_signal(signal.SIGINT)

        where = ("--connect", server.address)
        result = rpcmp("drive", config, "--json", *where, during=interrupt)
        assert result.code == 75
        assert "the server of stage 'stage0' is being stopped" in result.err
        assert server.process.wait(DEADLINE) == 130


def test_output_is_complete_even_if_it_is_read_late(job: JobFolder) -> None:
    head = "steps = 24\nnum_microbatches = 1"
    config = job.config(f'{head}\n[model]\nlayers = "zoo:mlp"\nbalance = [4]')
    with (
        program() as (rpcmp, fds),
        subprocess.Popen(
            [*rpcmp, "drive", str(config), "--json"],
            stdout=subprocess.PIPE,
            pipesize=mmap.PAGESIZE,
            text=True,
            pass_fds=fds,
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline().startswith("{")
        (driver,) = poll_for(
            lambda: forked("rpcmp.driver"),
            "the driver process",
        )
        poll_for(lambda: driver not in FORKS.children(), "the driver process to end")
        lines = process.stdout.readlines()
    assert process.returncode == 0
    assert sum(map(len, lines)) > 2 * mmap.PAGESIZE  # the rest did not fit into the pipe
    assert sum('"step"' in line for line in lines) >= 24
    assert '"summary"' in lines[-3]


def test_a_server_without_allowed_code_refuses_code(job: JobFolder) -> None:
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [4]')
    with running_servers(1, "--no-code", apart=False) as servers:
        result = rpcmp("drive", config, "--connect", connect(servers))
    assert result.code == 2
    files = len(list(job.folder.glob("*.py")))
    assert f"--no-code and refuses {files} Python files" in result.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "num_microbatch=3"], "unknown key; did you mean 'num_microbatches'?"),
        (["--set", "schedule=gpipe", "--set", "max_in_flight=1"], "max_in_flight = 1: gpipe holds"),
        (["--set", "autocast=float16"], "loses small gradients without loss scaling: add a sec"),
        (["--set", "schedule=interleaved"], "'gpipe', '1f1b', 'zero-bubble' or 'auto'"),
        (["--set", "model.balance=[9, 9]"], "adds up to 18, but the model has 6 layers"),
        (["--set", "model.layers='digits:nothing'"], "has no attribute 'nothing'"),
        (["--set", "data.train='missing_module:x'"], "No module named 'missing_module'"),
        (["--set", "loss='torch.nn:CrossEntropy'"], "loss = 'torch.nn:CrossEntropy'"),
        (["--set", "model.layer='x'"], "unknown key; did you mean 'layers'?"),
        (["--trace", "/nowhere/at/all.json"], "cannot write /nowhere/at/all.json: No such file"),
        (["--connect", "10.0.0.1:50051,10.0.0.2:50051"], "not a loopback address"),
        (["--connect", "127.0.0.1:50051"], "2 stages need as many addresses"),
        (["--connect", "127.0.0.1:50051,127.0.0.1:50051"], "127.0.0.1:50051 is given twice"),
    ],
)
def test_bad_input_fails_before_anything_starts(options: list[str], message: str) -> None:
    result = rpcmp("drive", EXAMPLES / "digits.toml", *options)
    assert result.code == 2, result.err
    assert message in result.err
    assert result.out == ""


def test_a_cycle_is_refused_before_anything_starts() -> None:
    override = 'stages.0.inputs=["classifier"]'
    result = rpcmp("drive", EXAMPLES / "two_towers.toml", "--set", override)
    assert result.code == 2
    assert "cycle: 'image' reads 'classifier' reads 'image'" in result.err


@pytest.mark.usefixtures("own_forks")
def test_servers_of_a_killed_driver_end_with_it(job: JobFolder, token: str) -> None:
    config = job.config('steps = 100000\n[model]\nlayers = "zoo:jittery"\nbalance = [5]')
    with running("drive", config, "--json") as run:
        run.wait_for_line('"event": "step"')
        # The driver's supervisor, its fork server, the driver process, a server and a worker.
        assert len(with_token(token)) == 5
        run.process.kill()
        run.wait()
        poll_for(lambda: not with_token(token), "all processes to end", timeout=10)
