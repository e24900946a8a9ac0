"""What clients may say to a gRPC server of ours: it answers, and lives through all of it."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from rpcmp.net.identity import DRIVER, GRPC, Role, stage
from rpcmp.net.port import IncomingConnection, Inner
from rpcmp.net.tls import Connection
from rpcmp.server import hardened_grpc
from tests.support.fuzz import http2


def test_a_call_comes_from_the_path_that_its_socket_is_bound_to(tmp_path: Path) -> None:
    """Of gRPC: so a call has the role of the visitor whose connection it came by."""

    async def roles() -> list[Role | None]:
        inner, seen = Inner(tmp_path), []

        async def check(_request: object, grpc_context: Any) -> Any:
            seen.append(inner.role(grpc_context.peer()))
            return health_pb2.HealthCheckResponse()

        servicer = health_pb2_grpc.HealthServicer()
        servicer.Check = check

        made, path = hardened_grpc.make([], [], inner), inner.path()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, made)
        made.add_insecure_port(f"unix:{path}")
        await made.start()
        for role in (stage(7), None, DRIVER):
            visitor = IncomingConnection(Connection(socket.socket()), role, GRPC)
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
