"""Taking connections, whatever happens to single ones, and no more than there is room for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator
from typing import Any

from rpcmp.net.connection_limits import Budget, Guest, peer_of
from rpcmp.process import sockets

RETRY_SECONDS = 0.1

LEAVING_SECONDS = 0.001
"""Between two looks whether a connection that was ended has left."""

SILENT_SECONDS = 5
"""How long the kernel may keep a connection to itself that says nothing; it rounds that up."""

BACKLOG = 4096
"""Connections that the kernel may hold back; what is more is accepted at once, by SYN cookies."""

SILENT_AT_ONCE = 64
"""Silent connections that are closed before something else gets its turn."""

log = logging.getLogger(__name__)


def speaks_second(listener: socket.socket) -> None:
    """Listen; have the kernel hold connections back until they have said something, or for seconds.

    Silent ones, which strangers may hold open in any number, then cost this process nothing. For
    protocols whose client speaks first, and does so before it is accepted.

    Args:
        listener: bound to an address.
    """
    listener.listen(BACKLOG)
    with contextlib.suppress(OSError, AttributeError):  # no Linux, no TCP: it does not wait
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, SILENT_SECONDS)


def accept_speaking(listener: socket.socket) -> tuple[socket.socket, Any]:
    """Accept as `listener.accept` does, but close what the kernel has waited for in vain.

    That costs much less than to begin a protocol, and to find out whose the connection is.

    Args:
        listener: does not block; only one that `speaks_second` is waited for.

    Raises:
        OSError: as `listener.accept` does; BlockingIOError also if all that came were silent.
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

    It then repeats the handshake, and hands over what answers that. A connection that speaks is
    handed over with what it says, also if its handshake had to be repeated because it got lost.
    """
    seen = sockets.info(connection.fileno())
    return seen is not None and seen.received == 0 and seen.resent > 0


async def connections(
    listener: socket.socket, budget: Budget | None = None
) -> AsyncGenerator[socket.socket, None]:
    """Yield each connection that is opened to a listening socket.

    Not by asyncio's `sock_accept`: one that is cancelled while a connection comes loses it, and
    says so with a traceback (Python 3.11).

    Args:
        budget: nothing is accepted while it has no room; None: there is no limit.
    """
    while True:
        await _readable(listener)
        while budget is not None and not budget.has_room():
            await asyncio.sleep(LEAVING_SECONDS)
        try:
            connection, _ = accept_speaking(listener)
        except (BlockingIOError, InterruptedError, ConnectionError):  # gone again
            continue
        except OSError as error:  # too many open files: later there may be fewer
            log.warning("cannot take a connection: %s", error)
            await asyncio.sleep(RETRY_SECONDS)
        else:
            connection.setblocking(False)
            yield connection


async def _readable(listener: socket.socket) -> None:
    """Wait until there is a connection to accept."""
    loop = asyncio.get_running_loop()
    came = asyncio.Event()
    loop.add_reader(listener, came.set)
    try:
        await came.wait()
    finally:
        loop.remove_reader(listener)


class BoundedListener(socket.socket):
    """A listening socket for servers that accept by themselves, such as asyncio's.

    What it accepts counts until it is closed; `prove` tells which connections are no strangers.

    Args:
        listener: the socket; detached.
        budget: of its connections.
    """

    def __init__(self, listener: socket.socket, budget: Budget) -> None:
        super().__init__(listener.family, listener.type, listener.proto, listener.detach())
        speaks_second(self)
        self._budget = budget
        self._guests: dict[Any, Guest] = {}

    def accept(self) -> tuple[socket.socket, Any]:
        """See socket.socket.

        Raises:
            BlockingIOError: there is no room now, or nothing to accept.
        """
        if not self._budget.has_room():
            raise BlockingIOError("a connection has to leave first")
        plain, address = accept_speaking(self)
        connection = _Accepted(self.family, self.type, self.proto, plain.detach())
        guest = self._budget.admit(peer_of(connection), connection.end)
        if guest is None:
            connection.close()
            raise BlockingIOError("there are too many connections")
        self._guests[address[:2]] = connection.guest = guest
        connection.closed_by = self
        return connection, address

    def prove(self, address: Any) -> None:
        """Count the connection from an address as a stranger's no more.

        Args:
            address: host and port.
        """
        if (guest := self._guests.get(tuple(address[:2]))) is not None:
            self._budget.prove(guest)

    def left(self, guest: Guest) -> None:
        """Count a connection no more."""
        self._budget.leave(guest)
        self._guests = {key: one for key, one in self._guests.items() if one is not guest}


class _Accepted(socket.socket):
    guest: Guest | None = None
    closed_by: BoundedListener | None = None

    def end(self) -> None:
        """Break the connection; the server that has it sees that, and closes it."""
        with contextlib.suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """See socket.socket."""
        super().close()
        if self.closed_by is not None and self.guest is not None:
            self.closed_by.left(self.guest)
            self.closed_by = None
