"""The port of a stage server that is started by hand: what it says, and how much it takes.

Which peers it accepts, in which role, is in tests/controlplane/test_port.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc

from rpcmp.net.identity import GRPC
from rpcmp.net.peer_connection import Dialer, PeerConnection
from rpcmp.net.security import Security
from rpcmp.server.client import StageClient
from rpcmp.v1 import control_pb2 as pb
from rpcmp.v1.control_pb2_grpc import ControlStub
from tests.support.lan import cli, issue, serving
from tests.support.processes import poll_for, running_servers

HERE = "127.0.0.1"


def test_one_certificate_cannot_use_up_a_servers_connections(tmp_path: Path) -> None:
    """A stage outside the job keeps the connections open."""
    certs = issue(tmp_path / "certs", HERE, HERE)
    cli(certs, "issue", "--stage", "9", "--host", HERE)
    limit = ("prlimit", "--nofile=256:256")

    async def hold(address: str) -> int:
        dialer = Dialer(Security(certs / "stage9"))
        ends = [await dialer.open(address, GRPC, 0) for _ in range(60)]
        try:
            async with StageClient("a", address, Dialer(Security(certs / "driver"))) as client:
                assert (await client.connect()).stage_index == 0
            return sum(not one for one in await asyncio.gather(*map(_is_closed, ends)))
        finally:
            for end in ends:
                end.abort()

    with serving(0, f"{HERE}:0", certs, limit) as server:
        assert 10 <= asyncio.run(hold(server.address)) <= 16


async def _is_closed(end: PeerConnection) -> bool:
    """Return whether the server closed a connection; it sends a greeting on the others."""
    try:
        await end.read(1)
    except (EOFError, OSError):
        return True
    return False


def test_an_insecure_server_warns() -> None:
    with running_servers(1, "--insecure") as (server,):
        poll_for(lambda: "insecure: nothing is encrypted" in "".join(server.run.err), "a warning")
        with grpc.insecure_channel(server.address) as channel:
            assert ControlStub(channel).Describe(pb.DescribeRequest(), timeout=10).stage_index == 0
