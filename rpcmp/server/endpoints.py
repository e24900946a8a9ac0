"""The services of a stage server behind its one port: gRPC and the relay."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rpcmp.errors import ConfigError, RelayError
from rpcmp.net.peer_connection import PeerConnection
from rpcmp.net.port import GREETING_SECONDS, IncomingConnection, PortMultiplexer
from rpcmp.process import tempdirs
from rpcmp.server.access import OnlyPeers
from rpcmp.server.connection import PEERS_OPTIONS, SERVER_OPTIONS, answer_link_test
from rpcmp.server.hardened_grpc import Callers, GrpcServers
from rpcmp.server.rendezvous import RendezvousServicer
from rpcmp.server.services import ControlServicer, DoctorServicer
from rpcmp.server.snapshot_service import SnapshotsServicer
from rpcmp.v1.control_pb2_grpc import (
    add_ControlServicer_to_server,
    add_RendezvousServicer_to_server,
    add_SnapshotsServicer_to_server,
)
from rpcmp.v1.doctor_pb2_grpc import add_DoctorServicer_to_server

if TYPE_CHECKING:
    from rpcmp.server.stage_server import StageServer

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

SERVICES = (
    "",
    *(f"rpcmp.v1.{name}" for name in ("Control", "Rendezvous", "Snapshots", "Doctor")),
)
"""Names that the health service knows; "" is the server as a whole."""

MAX_MEASURING = 4
"""Measurements at a time: each uses the link and a core as much as it can."""

PREFIX = "rpcmp-server-"
"""Prefix of the folder for gRPC's sockets."""


class Endpoints:
    """Services that listen from `open` to `close`.

    Args:
        server: answers the calls.
    """

    def __init__(self, server: StageServer) -> None:
        self._server = server
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._folder = tempdirs.create(PREFIX)
        self._callers = Callers()
        self._grpc = GrpcServers(self._folder, self._callers)
        self._add_services()
        self._port = PortMultiplexer(
            server.security, self._serve_grpc, self._carry, server.works_for
        )
        self._measuring = 0

    async def open(self, host: str, port: int) -> int:
        """Listen; return the port, which is a free one for port 0.

        Raises:
            ConfigError: the port is in use, the host is not this machine's, or the path of the
                folder for temporary files is too long for sockets.
        """
        try:
            self._grpc.require_room_for_sockets()
            bound = await self._port.start(host, port)
        except ConfigError:
            await self.close()
            raise
        await self.set_health(SERVING)
        return bound

    async def close(self) -> None:
        """Close all connections, after a moment for answers, such as the one to Drain."""
        await self._grpc.stop(grace=0.5)
        await self._port.stop()  # carries the answers, so it goes last
        tempdirs.remove(self._folder)

    async def set_health(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for service in SERVICES:
            await self._health.set(service, status)

    def _add_services(self) -> None:
        server, services = self._server, self._grpc.services
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services)
        add_ControlServicer_to_server(ControlServicer(server, self._callers), services)
        add_RendezvousServicer_to_server(RendezvousServicer(server, self._callers), services)
        add_SnapshotsServicer_to_server(SnapshotsServicer(server, self._callers), services)
        add_DoctorServicer_to_server(DoctorServicer(server), services)

    async def _serve_grpc(self, connection: IncomingConnection) -> None:
        if connection.role is None or connection.role.is_driver:
            await self._grpc.serve(connection, [], SERVER_OPTIONS)
        else:
            await self._grpc.serve(connection, [OnlyPeers(self._callers)], PEERS_OPTIONS)

    async def _carry(self, incoming: IncomingConnection) -> None:
        """Serve a connection for tensors, or for a measurement."""
        async with asyncio.timeout(GREETING_SECONDS):
            greeting = await incoming.end.read_message()
        if greeting.get("op") == "measure":
            await self._measure(incoming.end)
            return
        if self._server.claim is None:
            raise RelayError("no group runs here")
        await self._server.claim.relay.handle(incoming, greeting)

    async def _measure(self, end: PeerConnection) -> None:
        """Answer a measurement, unless too many are under way."""
        if self._measuring >= MAX_MEASURING:
            raise RelayError(f"{self._measuring} others measure the way here already")
        self._measuring += 1
        try:
            await answer_link_test(end)
        finally:
            self._measuring -= 1
