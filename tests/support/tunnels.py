"""A process that tries to use another process's socket to a server."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from rpcmp.net.peer_connection import Dialer
from rpcmp.net.security import Security
from rpcmp.net.tunnel import Tunnel
from tests.support.fuzz import http2
from tests.support.lan import issue, serving

HERE = "127.0.0.1"

OTHER = f"""
import socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    try:
        connection.sendall({http2.opening()!r})
        print(len(connection.recv(9)))
    except (BrokenPipeError, ConnectionResetError):
        print(0)
"""


def require_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, under: Sequence[str] = ()
) -> None:
    """Check that a process, run by the command `under`, cannot use the socket."""
    certs = issue(tmp_path / "certs", HERE)

    async def received_bytes(address: str) -> int:
        tunnel = Tunnel(Dialer(Security(certs / "driver")), address, 0)
        try:
            async with grpc.aio.insecure_channel(tunnel.target) as channel:
                await HealthStub(channel).Check(HealthCheckRequest())
            path = tunnel.target.removeprefix("unix:")
            command = [*under, sys.executable, "-c", OTHER, path]
            output = await asyncio.to_thread(subprocess.check_output, command, timeout=60)
        finally:
            await tunnel.close()
        return int(output)

    with serving(0, f"{HERE}:0", certs) as server, caplog.at_level(logging.WARNING):
        assert asyncio.run(received_bytes(server.address)) == 0
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"has tried to reach {server.address} by our socket" in warning
