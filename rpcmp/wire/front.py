"""The one port of a stage server.

    a driver ────TLS, h2────┐          ┌──Unix socket──> gRPC, all of it
    a stage  ────TLS, h2────┼──> front ┼──Unix socket──> gRPC, the little that peers need
    anybody of the group ───┘          └───────────────> the relay

TLS ends here, so that it is 1.3 and both sides have shown a certificate of our CA before a byte of
anything else is read; ALPN says what will be spoken. Without certificates connections come from the
same machine, and then from our own user or root alone; or, where the server was started with
--insecure, from anybody.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from rpcmp.errors import ListenError, RpcmpError, SecurityError
from rpcmp.process.links import keep_alive
from rpcmp.wire.accept import connections
from rpcmp.wire.credentials import GRPC, RELAY
from rpcmp.wire.end import HEADER, End, refusal
from rpcmp.wire.inner import Inner
from rpcmp.wire.localpeer import is_ours
from rpcmp.wire.role import Role
from rpcmp.wire.security import Security
from rpcmp.wire.session import Session
from rpcmp.wire.splice import splice

GREETING_SECONDS = 10.0
"""How long a stranger may take to say who he is."""

MAX_STRANGERS = 256
"""Connections that have not said so yet; where there are more, the oldest has to go."""

MAX_CONNECTIONS = 4096
"""Of those who were let in; fewer where there are few file descriptors, see `_room`."""

log = logging.getLogger(__name__)


class Visitor(NamedTuple):
    """Somebody at the door.

    Attributes:
        end: the connection.
        role: what his certificate says; None: there are no certificates.
        protocol: what he wants to speak.
    """

    end: End
    role: Role | None
    protocol: str

    @property
    def name(self) -> str:
        """The role and the address, for messages: "stage 1 at 10.0.0.2:40000"."""
        where = _name(self.end.socket)
        return where if self.role is None else f"{self.role} at {where}"


class Front:
    """Lets visitors in.

    Args:
        security: who may come.
        inner: names the connections to the gRPC servers.
        drivers, peers: Unix sockets of gRPC servers, for those who drive and for stages.
        relay: takes connections that carry tensors, and closes them.
    """

    def __init__(
        self,
        security: Security,
        inner: Inner,
        drivers: Path,
        peers: Path,
        relay: Callable[[Visitor], Awaitable[None]],
    ) -> None:
        self._security = security
        self._inner, self._drivers, self._peers = inner, drivers, peers
        self._relay = relay
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Future[None]] = set()
        self._strangers: dict[asyncio.Future[None], None] = {}  # the oldest first

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port, which is a free one for port 0.

        Raises:
            ListenError: the port is in use, or the host is not this machine's.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=256)
        except OSError as error:
            raise ListenError(
                f"cannot listen on {host}:{port}: the port is in use or the address is not this "
                f"machine's ({error.strerror}); stop the other server or choose another with "
                "--listen"
            ) from error
        listener.setblocking(False)
        self._listeners.append(listener)
        self._spawn(self._accept(listener))
        bound: int = listener.getsockname()[1]
        return bound

    async def stop(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()

    def _spawn(self, work: Awaitable[None]) -> asyncio.Future[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)

    async def _accept(self, listener: socket.socket) -> None:
        room = _room()
        async for connection in connections(listener):
            if len(self._tasks) - len(self._strangers) >= room:
                connection.close()
                continue
            if len(self._strangers) >= MAX_STRANGERS:
                next(iter(self._strangers)).cancel()
            stranger = self._spawn(self._serve(connection))
            self._strangers[stranger] = None

    async def _serve(self, connection: socket.socket) -> None:
        who = _name(connection)
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                visitor = await self._greet(connection)
        except (OSError, EOFError, TimeoutError, SecurityError) as error:
            log.debug("refused %s: %s", who, refusal(error))
            connection.close()
            return
        except BaseException:
            connection.close()
            raise
        self._strangers.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
        try:
            await self._let_in(visitor)
        except (OSError, EOFError, RpcmpError) as error:
            log.debug("lost %s: %s", who, refusal(error))
        finally:
            visitor.end.close()

    async def _greet(self, connection: socket.socket) -> Visitor:
        """Find out who it is.

        Raises:
            SecurityError: somebody who may not come in.
            OSError, EOFError: the handshake failed.
        """
        keep_alive(connection.fileno())
        credentials = self._security.credentials
        if credentials is None:
            return await self._greet_plain(End(connection))
        session = Session(credentials.server())
        end = End(connection, session)
        await end.shake_hands()
        if session.peer_role is None:
            raise SecurityError("its certificate has no role of rpcmp")
        if session.protocol not in (GRPC, RELAY):
            raise SecurityError("it does not say which protocol it speaks")
        self._security.establish(end)
        return Visitor(end, session.peer_role, session.protocol)

    async def _greet_plain(self, end: End) -> Visitor:
        if not self._security.insecure and not is_ours(end.socket):
            raise SecurityError("it is another user's")
        first = await end.read(HEADER.size)
        end.decrypted[:0] = first  # a frame is short and begins with a zero, HTTP/2 with PRI
        return Visitor(end, None, GRPC if first[0] else RELAY)

    async def _let_in(self, visitor: Visitor) -> None:
        if visitor.protocol == RELAY:
            await self._relay(visitor)
            return
        is_driver = visitor.role is None or visitor.role.is_driver
        path = str(self._drivers if is_driver else self._peers)
        with self._inner.carrying(visitor) as inside:
            await asyncio.get_running_loop().sock_connect(inside, path)
            await splice(visitor.end, End(inside))


def _room() -> int:
    """How many may be inside at once: each takes three descriptors, and the job needs some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 4)


def _name(connection: socket.socket) -> str:
    try:
        host, port, *_ = connection.getpeername()
    except OSError:
        return "a connection that is gone already"
    return f"{host}:{port}"
