"""The one port of a stage server.

    a driver ────TLS, h2────┐                     ┌──> gRPC, all services
    a stage  ────TLS, h2────┼──> PortMultiplexer ─┼──> gRPC, the few methods for peers
    any member of the group ┘                     └──> the relay of tensor connections

TLS ends here: it is 1.3, and both sides have shown a certificate of our CA before a byte of
anything else is read. ALPN says which protocol follows. Without certificates connections come from
the same machine, and only from our own user or root, and from no process that is confined, as the
code of jobs is. A server that was started with --insecure takes them from anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from rpcmp.errors import AddressInUseError, RpcmpError, SecurityError
from rpcmp.net.connection_limits import (
    LOOPBACK,
    AdmittedConnection,
    ConnectionLimit,
    address_of,
    connections,
    descriptor_limit,
    listen_deferred,
    user_of,
)
from rpcmp.net.identity import GRPC, RELAY, STRANGER, Role, TlsState, refusal
from rpcmp.net.local_peer import owner_of, require_answers, require_same_user, works_here
from rpcmp.net.peer_connection import HEADER, ConnectionTasks, PeerConnection
from rpcmp.net.security import Security
from rpcmp.process.sockets import keep_alive

GREETING_SECONDS = 10.0
"""Time limit for a connection's handshake and first bytes."""

IDENTIFY_SECONDS = 5.0
"""Time limit for the kernel to tell who has opened a connection."""

MAX_UNAUTHENTICATED = 256
"""Connections before that; fewer if there are few file descriptors."""

MAX_CONNECTIONS = 4096
"""All connections; fewer likewise: each that is admitted takes up to four descriptors."""

MIN_SHARE = 16
"""Connections that each role may have, however few there may be in all."""

log = logging.getLogger(__name__)


class IncomingConnection(NamedTuple):
    """An authenticated connection, for GRPC or RELAY; the role is None without certificates."""

    end: PeerConnection
    role: Role | None
    protocol: str

    @property
    def name(self) -> str:
        """Role and address, for messages: "stage 1 at 10.0.0.2:40000"."""
        address = _name(self.end.socket)
        return address if self.role is None else f"{self.role} at {address}"


class _PeerIdentity(NamedTuple):
    """What the kernel tells about a connection's other end.

    Attributes:
        peer: its user or address, for the limits.
        role: STRANGER if this server does not work for its process.
    """

    peer: str
    role: Role | None


class PortMultiplexer:
    """Authenticates connections, and hands them to the protocol that they speak.

    Args:
        security: which connections are accepted.
        serve_grpc: answers a connection's gRPC calls.
        relay: serves a connection for tensors, and closes it.
        works_for: see `works_here`.
    """

    def __init__(
        self,
        security: Security,
        serve_grpc: Callable[[IncomingConnection], Awaitable[None]],
        relay: Callable[[IncomingConnection], Awaitable[None]],
        works_for: int = 0,
    ) -> None:
        self._security, self._works_for = security, works_for
        self._serve_grpc, self._relay = serve_grpc, relay
        self._listeners: list[socket.socket] = []
        self._tasks = ConnectionTasks()
        self._max_connections = descriptor_limit(8, MAX_CONNECTIONS)
        max_unauthenticated = descriptor_limit(16, MAX_UNAUTHENTICATED)
        self._limit = ConnectionLimit(self._max_connections, max_unauthenticated)
        self._num_by_role: Counter[Role | None] = Counter()

    async def start(self, host: str, port: int) -> int:
        """Listen; return the port, which is a free one for port 0."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            raise AddressInUseError(
                f"cannot listen on {host}:{port}: the port is in use or the address is not this "
                f"machine's ({error.strerror}); stop the other server or choose another with "
                "--listen"
            ) from error
        listener.setblocking(False)
        self._listeners.append(listener)
        if self._asks_kernel:
            require_answers(listener)
        else:  # clients that ask the kernel as well wait until they are accepted
            listen_deferred(listener)
        self._tasks.spawn(self._accept(listener))
        bound: int = listener.getsockname()[1]
        return bound

    async def stop(self) -> None:
        await self._tasks.cancel()
        for listener in self._listeners:
            listener.close()

    @property
    def _asks_kernel(self) -> bool:
        """Whether the kernel authenticates connections, by their user."""
        return self._security.credentials is None and not self._security.insecure

    async def _accept(self, listener: socket.socket) -> None:
        async for connection in connections(listener, self._limit):
            # One after the other: those that arrive meanwhile wait in the kernel. Here they would
            # count as unauthenticated because of our own delay, and be ended for later ones.
            sender = await self._identify(connection)
            admitted = sender and self._limit.admit(sender.peer, connection.close)
            if sender is None or admitted is None:
                connection.close()
                continue
            serving = self._tasks.spawn(self._serve(connection, admitted, sender.role))
            admitted.end = serving.cancel
            serving.add_done_callback(functools.partial(self._closed, connection, admitted))

    async def _identify(self, connection: socket.socket) -> _PeerIdentity | None:
        """Ask the kernel about the other end; None: it is refused."""
        peer, role = address_of(connection), None
        asks = self._asks_kernel or (self._works_for and self._security.credentials is None)
        try:
            async with asyncio.timeout(IDENTIFY_SECONDS):
                if self._asks_kernel:
                    await require_same_user(connection)
                elif peer == LOOPBACK:
                    with contextlib.suppress(SecurityError):  # only needed for the limits
                        peer = user_of(await owner_of(connection))
                if asks and not await works_here(connection, self._works_for):
                    peer, role = f"{peer}, {STRANGER}", STRANGER
        except (OSError, SecurityError) as error:
            log.debug("refused %s: %s", _name(connection), error)
            return None
        except Exception:  # the next one has to be accepted nevertheless
            log.exception("refused %s, whose owner cannot be looked up", _name(connection))
            return None
        except BaseException:
            connection.close()
            raise
        return _PeerIdentity(peer, role)

    def _closed(
        self, connection: socket.socket, admitted: AdmittedConnection, task: asyncio.Future[None]
    ) -> None:
        connection.close()
        self._limit.remove(admitted)

    async def _serve(
        self, connection: socket.socket, admitted: AdmittedConnection, role: Role | None
    ) -> None:
        who = _name(connection)
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                incoming = await self._authenticate(connection, role)
        except (OSError, EOFError, TimeoutError, SecurityError) as error:
            log.debug("refused %s: %s", who, refusal(error, self._security.certs))
            return
        self._limit.authenticate(admitted)
        self._num_by_role[incoming.role] += 1
        try:
            self._require_room(incoming.role)
            await self._dispatch(incoming)
        except (OSError, EOFError, RpcmpError) as error:
            log.debug("lost %s: %s", who, refusal(error, self._security.certs))
        finally:
            self._num_by_role[incoming.role] -= 1
            incoming.end.close()

    def _require_room(self, role: Role | None) -> None:
        """Refuse a role that has more than its share: there must always be room for the driver."""
        share_of_one = max(MIN_SHARE, self._max_connections // 4)
        if role is not None and not role.is_driver and self._num_by_role[role] > share_of_one:
            raise SecurityError(f"{role} has {share_of_one} connections here already")

    async def _authenticate(
        self, connection: socket.socket, role: Role | None
    ) -> IncomingConnection:
        keep_alive(connection.fileno())
        credentials = self._security.credentials
        if credentials is None:
            return await _authenticate_local(PeerConnection(connection), role)
        session = TlsState(credentials.server())
        end = PeerConnection(connection, session)
        await end.do_handshake()
        if session.peer_role is None:
            raise SecurityError("its certificate has no role of rpcmp")
        if session.protocol not in (GRPC, RELAY):
            raise SecurityError("it does not say which protocol it speaks")
        self._security.establish(end)
        return IncomingConnection(end, session.peer_role, session.protocol)

    async def _dispatch(self, incoming: IncomingConnection) -> None:
        if incoming.protocol == GRPC:
            await self._serve_grpc(incoming)
            return
        if incoming.role == STRANGER:
            raise SecurityError("this server does not work for that process")
        await self._relay(incoming)


async def _authenticate_local(end: PeerConnection, role: Role | None) -> IncomingConnection:
    first = await end.read(HEADER.size)
    end.decrypted[:0] = first  # a frame is short and begins with a zero, HTTP/2 with PRI
    return IncomingConnection(end, role, GRPC if first[0] else RELAY)


def _name(connection: socket.socket) -> str:
    try:
        host, port, *_ = connection.getpeername()
    except OSError:
        return "a connection that is gone already"
    return f"{host}:{port}"
