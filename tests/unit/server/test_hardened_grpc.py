"""The gRPC servers: roles of connections, and arbitrary messages, which they answer and survive."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpcmp.errors import ConfigError
from rpcmp.net.identity import DRIVER, GRPC, Role, stage
from rpcmp.net.peer_connection import PeerConnection
from rpcmp.net.port import IncomingConnection
from rpcmp.server.access import OnlyPeers
from rpcmp.server.hardened_grpc import Callers, GrpcServers
from rpcmp.v1.control_pb2_grpc import (
    ControlServicer,
    SnapshotsServicer,
    add_ControlServicer_to_server,
    add_SnapshotsServicer_to_server,
)
from tests.support.eventloops import in_event_loop
from tests.support.fuzz import http2


@in_event_loop
async def test_a_call_has_the_role_of_the_connection_that_it_came_by(tmp_path: Path) -> None:
    """Relies on gRPC, which reports the path that the client's socket is bound to as the peer."""
    servers, callers = make(tmp_path)
    seen: list[Role | None] = []

    async def check(_request: object, grpc_context: Any) -> Any:
        seen.append(callers.role(grpc_context.peer()))
        return health_pb2.HealthCheckResponse()

    add_health(servers, check)
    for role in (stage(7), None, DRIVER):
        async with connected(servers, role) as client:
            assert b"grpc-status\x010" in await answer_to(client, HEALTH)
    assert seen == [stage(7), None, DRIVER]
    assert os.listdir(tmp_path) == []


def test_a_method_name_that_is_not_utf_8_ends_the_calls_of_its_connection_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> bool:
        servers, _ = make(tmp_path)
        arrived, finish, cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def check(_request: object, _context: object) -> Any:
            arrived.set()
            try:
                await finish.wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return health_pb2.HealthCheckResponse()

        add_health(servers, check)
        async with connected(servers) as other, connected(servers) as client:
            waiting = asyncio.create_task(answer_to(other, HEALTH))
            await arrived.wait()
            await answer_to(client, HEALTH.replace(b"Check", b"Chec\xff"))
            assert not waiting.done()
            finish.set()
            assert b"grpc-status\x010" in await waiting
        return cancelled.is_set()

    with caplog.at_level("DEBUG"):
        assert not asyncio.run(run())
    gc.collect()  # asyncio logs an unretrieved exception when its task is collected
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert not list(tmp_path.iterdir())


def test_a_method_that_ends_after_its_connection_logs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise a client could fill the log by disconnecting during calls."""

    async def run() -> None:
        servers, _ = make(tmp_path)
        arrived, is_over, finish = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def check(_request: object, _context: object) -> Any:
            arrived.set()
            with contextlib.suppress(asyncio.CancelledError):
                await finish.wait()
            await finish.wait()
            is_over.set()
            return health_pb2.HealthCheckResponse()

        add_health(servers, check)
        async with connected(servers) as client:
            await asyncio.get_running_loop().sock_sendall(client, HEALTH)
            await arrived.wait()
        finish.set()
        await is_over.wait()
        await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}))

    with caplog.at_level("WARNING"):
        asyncio.run(run())
    assert not caplog.records


def test_an_answer_that_finds_nobody_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that hangs up while its answer is written: seen once in 50,000 malformed inputs."""
    cygrpc = logging.getLogger("grpc._cython.cygrpc")
    cygrpc.error("ExecuteBatchError raised in core by servicer method [%s]", "/rpcmp.v1.Control")
    assert not caplog.records
    cygrpc.error("Unexpected [%s] raised by servicer method [%s]", "KeyError", "/rpcmp.v1.Control")
    assert len(caplog.records) == 1


def test_a_folder_too_deep_for_sockets_is_a_config_error(tmp_path: Path) -> None:
    make(tmp_path)[0].require_room_for_sockets()
    assert not list(tmp_path.iterdir())
    deep = tmp_path / ("a" * 100)
    deep.mkdir()
    with pytest.raises(ConfigError, match="set TMPDIR to a folder with a short path"):
        make(deep)[0].require_room_for_sockets()


@in_event_loop
async def test_a_server_that_cannot_listen_is_an_error_of_its_connection(tmp_path: Path) -> None:
    """Too many open files are another cause; the port expects an OSError."""

    servers, _ = make(tmp_path / ("a" * 100))
    client, end = socket.socketpair()
    with client:
        connection = IncomingConnection(PeerConnection(end), None, GRPC)
        with pytest.raises(OSError, match="Failed to bind"):
            await servers.serve(connection, [], [])
        assert client.recv(1) == b""


@in_event_loop
async def test_an_unknown_method_is_unimplemented(tmp_path: Path) -> None:
    servers, _ = make(tmp_path)
    async with connected(servers) as client:
        assert b"grpc-status\x0212" in await answer_to(client, HEALTH)


@pytest.mark.parametrize("interceptors", [(), (OnlyPeers,)])
@in_event_loop
async def test_a_call_that_bypasses_the_port_is_refused(
    interceptors: tuple[type[OnlyPeers], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process of the same user may find a server's socket before it is unlinked."""
    monkeypatch.setattr(Path, "unlink", lambda *_args, **_options: None)

    servers, callers = make(tmp_path)
    health_pb2_grpc.add_HealthServicer_to_server(health_pb2_grpc.HealthServicer(), servers.services)
    add_ControlServicer_to_server(ControlServicer(), servers.services)  # type: ignore[abstract]
    add_SnapshotsServicer_to_server(SnapshotsServicer(), servers.services)  # type: ignore[abstract]
    async with connected(servers, None, [each(callers) for each in interceptors]) as client:
        await answer_to(client, HEALTH)
        for method in ("Control/Drain", "Control/Describe", "Snapshots/Fetch", "Snapshots/Put"):
            with socket.socket(socket.AF_UNIX) as end:
                await connect_to_any(end, tmp_path)
                call = http2.opening() + http2.call(f"/rpcmp.v1.{method}", b"")
                assert re.search(rb"grpc-status(\x0216|\x017)", await answer_to(end, call)), method
            with socket.socket(socket.AF_UNIX) as end:
                await connect_to_any(end, tmp_path)
                assert re.search(rb"grpc-status\x0216", await answer_to(end, HEALTH))


@in_event_loop
async def test_a_call_that_bypasses_the_port_cannot_take_another_connections_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process can read the paths that sockets are bound to, in /proc/net/unix."""
    monkeypatch.setattr(Path, "unlink", lambda *_args, **_options: None)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    servers, callers = make(tmp_path)
    peers: list[str] = []

    async def check(_request: object, grpc_context: Any) -> Any:
        peers.append(grpc_context.peer())
        return health_pb2.HealthCheckResponse()

    add_health(servers, check)
    async with connected(servers, DRIVER) as driver:
        await answer_to(driver, HEALTH)
        taken = set(tmp_path.iterdir())  # noqa: ASYNC240
        async with connected(servers, stage(0), [OnlyPeers(callers)]) as client:
            await answer_to(client, HEALTH)
            with socket.socket(socket.AF_UNIX) as end:
                end.bind(str(elsewhere / peers[0].rpartition("/")[2]))
                await connect_to_any(end, tmp_path, taken)
                assert re.search(rb"grpc-status\x0216", await answer_to(end, HEALTH))
    assert len(peers) == 2


async def connect_to_any(
    end: socket.socket, folder: Path, but: Collection[Path] = frozenset()
) -> None:
    """Connect to any socket in `folder`, except for `but`, that a server listens on."""
    end.setblocking(False)
    for path in set(folder.iterdir()).difference(but):  # noqa: ASYNC240
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_connect(end, str(path))
            return
    raise AssertionError("no server listens")


HEALTH = http2.opening() + http2.call("/grpc.health.v1.Health/Check", b"")


def make(folder: Path) -> tuple[GrpcServers, Callers]:
    callers = Callers()
    return GrpcServers(folder, callers), callers


def add_health(servers: GrpcServers, check: Any) -> None:
    servicer = health_pb2_grpc.HealthServicer()
    servicer.Check = check
    health_pb2_grpc.add_HealthServicer_to_server(servicer, servers.services)


@contextlib.asynccontextmanager
async def connected(
    servers: GrpcServers, role: Role | None = None, interceptors: Sequence[OnlyPeers] = ()
) -> AsyncIterator[socket.socket]:
    """Yield the client's end of a connection that is served."""
    client, end = socket.socketpair()
    client.setblocking(False)
    connection = IncomingConnection(PeerConnection(end), role, GRPC)
    serving = asyncio.create_task(servers.serve(connection, interceptors, []))
    with client:
        yield client
    with contextlib.suppress(OSError):  # the server may send to a client that is gone
        await serving


async def answer_to(client: socket.socket, data: bytes) -> bytes:
    """Send `data`, and return the server's bytes up to the status of a call."""
    loop, answer = asyncio.get_running_loop(), b""
    await loop.sock_sendall(client, data)
    while b"grpc-status" not in answer and (part := await loop.sock_recv(client, 65536)):
        answer += part
    return answer
