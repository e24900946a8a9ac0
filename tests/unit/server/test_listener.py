"""What clients may say to a gRPC server of ours: it answers, and lives through all of it."""

from __future__ import annotations

import asyncio
import itertools
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2_grpc import HealthStub

from rpcmp.errors import BusyError, JobError, RpcmpError
from rpcmp.server import listener
from rpcmp.server.values import (
    MAX_ASKED,
    MAX_BYTES,
    MAX_KEY,
    MAX_KEYS,
    MAX_VALUE,
    Values,
    require_askable,
)
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub, RendezvousStub, SnapshotsStub
from rpcmp.wire.credentials import GRPC
from rpcmp.wire.end import End
from rpcmp.wire.front import Visitor
from rpcmp.wire.inner import Inner
from rpcmp.wire.role import DRIVER, Role, stage
from tests.support.fuzz import http2
from tests.support.processes import JobFolder, Server, connect, describe, running, running_servers


def say(server: Server, data: bytes) -> bytes:
    """What a server answers until it has said how a call has ended; empty where it hangs up."""
    host, port = server.address.rsplit(":", 1)
    answer = b""
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        while b"grpc-status" not in answer and (part := connection.recv(65536)):
            answer += part
    return answer


def test_a_method_whose_name_is_not_utf_8_ends_nobody() -> None:
    """With grpc.aio's own server it ended the process."""
    unknown = http2.opening() + http2.request("/rpcmp.v1.Control/Describe", 1)
    unknown = unknown.replace(b"Describe", b"Describ\xe5")
    with running_servers(1) as (server,):
        for _ in range(3):
            host, port = server.address.rsplit(":", 1)
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(unknown)
                assert connection.recv(9)
                assert describe(server).stage_index == 0
        server.run.process.terminate()
        result = server.run.wait()
    assert (result.code, result.err) == (0, "")


def test_a_message_that_cannot_be_read_is_the_callers_fault() -> None:
    with running_servers(1) as (server,):
        for method in ("Control/Prepare", "Control/Watch", "Snapshots/Fetch", "Snapshots/Put"):
            for data in (b"\xff\xff\xff", b"\x0b" * 5000):
                answer = say(server, http2.opening() + http2.call(f"/rpcmp.v1.{method}", data))
                assert b"the message cannot be read" in answer, method


def test_a_call_comes_from_the_path_that_its_socket_is_bound_to(tmp_path: Path) -> None:
    """Of gRPC: so a call has the role of the visitor whose connection it came by."""

    async def roles() -> list[Role | None]:
        inner, seen = Inner(tmp_path), []

        async def check(_request: object, grpc_context: Any) -> Any:
            seen.append(inner.role(grpc_context.peer()))
            return health_pb2.HealthCheckResponse()

        servicer = health_pb2_grpc.HealthServicer()
        servicer.Check = check

        made, path = listener.make([], [], inner), inner.path()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, made)
        made.add_insecure_port(f"unix:{path}")
        await made.start()
        for role in (stage(7), None, DRIVER):
            visitor = Visitor(End(socket.socket()), role, GRPC)
            with inner.carrying(visitor) as end:
                assert await answered(end, path)
            visitor.end.close()
        await made.stop(None)
        return seen

    assert asyncio.run(roles()) == [stage(7), None, DRIVER]
    assert not list(tmp_path.iterdir())


async def answered(end: socket.socket, path: Path) -> bytes:
    """What a gRPC server answers to one call, until it has said how that has ended."""
    loop, answer = asyncio.get_running_loop(), b""
    await loop.sock_connect(end, str(path))
    await loop.sock_sendall(end, http2.opening() + http2.call("/grpc.health.v1.Health/Check", b""))
    while b"grpc-status" not in answer and (part := await loop.sock_recv(end, 65536)):
        answer += part
    return answer


def test_other_processes_of_the_user_cannot_go_round_the_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such as a worker, that runs a job's code: it can find the sockets behind the port."""
    with tempfile.TemporaryDirectory() as folder:  # a short path: sockets have no longer ones
        monkeypatch.setenv("TMPDIR", folder)
        require_no_way_round(Path(folder))


def require_no_way_round(folder: Path) -> None:
    with running_servers(1) as (server,):
        sockets = [path for path in folder.glob("rpcmp-server-*/*") if path.is_socket()]
        assert len(sockets) == 2
        calls: list[Callable[[grpc.Channel], object]] = [
            lambda channel: ControlStub(channel).Drain(pb.DrainRequest()),
            lambda channel: list(SnapshotsStub(channel).Fetch(pb.FetchRequest())),
            lambda channel: SnapshotsStub(channel).Put(iter([pb.PutRequest()])),
            lambda channel: ControlStub(channel).Describe(pb.DescribeRequest()),
            lambda channel: HealthStub(channel).Check(health_pb2.HealthCheckRequest()),
        ]
        for path, call in itertools.product(sockets, calls):
            with (
                grpc.insecure_channel(f"unix:{path}") as channel,
                pytest.raises(grpc.RpcError) as refused,
            ):
                call(channel)
            assert refused.value.code() in REFUSED
        assert not describe(server).draining


REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


@pytest.fixture
def member(
    job: JobFolder, servers: list[Server]
) -> Iterator[tuple[RendezvousStub, SnapshotsStub, str]]:
    """What a member of a group can call, and the group's job."""
    config = job.config('steps = 100000\n[model]\nlayers = "zoo:mlp"\nbalance = [2, 2]')
    with (
        running("drive", config, "--connect", connect(servers), "--json") as run,
        grpc.insecure_channel(servers[0].address) as channel,
    ):
        run.wait_for_line('"step": 2,')
        job_id = describe(servers[0]).holdings_of
        yield RendezvousStub(channel), SnapshotsStub(channel), job_id
        assert run.process.poll() is None
        assert not [event for event in run.result().events if event["event"] == "fault"]


def test_a_member_that_asks_for_nonsense_is_told_so(
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


def test_a_rendezvous_takes_small_things_and_not_many() -> None:
    values = Values()
    values.set("k" * MAX_KEY, bytes(MAX_VALUE))
    for key, value in [("k" * (MAX_KEY + 1), b""), ("k", bytes(MAX_VALUE + 1))]:
        with pytest.raises(JobError, match="takes no"):
            values.set(key, value)
    for number in range(MAX_KEYS - 1):
        values.set(str(number), b"")
    with pytest.raises(JobError, match="is full"):
        values.set("one more", b"")
    values.set("0", b"changed")
    assert values.get("0") == b"changed"


def test_its_values_have_no_more_room_than_they_may_have_together() -> None:
    values = Values()
    count = MAX_BYTES // MAX_VALUE - 1  # keys take room as well
    for number in range(count):
        values.set(str(number), bytes(MAX_VALUE))
    with pytest.raises(JobError, match="is full"):
        values.set("one more", bytes(MAX_VALUE))
    values.set("0", b"")
    values.set("one more", bytes(MAX_VALUE))


@pytest.mark.parametrize("held", [b"abc", b"", b"1.5", b"9" * 100, b"--1"])
def test_what_does_not_count_cannot_be_added_to(held: bytes) -> None:
    values = Values()
    values.set("k", held)
    with pytest.raises(RpcmpError):
        values.add("k", 1)
    assert values.get("k") == held


def test_what_counts_does_so_within_64_bits() -> None:
    values = Values()
    assert values.add("k", 2**63 - 1) == 2**63 - 1
    with pytest.raises(JobError, match="64 bits"):
        values.add("k", 1)
    assert values.add("k", -(2**63)) == -1
    assert values.add("k", -1) == -2


def test_who_waits_for_keys_is_woken_by_these_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpcmp.server.values.MAX_WAITING", 3)

    async def scene() -> None:
        values = Values()
        both = asyncio.create_task(values.wait_for(["a", "b"]))
        given_up = asyncio.create_task(values.wait_for(["c"]))
        other = asyncio.create_task(values.wait_for(["c"]))
        await asyncio.sleep(0)
        with pytest.raises(JobError, match="3 questions to the rendezvous are unanswered"):
            await values.wait_for(["d"])
        given_up.cancel()
        values.set("b", b"")
        await asyncio.sleep(0)
        values.set("a", b"")
        await both
        assert not other.done()
        values.close()
        for wait in (other, asyncio.create_task(values.wait_for(["c"]))):
            with pytest.raises(BusyError, match="the job ended"):
                await wait
        assert values._waiting == {}
        await values.wait_for(["a", "b"])

    asyncio.run(scene())


@pytest.mark.parametrize("count", [0, MAX_ASKED + 1])
def test_a_question_names_keys_but_not_too_many(count: int) -> None:
    with pytest.raises(JobError, match=f"for {count} keys"):
        require_askable(["k"] * count)
    require_askable(["k"] * MAX_ASKED)
