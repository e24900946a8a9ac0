"""Accepting connections within limits, so that strangers cannot use up what a run needs.

    admitted ──> unauthenticated ──authenticated──> guest ──> closed
                    └── too old, or too many ──> ended ──> closed

A connection is unauthenticated until it has proven itself: by a TLS handshake, a request, a token.
Such a connection costs little to make, so there is room for few, for a short time. If there is no
more room, the user or address that has the most of them loses one. An ended connection counts
until it is closed, so the limits hold for what is open.
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
from typing import Any

from rpcmp.errors import SecurityError
from rpcmp.net.local_peer import owner
from rpcmp.process import sockets
from rpcmp.process.resources import descriptor_limit

AUTHENTICATION_SECONDS = 10.0
"""Time limit for a connection to authenticate."""

LOOPBACK = "this machine"
"""The peer of a loopback connection while its user is not known."""


def share(part: int, most: int) -> int:
    """Return a limit on descriptors: one `part`th of this process's, at most `most`.

    Strangers cannot use up the rest, which is the run's.
    """
    return max(1, min(most, descriptor_limit() // part))


@dataclass(eq=False)
class Guest:
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


class Budget:
    """A limit on the connections of one or several listeners. Thread-safe.

    Args:
        most: open at once; more are refused.
        unauthenticated: unauthenticated ones among them.
        per_peer: per user or address; None: no limit of its own.
        seconds: time limit for a connection to authenticate.
    """

    def __init__(
        self,
        most: int,
        unauthenticated: int,
        per_peer: int | None = None,
        seconds: float = AUTHENTICATION_SECONDS,
    ) -> None:
        self._most, self._most_unauthenticated = most, unauthenticated
        self._per_peer = most if per_peer is None else per_peer
        self._seconds = seconds
        self._unauthenticated: dict[Guest, None] = {}  # the oldest first
        self._authenticated: dict[Guest, None] = {}
        self._lock = threading.RLock()

    def has_room(self) -> bool:
        """Return whether to accept another connection now.

        If there is no room, an unauthenticated connection is ended; the next one can be accepted
        once that is closed. If there is none to end, accept: `admit` then refuses the new one.
        """
        with self._lock:
            unauthenticated = len(self._unauthenticated)
            if not unauthenticated:
                return True
            if (
                unauthenticated < self._most_unauthenticated
                and unauthenticated + len(self._authenticated) < self._most
            ):
                return True
            if not any(guest.is_ended for guest in self._unauthenticated):
                _end_one(list(self._unauthenticated))
            return False

    def admit(self, peer: str, end: Callable[[], object]) -> Guest | None:
        """Count a connection; return None if there is no room, or its peer has too many.

        Args:
            peer: see `peer_of`.
            end: ends the connection.
        """
        with self._lock:
            if len(self._unauthenticated) + len(self._authenticated) >= self._most:
                return None
            if self._per_peer < self._most:
                unauthenticated = [guest for guest in self._unauthenticated if guest.peer == peer]
                guests = [guest for guest in self._authenticated if guest.peer == peer]
                if len(unauthenticated) + len(guests) >= self._per_peer and not _end_one(
                    unauthenticated
                ):
                    return None
            guest = Guest(peer, time.monotonic(), end)
            self._unauthenticated[guest] = None
            return guest

    def authenticate(self, guest: Guest) -> None:
        """Count a connection as authenticated."""
        with self._lock:
            if guest in self._unauthenticated:
                del self._unauthenticated[guest]
                self._authenticated[guest] = None

    def remove(self, guest: Guest) -> None:
        """Stop counting a connection, which is closed."""
        with self._lock:
            self._unauthenticated.pop(guest, None)
            self._authenticated.pop(guest, None)

    def expire(self) -> None:
        """End the connections that have not authenticated in time; call it now and then."""
        with self._lock:
            ends = time.monotonic() - self._seconds
            for guest in [guest for guest in self._unauthenticated if guest.since < ends]:
                _end(guest)

    def end_all(self) -> None:
        with self._lock:
            for guest in [*self._unauthenticated, *self._authenticated]:
                _end(guest)


def _end_one(unauthenticated: list[Guest]) -> bool:
    """End the oldest connection of the peer that has the most; return False if there is none."""
    present = [guest for guest in unauthenticated if not guest.is_ended]
    if not present:
        return False
    ((greediest, _),) = Counter(guest.peer for guest in present).most_common(1)
    _end(next(guest for guest in present if guest.peer == greediest))
    return True


def _end(guest: Guest) -> None:
    if not guest.is_ended:
        guest.is_ended = True
        guest.end()


def peer_of(connection: socket.socket) -> str:
    """Return the user of a loopback connection, or the remote address.

    Asks the kernel, so an event loop rather uses `address_of`.
    """
    found = address_of(connection)
    return found if found != LOOPBACK else user_of(_owner(connection))


def user_of(uid: int | None) -> str:
    """Return the peer for a user of this machine."""
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


def _owner(connection: socket.socket) -> int | None:
    try:
        return owner(connection)
    except SecurityError:  # the page and the metrics are open to all users of this machine
        return None


RETRY_SECONDS = 0.1

CLOSING_SECONDS = 0.001
"""Interval of checks whether a connection that was ended is closed."""

SILENT_SECONDS = 5
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

    Args:
        listener: bound to an address.
    """
    listener.listen(BACKLOG)
    with contextlib.suppress(OSError, AttributeError):  # no Linux, no TCP: it does not wait
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_SECONDS)


def accept_with_data(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Accept a connection, but close those for whose first byte the kernel has waited in vain.

    That is much cheaper than to start a protocol, or to look up the connection's owner.

    Args:
        listener: non-blocking; connections are only held back after `listen_deferred`.

    Raises:
        OSError: as `socket.accept`; BlockingIOError also if all connections were silent.
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
    listener: socket.socket, budget: Budget | None = None
) -> AsyncGenerator[socket.socket, None]:
    """Yield each connection to a listening socket.

    asyncio's `sock_accept` is no alternative: if it is cancelled while a connection arrives, it
    loses the connection and logs a traceback (Python 3.11).

    Args:
        budget: accept only while it has room; None: no limit.
    """
    while True:
        await _readable(listener)
        while budget is not None and not budget.has_room():
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
    """Wait for a connection to accept."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(listener, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(listener)


class BoundedListener(socket.socket):
    """A listening socket within a budget, for servers that accept by themselves, such as asyncio's.

    Connections count until they are closed.

    Args:
        listener: the socket; detached.
        budget: of its connections.
    """

    def __init__(self, listener: socket.socket, budget: Budget) -> None:
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        listen_deferred(self)
        self._budget = budget
        self._guests: dict[Any, Guest] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        """See socket.socket.

        Raises:
            BlockingIOError: there is no room now, or nothing to accept.
        """
        if not self._budget.has_room():
            raise BlockingIOError("a connection has to leave first")
        plain, address = accept_with_data(self)
        connection = _Accepted(self.family, self.type, self.proto, plain.detach())
        guest = self._budget.admit(peer_of(connection), connection.end)
        if guest is None:
            connection.close()
            raise BlockingIOError("there are too many connections")
        self._guests[address[:2]] = connection.guest = guest
        connection.closed_by = self
        return connection, address

    def authenticate(self, address: Any) -> None:
        """Count the connection from an address as authenticated.

        Args:
            address: host and port.
        """
        if (guest := self._guests.get(tuple(address[:2]))) is not None:
            self._budget.authenticate(guest)

    def remove(self, guest: Guest) -> None:
        """Stop counting a connection."""
        self._budget.remove(guest)
        self._guests = {key: one for key, one in self._guests.items() if one is not guest}


class _Accepted(socket.socket):
    guest: Guest | None = None
    closed_by: BoundedListener | None = None

    def end(self) -> None:
        """Shut the connection down; its server notices, and closes it."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See socket.socket."""
        super().close()
        if self.closed_by is not None and self.guest is not None:
            self.closed_by.remove(self.guest)
            self.closed_by = None
