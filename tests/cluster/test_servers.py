"""Stage servers that are started by hand: they outlive jobs and report their state."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

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
    RunningHere,
    Server,
    connect,
    poll_for,
    rpcmp,
    running,
    running_server,
    running_servers,
    runs,
    status,
)


@pytest.fixture(scope="module")
def idle() -> Iterator[list[Server]]:
    """Yield two servers on separate hosts, for tests that leave them idle."""
    with running_servers(2) as started:
        yield started


def test_servers_run_one_job_after_another(job: JobFolder, idle: list[Server]) -> None:
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    hashes = set()
    for _ in range(2):
        result = rpcmp("drive", config, "--connect", connect(idle), "--json")
        assert result.code == 0, result.err
        hashes.add(result.event("summary")["parameters_sha256"])
    assert len(hashes) == 1


def test_status_shows_a_running_job(job: JobFolder, idle: list[Server]) -> None:
    config = job.config(LONG_JOB)
    with running("drive", config, "--connect", connect(idle), "--json") as run:
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


def test_drain_ends_the_job_after_its_step_and_then_the_server(job: JobFolder) -> None:
    config = job.config(LONG_JOB)
    at_once = ("--set", "recovery.give_up_after=0.0")

    def drain(run: RunningHere) -> None:
        run.wait_for_line('"event": "step"')
        with grpc.insecure_channel(servers[0].address) as channel:
            answer = ControlStub(channel).Drain(pb.DrainRequest(), timeout=5)
        assert (answer.job, answer.generation) == ("long-job", 1)

    with lend_servers(2) as servers:
        where = ("--connect", connect(servers))
        assert rpcmp("drive", config, "--json", *where, *at_once, during=drain).code == 75
        assert servers[0].process.wait(DEADLINE) == 0
        with grpc.insecure_channel(servers[1].address) as channel:
            assert ControlStub(channel).Drain(pb.DrainRequest(), timeout=5).job == ""
        assert servers[1].process.wait(DEADLINE) == 0


def test_health_answers_for_each_service(idle: list[Server]) -> None:
    with grpc.insecure_channel(idle[0].address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        serving = health_pb2.HealthCheckResponse.SERVING
        for service in ("", "rpcmp.v1.Control", "rpcmp.v1.Rendezvous"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert stub.Check(request, timeout=5).status == serving
        with pytest.raises(grpc.RpcError) as unknown:
            stub.Check(health_pb2.HealthCheckRequest(service="nonsense"), timeout=5)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND


def test_other_versions_are_refused_and_named(idle: list[Server]) -> None:
    with grpc.insecure_channel(idle[0].address) as channel:
        stub = ControlStub(channel)
        versions = stub.Describe(pb.DescribeRequest(), timeout=5).versions
        versions.torch, versions.python = "1.13.0", "3.8"
        request = pb.PrepareRequest(job="j", job_id="1", generation=1, versions=versions)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Prepare(request, timeout=5)
        details = refused.value.details() or ""
        assert "VersionError" in details
        assert "1.13.0 there" in details
        assert "python: 3.11 here, 3.8 there" in details or "3.8 there" in details


def test_a_message_of_a_past_generation_is_refused(idle: list[Server]) -> None:
    with grpc.insecure_channel(idle[0].address) as channel:
        stub = ControlStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Stop(pb.StopRequest(job_id="old", generation=3), timeout=5)
        assert "generation 3" in (refused.value.details() or "")


FREE = """
import sys
from rpcmp import cli
from rpcmp.config import addresses
stage = sys.argv[1]
addresses.default_port = lambda index, replica=0: {(int(stage), 0): 0}[index, replica]
sys.argv = sys.argv[4:]
cli.main()
"""


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


def test_a_server_for_another_stage_is_refused(job: JobFolder, idle: list[Server]) -> None:
    config = job.config('[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    result = rpcmp("drive", config, "--connect", connect(idle[::-1]))
    assert result.code == 2
    assert "serves stage 1 replica 0, not stage 0" in result.err


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
