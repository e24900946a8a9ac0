"""Stage servers that are started by hand: they outlive jobs and report their state."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from rpcmp.config import addresses
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub
from rpcmp.v1.doctor_pb2 import ExamineRequest
from rpcmp.v1.doctor_pb2_grpc import DoctorStub
from tests.support.longjob import LONG_JOB
from tests.support.pool import lend_servers
from tests.support.processes import (
    DEADLINE,
    FORKS,
    JobFolder,
    connect,
    poll_for,
    rpcmp,
    running,
    running_server,
    running_servers,
    runs,
    status,
)


def test_status_shows_a_running_job(job: JobFolder) -> None:
    config = job.config(LONG_JOB)
    with (
        running_servers(2) as idle,
        running("drive", config, "--connect", connect(idle), "--json") as run,
    ):
        run.wait_for_line('"step": 3')
        stages = poll_for(
            lambda: (s := status(config, idle))[0]["step"] > 0 and s, "a step in the status"
        )
        for stage, server in zip(stages, idle, strict=True):
            worker = psutil.Process(stage["worker_pid"])
            assert stage["supervisor_pid"] == server.pid
            assert worker in FORKS.children()
            assert runs(worker, "rpcmp.worker")
            assert stage["address"] == server.address
            assert (stage["job"], stage["generation"]) == ("long-job", 1)
            assert (stage["health"], stage["state"]) == ("SERVING", "running")
            assert stage["memory"] > 2**20
        assert [stage["name"] for stage in stages] == ["stage0", "stage1"]
        assert [stage["parameters"] for stage in stages] == [3 * 72, 72 + 9]
        table = rpcmp("status", config, "--connect", connect(idle))
        assert "long-job" in table.out
        assert idle[1].address in table.out


def test_an_idle_server_ends_when_it_is_drained() -> None:
    with lend_servers(1) as (server,):
        drained = rpcmp("drain", server.address)
        assert drained.code == 0, drained.err
        assert server.process.wait(DEADLINE) == 0


FREE = """
import sys
from rpcmp import cli
from rpcmp.config import addresses
stage = sys.argv[1]
addresses.default_port = lambda index, replica=0: {(int(stage), 0): 0}[index, replica]
sys.argv = sys.argv[4:]
cli.main()
"""


@pytest.mark.cluster
def test_the_default_ports_are_what_a_bare_connect_uses(
    job: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free ports replace the real ones, which other servers of this machine may use."""
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    first, second = ((sys.executable, "-c", FREE, str(stage)) for stage in range(2))
    with (
        running_server("--stage", "0", under=first) as one,
        running_server("--stage", "1", under=second) as two,
    ):
        ports = {(i, 0): int(each.address.rpartition(":")[2]) for i, each in enumerate([one, two])}
        monkeypatch.setattr(addresses, "default_port", lambda i, replica=0: ports[i, replica])
        result = rpcmp("drive", config, "--connect", "--json")
        assert result.code == 0, result.err
        assert [each["address"] for each in status_at_defaults(config)] == [
            one.address,
            two.address,
        ]
    assert rpcmp("status", config).code == 75


def status_at_defaults(config: Path) -> list[dict[str, Any]]:
    """Return the output of `rpcmp status --json` without addresses."""
    result = rpcmp("status", config, "--json")
    assert result.code == 0, result.err
    stages: list[dict[str, Any]] = json.loads(result.out)["stages"]
    return stages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --stage N, or --spare"),
        (["--stage", "0", "--spare"], "give --stage N, or --spare"),
        (["--spare"], "a spare has no port of its own: give --listen HOST:PORT"),
        (["--spare", "--listen", "127.0.0.1:0", "--replica", "1"], "leave --replica out"),
        (["--stage", "0", "--replica", "200"], "stage 0 replica 200 has no default port"),
        (["--stage", "0", "--replica", "-1"], "-1 is not in the range x>=0"),
    ],
)
def test_an_invalid_serve_command_is_refused(options: list[str], message: str) -> None:
    result = rpcmp("serve", *options)
    assert result.code == 2
    assert message in result.err


def test_an_address_off_loopback_is_refused() -> None:
    result = rpcmp("serve", "--stage", "0", "--listen", "0.0.0.0:0")
    assert result.code == 2
    assert "not a loopback address" in result.err


def test_servers_of_a_job_refuse_other_processes_of_the_user(job: JobFolder) -> None:
    """A process of the same user, such as a layer of another job, gets no answer from them."""
    config = job.config('steps = 100000\n[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    with running("drive", config, "--json") as run:
        run.wait_for_line('"step": 2,')
        found = [
            connection.laddr
            for child in psutil.Process(run.pid).children(recursive=True)
            if runs(child, "serve")
            for connection in child.net_connections("tcp")
            if connection.status == "LISTEN"
        ]
        assert len(found) == 2
        for host, port in found:
            with grpc.insecure_channel(f"{host}:{port}") as channel:
                control = ControlStub(channel)
                response = control.Describe(pb.DescribeRequest(), timeout=20)
                assert response == pb.DescribeResponse()
                for call in (
                    lambda: control.Prepare(pb.PrepareRequest()),  # noqa: B023
                    lambda: control.Profile(pb.ProfileRequest()),  # noqa: B023
                    lambda: control.Drain(pb.DrainRequest()),  # noqa: B023
                    lambda: DoctorStub(channel).Examine(ExamineRequest()),
                ):
                    with pytest.raises(grpc.RpcError) as refused:
                        call()
                    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        count = len(run.out)
        poll_for(lambda: len(run.out) > count + 3, "more steps")
