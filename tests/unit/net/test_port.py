"""The port of a stage server looks up who has opened a connection."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from rpcmp.net import port as its_module
from rpcmp.net.peer_connection import HEADER
from rpcmp.net.port import IncomingConnection, PortMultiplexer
from rpcmp.net.security import Security
from rpcmp.process.stopped import kernel_state

HERE = "127.0.0.1"


async def num_served(count: int) -> int:
    """Connect `count` times, faster than a server looks up owners; return how many it serves."""
    served = 0

    async def serve(incoming: IncomingConnection) -> None:
        nonlocal served
        served += 1

    def connect_all(address: tuple[str, int]) -> list[socket.socket]:
        connections = []
        for _ in range(count):
            connections.append(socket.create_connection(address))
            connections[-1].send(HEADER.pack(0))
        return connections

    port = PortMultiplexer(Security(), serve, serve)
    try:
        address = (HERE, await port.start(HERE, 0))
        connections = await asyncio.to_thread(connect_all, address)
        for connection in connections:
            with connection:
                connection.settimeout(10)
                await asyncio.to_thread(connection.recv, 1)
    finally:
        await port.stop()
    return served


def test_a_connection_is_not_ended_because_later_ones_wait_to_be_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker's connection would be lost, and with it the generation."""
    monkeypatch.setattr(its_module, "MAX_UNAUTHENTICATED", 20)
    count = 100
    assert asyncio.run(num_served(count)) == count


def test_a_process_may_have_any_name() -> None:
    """The kernel passes its bytes on; an error would end the server's accepting for ever."""
    own = Path("/proc/self/comm")
    before = own.read_bytes()
    own.write_bytes(b"w\xc3")
    try:
        assert asyncio.run(num_served(2)) == 2
        assert kernel_state(os.getpid()).startswith("State: ")
    finally:
        own.write_bytes(before.strip())
