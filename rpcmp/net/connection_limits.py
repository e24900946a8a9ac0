"""Accept connections within limits, so that strangers cannot use up what a run needs.

    admitted ──> unauthenticated ──> authenticated ──> closed
                    └── too old, or too many ──> ended ──> closed

A connection authenticates by a TLS handshake, a request or a token. Until then it costs its sender
little, so there is room for few of them, for a short time. If there is no more room, the user or
address with the most of them loses one. An ended connection counts until it is closed, so the
limits hold for what is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rpcmp.errors import SecurityError
from rpcmp.net.local_peer import owner
from rpcmp.process import resources, sockets

AUTHENTICATION_SECONDS = 10.0
"""Time limit for a connection to authenticate."""

LOOPBACK = "this machine"
"""The peer of a loopback connection while its user is not known."""


def descriptor_limit(part: int, most: int) -> int:
    """Return 1 / `part` of this process's descriptors, at most `most`; the rest is the run's."""
    return max(1, min(most, resources.descriptor_limit() // part))


@dataclass(eq=False)
class AdmittedConnection:
    """An admitted connection.

    Attributes:
        peer: its user or address; may be updated once that is known better.
        since: time of its admission, of the monotonic clock.
        end: ends the connection without waiting for it; called at most once.
        is_ended: whether `end` has been called.
    """

    peer: str
    since: float
    end: Callable[[], object]
    is_ended: bool = False


class ConnectionLimit:
    """A limit on the connections of one or several listeners. Thread-safe.

    Args:
        max_connections: open at once; more are refused.
        max_unauthenticated: unauthenticated ones among them.
        max_per_peer: per user or address; None: no limit of its own.
        seconds: time limit for a connection to authenticate.
    """

    def __init__(
        self,
        max_connections: int,
        max_unauthenticated: int,
        max_per_peer: int | None = None,
        seconds: float = AUTHENTICATION_SECONDS,
    ) -> None:
        self._max_connections, self._max_unauthenticated = max_connections, max_unauthenticated
        self._max_per_peer = max_connections if max_per_peer is None else max_per_peer
        self._seconds = seconds
        self._unauthenticated: dict[AdmittedConnection, None] = {}  # the oldest first
        self._authenticated: dict[AdmittedConnection, None] = {}
        self._lock = threading.RLock()

    def has_room(self) -> bool:
        """Return whether to accept another connection now.

        If there is no room, an unauthenticated connection is ended; the next one can be accepted
        once that is closed. If there is none to end, accept: `admit` then refuses the new one.
        """
        with self._lock:
            unauthenticated = len(self._unauthenticated)
            if not unauthenticated or (
                unauthenticated < self._max_unauthenticated
                and unauthenticated + len(self._authenticated) < self._max_connections
            ):
                return True
            if not any(admitted.is_ended for admitted in self._unauthenticated):
                _end_one(list(self._unauthenticated))
            return False

    def admit(self, peer: str, end: Callable[[], object]) -> AdmittedConnection | None:
        """Count a connection; return None if there is no room, or its peer has too many."""
        with self._lock:
            if len(self._unauthenticated) + len(self._authenticated) >= self._max_connections:
                return None
            if self._max_per_peer < self._max_connections:
                unauthenticated = [one for one in self._unauthenticated if one.peer == peer]
                authenticated = sum(one.peer == peer for one in self._authenticated)
                is_full = len(unauthenticated) + authenticated >= self._max_per_peer
                if is_full and not _end_one(unauthenticated):
                    return None
            admitted = AdmittedConnection(peer, time.monotonic(), end)
            self._unauthenticated[admitted] = None
            return admitted

    def authenticate(self, admitted: AdmittedConnection) -> None:
        with self._lock:
            if admitted in self._unauthenticated:
                del self._unauthenticated[admitted]
                self._authenticated[admitted] = None

    def remove(self, admitted: AdmittedConnection) -> None:
        """Stop counting a connection, once it is closed."""
        with self._lock:
            self._unauthenticated.pop(admitted, None)
            self._authenticated.pop(admitted, None)

    def expire(self) -> None:
        """End the connections that have not authenticated in time; call it now and then."""
        with self._lock:
            latest = time.monotonic() - self._seconds
            for admitted in list(self._unauthenticated):
                if admitted.since < latest:
                    _end(admitted)

    def end_all(self) -> None:
        with self._lock:
            for admitted in [*self._unauthenticated, *self._authenticated]:
                _end(admitted)


def _end_one(unauthenticated: list[AdmittedConnection]) -> bool:
    """End the oldest connection of the peer that has the most; return False if there is none."""
    candidates = [admitted for admitted in unauthenticated if not admitted.is_ended]
    if not candidates:
        return False
    ((greediest, _),) = Counter(admitted.peer for admitted in candidates).most_common(1)
    _end(next(admitted for admitted in candidates if admitted.peer == greediest))
    return True


def _end(admitted: AdmittedConnection) -> None:
    if not admitted.is_ended:
        admitted.is_ended = True
        admitted.end()


def peer_of(connection: socket.socket) -> str:
    """Return the user of a loopback connection, or the remote address.

    Asks the kernel, so an event loop uses `address_of` instead.
    """
    peer = address_of(connection)
    if peer == LOOPBACK:
        with contextlib.suppress(SecurityError):  # all users of this machine may see the page
            peer = user_of(owner(connection))
    return peer


def user_of(uid: int | None) -> str:
    return LOOPBACK if uid is None else f"uid {uid}"


def address_of(connection: socket.socket) -> str:
    """Return the part of a remote address that its sender cannot choose.

    127.0.0.0/8 is one sender, and so are the 2**64 addresses of an IPv6 host.
    """
    try:
        host = ipaddress.ip_address(connection.getpeername()[0].partition("%")[0])
    except (OSError, ValueError):
        return "gone"
    if isinstance(host, ipaddress.IPv6Address):
        host = host.ipv4_mapped or host
    if host.is_loopback:
        return LOOPBACK
    if isinstance(host, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((host, 64), strict=False))
    return str(host)


RETRY_SECONDS = 0.1

CLOSING_SECONDS = 0.001
"""Interval of checks whether a connection that was ended is closed."""

FIRST_BYTE_SECONDS = 5
"""How long the kernel may hold back a connection that sends nothing; it rounds up."""

BACKLOG = 4096
"""Connections that the kernel may hold back; it accepts more at once, by SYN cookies."""

SILENT_AT_ONCE = 64
"""Silent connections that are closed in a row."""

log = logging.getLogger(__name__)


def listen_deferred(listener: socket.socket) -> None:
    """Listen, and have the kernel hold back connections until they have sent something.

    Silent ones, which strangers may hold open in any number, then cost this process nothing. Only
    for protocols in which the client sends first, before it is accepted.
    """
    listener.listen(BACKLOG)
    with contextlib.suppress(OSError, AttributeError):  # no Linux, no TCP: it does not wait
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, FIRST_BYTE_SECONDS)


def accept_with_data(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Accept a connection, but close those for whose first byte the kernel has waited in vain.

    That is much cheaper than to start a protocol, or to look up the connection's owner. Raises
    BlockingIOError if there is no connection, or all were silent.
    """
    for _ in range(SILENT_AT_ONCE):
        connection, address = socket.socket.accept(listener)
        if not (_defers(listener) and _was_silent(connection)):
            return connection, address
        connection.close()
    raise BlockingIOError("whatever came has said nothing")


def _defers(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT))
    except (OSError, AttributeError):
        return False


def _was_silent(connection: socket.socket) -> bool:
    """Return whether the kernel has waited in vain for a connection's first byte.

    It then repeats the handshake, and hands over the connection at the answer. A connection that
    sends is handed over with its data, even if its handshake was repeated because of a lost packet.
    """
    seen = sockets.info(connection.fileno())
    return seen is not None and seen.received == 0 and seen.resent > 0


async def connections(
    listener: socket.socket, limit: ConnectionLimit | None = None
) -> AsyncGenerator[socket.socket, None]:
    """Yield each connection to a listening socket, while `limit` has room for one.

    asyncio's `sock_accept` is no alternative: if it is cancelled while a connection arrives, it
    loses the connection and logs a traceback (Python 3.11).
    """
    while True:
        await _readable(listener)
        while limit is not None and not limit.has_room():
            await asyncio.sleep(CLOSING_SECONDS)
        try:
            connection, _ = accept_with_data(listener)
        except (BlockingIOError, InterruptedError, ConnectionError):  # gone again
            continue
        except OSError as error:  # too many open files: later there may be fewer
            log.warning("cannot take a connection: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            connection.setblocking(False)
            yield connection


async def _readable(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    is_readable = asyncio.Event()
    loop.add_reader(listener, is_readable.set)
    try:
        await is_readable.wait()
    finally:
        loop.remove_reader(listener)


class BoundedListener(socket.socket):
    """A listening socket with a limit, for servers that accept by themselves, such as asyncio's.

    Args:
        listener: the socket; detached.
        limit: of its connections, which count until they are closed.
    """

    def __init__(self, listener: socket.socket, limit: ConnectionLimit) -> None:
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        listen_deferred(self)
        self._limit = limit
        self._admitted: dict[Any, AdmittedConnection] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        if not self._limit.has_room():
            raise BlockingIOError("a connection has to leave first")
        plain, address = accept_with_data(self)
        connection = _Accepted(self.family, self.type, self.proto, plain.detach())
        admitted = self._limit.admit(peer_of(connection), connection.end)
        if admitted is None:
            connection.close()
            raise BlockingIOError("there are too many connections")
        self._admitted[address[:2]] = admitted
        connection.on_close = partial(self._remove, admitted)
        return connection, address

    def authenticate(self, address: Any) -> None:
        """Count the connection from an address, host and port, as authenticated."""
        if (admitted := self._admitted.get(tuple(address[:2]))) is not None:
            self._limit.authenticate(admitted)

    def _remove(self, admitted: AdmittedConnection) -> None:
        self._limit.remove(admitted)
        self._admitted = {key: one for key, one in self._admitted.items() if one is not admitted}


class _Accepted(socket.socket):
    on_close: Callable[[], None] | None = None

    def end(self) -> None:
        """Shut the connection down; its server notices, and closes it."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        super().close()
        if self.on_close is not None:
            self.on_close()
            self.on_close = None
