"""Arbitrary messages of clients to a stage server, which answers and survives them."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub, RendezvousStub, SnapshotsStub
from tests.support.fuzz import http2
from tests.support.pool import lend_servers
from tests.support.processes import JobFolder, Server, connect, describe, running, running_servers


def answer_to(server: Server, data: bytes) -> bytes:
    """Send `data`, and return the server's bytes up to the status of a call.

    If the server closes the connection, the bytes may be incomplete.
    """
    host, port = server.address.rsplit(":", 1)
    answer = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        while b"grpc-status" not in answer and (part := connection.recv(65536)):
            answer += part
    return answer


def test_a_method_name_that_is_not_utf_8_stops_neither_server_nor_other_calls() -> None:
    """The name stops the grpc.aio server that receives it, which serves only that connection."""
    unknown = http2.opening() + http2.request("/rpcmp.v1.Control/Describe", 1)
    unknown = unknown.replace(b"Describe", b"Describ\xe5")
    with running_servers(1, apart=False) as (server,):
        for _ in range(3):
            host, port = server.address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(unknown)
                assert connection.recv(9)
                assert describe(server).stage_index == 0
        server.run.process.terminate()
        result = server.run.wait()
    assert (result.code, result.err) == (0, "")


def test_an_unreadable_message_is_an_invalid_argument() -> None:
    with running_servers(1, apart=False) as (server,):
        for method in ("Control/Prepare", "Control/Watch", "Snapshots/Fetch", "Snapshots/Put"):
            for data in (b"\xff\xff\xff", b"\x0b" * 5000):
                answer = answer_to(
                    server, http2.opening() + http2.call(f"/rpcmp.v1.{method}", data)
                )
                assert b"the message cannot be read" in answer, method


def test_other_processes_of_the_user_cannot_bypass_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process, such as a worker with a job's code, finds no socket behind the port.

    tests/unit/server/test_hardened_grpc.py tests a socket that is found while it is created.
    """
    with tempfile.TemporaryDirectory() as folder:  # sockets need a short path
        monkeypatch.setenv("TMPDIR", folder)
        with (
            running_servers(1, apart=False) as (server,),
            grpc.insecure_channel(server.address) as channel,
        ):
            ControlStub(channel).Describe(pb.DescribeRequest())  # the connection stays open
            (private,) = Path(folder).glob("rpcmp-server-*")
            assert not list(private.iterdir())


@pytest.fixture
def member(job: JobFolder) -> Iterator[tuple[RendezvousStub, SnapshotsStub, str]]:
    """Yield the calls that a member of a group makes, and the group's job."""
    config = job.config('steps = 100000\n[model]\nlayers = "zoo:mlp"\nbalance = [4]')
    with (
        lend_servers(1) as servers,
        running("drive", config, "--connect", connect(servers), "--json") as run,
        grpc.insecure_channel(servers[0].address) as channel,
    ):
        run.wait_for_line('"step": 2,')
        job_id = describe(servers[0]).holdings_of
        yield RendezvousStub(channel), SnapshotsStub(channel), job_id
        assert run.process.poll() is None
        assert not [event for event in run.result().events if event["event"] == "fault"]


def test_an_invalid_request_of_a_member_is_refused(
    member: tuple[RendezvousStub, SnapshotsStub, str],
) -> None:
    rendezvous, snapshots, job_id = member
    job: Any = {"job_id": job_id, "generation": 1}
    rendezvous.Set(pb.SetRequest(**job, key="text", value=b"abc"))
    nonsense: list[tuple[Callable[[], object], str]] = [
        (lambda: rendezvous.Get(pb.GetRequest(**job)), "no question for 0 keys"),
        (lambda: rendezvous.Add(pb.AddRequest(**job, key="text", amount=1)), "no number"),
        (lambda: rendezvous.Set(pb.SetRequest(**job, key="k", value=bytes(40_000))), "takes no"),
        (lambda: list(snapshots.Fetch(pb.FetchRequest(**job, path="a\0b"))), "is not in"),
        (lambda: list(snapshots.Fetch(pb.FetchRequest(**job, path="/etc/passwd"))), "is not in"),
        (lambda: snapshots.Put(iter(())), "holds nothing of the job"),
    ]
    for call, why in nonsense:
        with pytest.raises(grpc.RpcError) as error:
            call()
        assert error.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert why in (error.value.details() or "")
