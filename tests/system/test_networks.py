"""Network namespaces, on kernels that let an ordinary process create them."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

import psutil
import pytest

from rpcmp.errors import JobError
from tests.support.forkedchildren import end, forks, spawn, write_modules
from tests.support.longjob import LONG_JOB
from tests.support.needs import needs
from tests.support.processes import (
    JobFolder,
    Server,
    connect,
    forked,
    rpcmp,
    running,
    status,
)


def private_listeners(process: psutil.Process) -> set[str]:
    """Return the listeners in the network namespace of a process's RPC agent."""
    found = set()
    for thread in Path(f"/proc/{process.pid}/task").iterdir():
        if (thread / "ns/net").readlink() != Path("/proc/self/ns/net").readlink():
            rows = [row.split() for row in (thread / "net/tcp").read_text().splitlines()[1:]]
            found |= {row[1] for row in rows if row[3] == "0A"}
    return {
        socket.inet_ntoa(int(address.partition(":")[0], 16).to_bytes(4, sys.byteorder))
        for address in found
    }


def test_only_members_of_a_group_reach_its_workers(job: JobFolder, servers: list[Server]) -> None:
    config = job.config(LONG_JOB)
    with running("drive", config, "--connect", connect(servers), "--json") as run:
        run.wait_for_line('"event": "step"')
        (driver,) = forked("rpcmp.driver")
        workers = [psutil.Process(stage["worker_pid"]) for stage in status(config, servers)]
        for process in [*workers, driver]:
            assert process.net_connections("inet") == []
            assert private_listeners(process) == {"127.77.0.1", "127.77.0.2", "127.77.0.3"}
        for server in servers:
            sockets = psutil.Process(server.pid).net_connections("inet")
            listening = [s for s in sockets if s.status == psutil.CONN_LISTEN]
            assert [s.laddr.ip for s in listening] == ["127.0.0.1"]


NO_NAMESPACES = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'


def test_without_network_namespaces_a_job_runs_with_a_warning(job: JobFolder) -> None:
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    under = (needs("unshare"), "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES, "sh")
    with running("drive", config, "--json", under=under) as run:
        result = run.wait()
    message = result.event("warning")["text"]
    assert "other users of their hosts can reach the processes of stage0, stage1, driver" in message
    expected = rpcmp("drive", config, "--json").event("summary")["parameters_sha256"]
    assert result.event("summary")["parameters_sha256"] == expected


def test_a_port_of_the_last_generation_can_be_bound_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_modules(tmp_path, monkeypatch)

    async def run() -> None:
        async with forks() as by:
            child, _ = await spawn(by)
            first = await by.listener("127.0.0.1", 0)
            where = first.getsockname()
            with first, await by.connectable() as dialing:
                dialing.connect(where)
                accepted, _ = first.accept()
                accepted.close()  # our end closes first, and so is the one in TIME_WAIT
                assert dialing.recv(1) == b""
            # Two servers of this network may listen there for a third; where an agent listens,
            # nobody else does.
            with await by.listener(*where), await by.listener(*where):
                pass
            with await by.connectable() as agent:
                agent.bind(("127.0.0.1", 0))
                agent.listen()
                with pytest.raises(JobError, match="in use"):
                    await by.listener(*agent.getsockname())
            await end(child)

    asyncio.run(run())
