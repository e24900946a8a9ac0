"""How many connections a door takes, and whose has to go when there are too many.

    admitted ──> stranger ──proven──> guest ──> left
                    └── too old, or too many ──> ended ──> left

A connection is a stranger until it has proven itself: by a TLS handshake, a request, a token. A
stranger costs little to make, so there is room for few, for a short time, and the user or address
that has the most of them loses one when there is no more. An ended connection counts until it has
left, so the numbers are bounds of what is open.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rpcmp.errors import SecurityError
from rpcmp.net.local_peer import owner
from rpcmp.process.descriptors import limit

STRANGER_SECONDS = 10.0
"""How long a connection may take to prove itself."""

LOOPBACK = "this machine"
"""The peer of a loopback connection whose user is not known (yet)."""


def share(part: int, most: int) -> int:
    """Return how many descriptors a door may use: one `part`th of this process's, `most` at most.

    Whatever strangers do, the rest is the run's.
    """
    return max(1, min(most, limit() // part))


@dataclass(eq=False)
class Guest:
    """A connection that has been admitted.

    Attributes:
        peer: whose it is; may be set anew once that is known better.
        since: when it was admitted, of the monotonic clock.
        end: ends the connection; called once at most, without waiting for it.
        is_ended: whether that has been called.
    """

    peer: str
    since: float
    end: Callable[[], object]
    is_ended: bool = False


class Budget:
    """The connections of one door, or of several that share what there is. Thread-safe.

    Args:
        most: open at once; more are refused.
        strangers: of these, how many may be strangers.
        per_peer: how many one peer may have; None: all.
        seconds: how long a stranger may stay.
    """

    def __init__(
        self,
        most: int,
        strangers: int,
        per_peer: int | None = None,
        seconds: float = STRANGER_SECONDS,
    ) -> None:
        self._most, self._strangers = most, strangers
        self._per_peer = most if per_peer is None else per_peer
        self._seconds = seconds
        self._unproven: dict[Guest, None] = {}  # the oldest first
        self._proven: dict[Guest, None] = {}
        self._lock = threading.RLock()

    def has_room(self) -> bool:
        """Return whether to accept another connection now.

        If there is no room, a stranger is ended, and the next one can be accepted once it has left.
        If there is no stranger either, the connection is to be accepted: `admit` refuses it.
        """
        with self._lock:
            strangers = len(self._unproven)
            if not strangers:
                return True
            if strangers < self._strangers and strangers + len(self._proven) < self._most:
                return True
            if not any(guest.is_ended for guest in self._unproven):
                _end_one(list(self._unproven))
            return False

    def admit(self, peer: str, end: Callable[[], object]) -> Guest | None:
        """Count a connection; None if there is no room for it, or its peer has too many.

        Args:
            peer: whose it is, see `peer_of`.
            end: ends the connection.
        """
        with self._lock:
            if len(self._unproven) + len(self._proven) >= self._most:
                return None
            if self._per_peer < self._most:
                strangers = [guest for guest in self._unproven if guest.peer == peer]
                guests = [guest for guest in self._proven if guest.peer == peer]
                if len(strangers) + len(guests) >= self._per_peer and not _end_one(strangers):
                    return None
            guest = Guest(peer, time.monotonic(), end)
            self._unproven[guest] = None
            return guest

    def prove(self, guest: Guest) -> None:
        """Count a connection as a stranger's no more."""
        with self._lock:
            if guest in self._unproven:
                del self._unproven[guest]
                self._proven[guest] = None

    def leave(self, guest: Guest) -> None:
        """Count a connection no more; it is closed."""
        with self._lock:
            self._unproven.pop(guest, None)
            self._proven.pop(guest, None)

    def expire(self) -> None:
        """End the strangers whose time is up; to be called now and then."""
        with self._lock:
            ends = time.monotonic() - self._seconds
            for guest in [guest for guest in self._unproven if guest.since < ends]:
                _end(guest)

    def end_all(self) -> None:
        """End every connection."""
        with self._lock:
            for guest in [*self._unproven, *self._proven]:
                _end(guest)


def _end_one(strangers: list[Guest]) -> bool:
    """End the oldest stranger of the peer that has the most; return whether there is one."""
    present = [guest for guest in strangers if not guest.is_ended]
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
    """Return whose a connection is: a user of this machine, or another's address.

    One question to the kernel; not for an event loop that has something else to do, see
    `address_of`.
    """
    found = address_of(connection)
    return found if found != LOOPBACK else user_of(_owner(connection))


def user_of(uid: int | None) -> str:
    """Return the peer that a user of this machine is."""
    return LOOPBACK if uid is None else f"uid {uid}"


def address_of(connection: socket.socket) -> str:
    """Return the address that a connection comes from, as far as its sender has no choice of it.

    All of 127.0.0.0/8 is one sender's, and so are the 2**64 addresses of an IPv6 host.
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
