"""`rpcmp join` and `rpcmp drain --leave`: what they say, and which jobs and servers they refuse."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from tests.support.pool import PooledServer, lend_servers
from tests.support.processes import JobFolder, Running, connect, rpcmp, running, running_server

HERE = "127.0.0.1"

SLEEPING = """
steps = 100000
rebalance = "{rebalance}"
[model]
layers = "zoo:lopsided"
kwargs = {{ milliseconds = 10 }}
balance = {balance}
"""


@contextlib.contextmanager
def training(
    job: JobFolder, rebalance: str, balance: list[int], servers: Sequence[PooledServer]
) -> Iterator[Running]:
    """Train at stage servers, and interrupt the run at the end."""
    config = job.config(SLEEPING.format(rebalance=rebalance, balance=balance))
    with running("drive", config, "--json", "--connect", connect(servers)) as run:
        run.wait_for_line('"event": "step"')
        yield run
        run.process.terminate()
        run.wait()


def test_a_spare_joins_a_job_and_another_host_leaves_it(job: JobFolder) -> None:
    with (
        lend_servers(3) as (first, second, new),
        training(job, "auto", [3, 2], [first, second]) as run,
    ):
        busy = rpcmp("join", second.address, "--to", first.address)
        assert busy.code == 2
        assert f"{second.address} is no spare that is free" in busy.err
        joined = rpcmp("join", new.address, "--to", second.address)
        assert (joined.code, joined.err) == (0, "")
        assert joined.out == f"{new.address} serves a stage of job 'job'\n"
        left = rpcmp("drain", "--leave", second.address)
        assert (left.code, left.out) == (0, f"{second.address} has ended\n")
        run.wait_for_line("stage 'stage1' at .* has left")


def test_a_job_that_does_not_move_layers_takes_nobody_in(job: JobFolder) -> None:
    with lend_servers(2) as (first, new), training(job, "off", [5], [first]):
        refused = rpcmp("join", new.address, "--to", first.address)
    assert refused.code == 2
    assert "job 'job' does not move layers: it needs rebalance = \"auto\"" in refused.err


@pytest.mark.usefixtures("impatient")
def test_who_cannot_take_in_or_join_is_named() -> None:
    away = f"{HERE}:9"
    with lend_servers(1) as (idle,), running_server("--stage", "0", "--listen", f"{HERE}:0") as one:
        for address, to, code, message in (
            (idle.address, idle.address, 2, "no job runs here that a host could join"),
            (one.address, idle.address, 2, f"{one.address} is no spare that is free: `rpcmp serve"),
            (away, idle.address, 75, away),
            (idle.address, away, 75, away),
        ):
            refused = rpcmp("join", address, "--to", to)
            assert refused.code == code
            assert message in refused.err
