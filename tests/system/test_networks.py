"""Network namespaces, on kernels that let an ordinary process create them."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from rpcmp.examples import digits
from tests.support.lan import hosts_of, lan, without_networks
from tests.support.longjob import LONG_JOB
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
    """Return the addresses of listeners in the network namespace of a process's RPC agent."""
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
        for number, process in enumerate([*workers, driver], 1):
            assert process.net_connections("inet") == []
            # Its agent, and beside it the supervisor, for connections to the others.
            assert private_listeners(process) == {f"127.77.0.{number}", "127.0.0.1"}
        for server in servers:
            sockets = psutil.Process(server.pid).net_connections("inet")
            listening = [s for s in sockets if s.status == psutil.CONN_LISTEN]
            assert [s.laddr.ip for s in listening] == ["127.0.0.1"]


EXAMPLE = Path(digits.__file__).with_suffix(".toml")


def test_without_network_namespaces_a_job_runs_with_a_warning(job: JobFolder) -> None:
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    with running("drive", config, "--json", under=without_networks()) as run:
        result = run.wait()
    message = result.event("warning")["text"]
    assert "other users of their hosts can reach the processes of stage0, stage1, driver" in message
    expected = rpcmp("drive", config, "--json").event("summary")["parameters_sha256"]
    assert result.event("summary")["parameters_sha256"] == expected


def test_without_network_namespaces_members_of_one_host_reach_another(tmp_path: Path) -> None:
    """The driver, stage 0 and stage 1 have one network, where stage 2 has an address for each."""
    options = ("--set", "model.num_stages=3", "--steps", "30")
    with lan(2, tmp_path) as (one, other):
        shared = replace(one, inside=(*one.inside, *without_networks()))
        with hosts_of(shared, [shared, shared, other], tmp_path) as hosts:
            result = hosts.run("drive", EXAMPLE, "--json", *hosts.connect, *options)
    assert result.code == 0, result.err
    exposed = "reach the processes of stage0, stage1, driver"
    assert exposed in result.event("warning")["text"]
    assert [event for event in result.events if event["event"] in ("fault", "recovered")] == []
    expected = rpcmp("drive", EXAMPLE, "--json", *options).event("summary")["parameters_sha256"]
    assert result.event("summary")["parameters_sha256"] == expected
