"""Servers that a run starts on its machine: forked from a template that may be lost, and ended."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from rpcmp.config.topology import Member
from rpcmp.job import local_servers
from rpcmp.process.fork_client import Forks
from tests.support.processes import JobFolder, poll_for, running, runs, with_token

WORKERS = [Member(f"stage{index}", index) for index in range(3)]

LONG = """
steps = 100000
[model]
layers = "zoo:mlp"
balance = [2, 2]
"""


def templates(token: str) -> list[psutil.Process]:
    return [each for each in with_token(token) if runs(each, "rpcmp.process.template")]


def servers_of(parent: int, token: str) -> list[psutil.Process]:
    return [each for each in with_token(token) if each.ppid() == parent and runs(each, "serve")]


@pytest.mark.usefixtures("own_forks")
@pytest.mark.parametrize(
    "signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.cluster)]
)
def test_servers_outlive_their_template_and_are_started_again(
    signum: signal.Signals, token: str, tmp_path: Path
) -> None:
    async def run() -> None:
        async with Forks([]) as forks:
            servers = local_servers.LocalServers(forks, ["--checkpoints", str(tmp_path)])
            assert len({*await servers.start(WORKERS)}) == 3
            before = servers_of(os.getpid(), token)
            assert len(before) == 3
            [template] = templates(token)
            template.send_signal(signum)
            assert not any(map(servers.has_ended, range(3)))
            for _ in range(2):  # the first one may still be asked of the lost template
                await servers.restart(1)
            assert len({*before} & {*servers_of(os.getpid(), token)}) == 2
            assert len(servers_of(os.getpid(), token)) == 3
            assert template not in templates(token)
            await servers.stop()

    asyncio.run(run())


@pytest.mark.usefixtures("own_forks")
def test_one_server_needs_no_template(token: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with Forks([]) as forks:
            servers = local_servers.LocalServers(forks, ["--checkpoints", str(tmp_path)])
            await servers.start(WORKERS[:1])
            assert templates(token) == []
            await servers.stop()

    asyncio.run(run())


def test_nothing_outlives_a_killed_drive_whose_server_was_stopped(
    job: JobFolder, token: str
) -> None:
    """The kernel continues the server, which then sees that it has to end."""
    with running("drive", job.config(LONG), "--json") as run:
        run.wait_for_line('"event": "step"')
        servers = servers_of(run.pid, token)
        assert len(servers) == 2
        servers[0].suspend()
        run.process.kill()
        run.process.wait()
        poll_for(lambda: with_token(token) == [], "all its processes to end")
