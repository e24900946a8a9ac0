"""`rpcmp join` and `rpcmp drain --leave`: what they say, and which jobs and servers they refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.pool import PooledServer, lend_servers
from tests.support.processes import (
    JobFolder,
    Running,
    connect,
    rpcmp_process,
    running,
    running_server,
)

LONG = """
steps = 100000
rebalance = "{rebalance}"
[model]
layers = "zoo:mlp"
balance = [2, 2]
"""

STEP = '"event": "step"'


def train(job: JobFolder, rebalance: str) -> Path:
    return job.config(LONG.format(rebalance=rebalance))


@contextlib.contextmanager
def training(job: JobFolder, rebalance: str, servers: Sequence[PooledServer]) -> Iterator[Running]:
    """Train at stage servers, and interrupt the run at the end."""
    where = ("--connect", connect(servers))
    with running("drive", train(job, rebalance), "--json", *where) as run:
        run.wait_for_line(STEP)
        yield run
        run.process.terminate()
        run.wait()


def test_a_spare_joins_a_job_and_another_host_leaves_it(job: JobFolder) -> None:
    with lend_servers(3) as (first, second, new), training(job, "auto", [first, second]) as run:
        joined = rpcmp_process("join", new.address, "--to", second.address)
        assert (joined.code, joined.err) == (0, "")
        assert joined.out == f"{new.address} serves a stage of job 'job'\n"
        left = rpcmp_process("drain", "--leave", second.address)
        assert (left.code, left.out) == (0, f"{second.address} has ended\n")
        run.wait_for_line("stage 'stage1' at .* has left")


def test_a_job_that_does_not_move_layers_takes_nobody_in(job: JobFolder) -> None:
    with lend_servers(3) as (first, second, new), training(job, "off", [first, second]):
        refused = rpcmp_process("join", new.address, "--to", first.address)
        busy = rpcmp_process("join", second.address, "--to", first.address)
    assert refused.code == 2
    assert "job 'job' does not move layers: it needs rebalance = \"auto\"" in refused.err
    assert busy.code == 2
    assert f"{second.address} is no spare that is free" in busy.err


@pytest.fixture
def idle() -> Iterator[PooledServer]:
    with lend_servers(1) as (server,):
        yield server


def test_a_server_without_a_job_takes_nobody_in(idle: PooledServer) -> None:
    refused = rpcmp_process("join", idle.address, "--to", idle.address)
    assert refused.code == 2
    assert "no job runs here that a host could join" in refused.err


def test_a_server_of_one_stage_cannot_join(idle: PooledServer) -> None:
    with running_server("--stage", "0", "--listen", "127.0.0.1:0") as server:
        refused = rpcmp_process("join", server.address, "--to", idle.address)
    assert refused.code == 2
    assert f"{server.address} is no spare that is free: `rpcmp serve --spare`" in refused.err


def test_who_does_not_answer_is_named(idle: PooledServer) -> None:
    for places in (("127.0.0.1:9", "--to", idle.address), (idle.address, "--to", "127.0.0.1:9")):
        silent = rpcmp_process("join", *places)
        assert silent.code == 75
        assert "127.0.0.1:9" in silent.err
