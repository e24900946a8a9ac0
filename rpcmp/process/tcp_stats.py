"""Connections to hosts that may vanish.

TensorPipe opens a connection when it first needs it and never asks again whether anybody is there:
when a cable is pulled, both sides would wait for ever. The kernel can ask, and it is the other
host's kernel that answers: a process that computes for a long time is not cut off, but one is that
for so long reads nothing of what has been sent to it.

What the kernel knows of TCP connections that are this process's, by their descriptors.

Not by Python's sockets, which may change the blocking mode of what they are made for.

What has gone from this process to the members of its group, and back.

Agents listen on loopback addresses, each at one of its own, so where a connection leads says whom
it is to. That can be told at the end that has opened it alone: the port of that end tells nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

SILENT_SECONDS = 6
"""After which a connection to a host that does not answer is broken."""

_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS - 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000),
)

_LIBC = ctypes.CDLL(None)


class Links:
    """The TCP connections of this process, whoever has opened them."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int]] = set()

    def watch(self) -> list[tuple[str, int]]:
        """Have the kernel ask on all connections that are new; call it now and then.

        Returns:
            all sockets of this process: their identities in the kernel, and their descriptors.
        """
        present = set(_sockets())
        for _, fd in present - self._known:
            keep_alive(fd)
        self._known = present
        return list(present)


def _sockets() -> list[tuple[str, int]]:
    """This process's sockets by their identity in the kernel."""
    if sys.platform != "linux":
        return []
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found.append((link, int(name)))
    return found


def keep_alive(fd: int) -> None:
    """Have the kernel ask on one connection; other kinds of sockets refuse that, which is as well.

    Not by Python's socket, which may change the blocking mode of what it is made for.
    """
    for level, option, value in _OPTIONS:
        number = ctypes.c_int(value)
        _LIBC.setsockopt(fd, level, option, ctypes.byref(number), ctypes.sizeof(number))


ESTABLISHED, LISTEN = 1, 10
"""States; see tcp(7)."""


# Where in `struct tcp_info` they stand, which only ever grows at its end (linux/tcp.h).
_RTT_US = struct.Struct("<I"), 68
_RESENT = struct.Struct("<I"), 100
_ACKED_RECEIVED = struct.Struct("<QQ"), 120
_LEAST_BYTES, _MOST_BYTES = 136, 512

_ADDRESS = struct.Struct("=H2s4s")
"""The beginning of a `struct sockaddr_in`: family, port, address."""


class Info(NamedTuple):
    """One connection.

    Attributes:
        state: of TCP's.
        sent: bytes that the other end has acknowledged.
        received: bytes that have come.
        round_trip_s: the kernel's smoothed estimate of seconds to the other end and back.
        resent: packets, those of the handshake included.
    """

    state: int
    sent: int
    received: int
    round_trip_s: float
    resent: int


def info(fd: int) -> Info | None:
    """What is known of a connection; None where it is none of TCP's, or on an older kernel."""
    data = ctypes.create_string_buffer(_MOST_BYTES)
    size = ctypes.c_uint32(_MOST_BYTES)
    arguments = (fd, socket.IPPROTO_TCP, socket.TCP_INFO, data, ctypes.byref(size))
    if _LIBC.getsockopt(*arguments) or size.value < _LEAST_BYTES:
        return None
    layout, offset = _RTT_US
    (round_trip_us,) = layout.unpack_from(data, offset)
    layout, offset = _ACKED_RECEIVED
    sent, received = layout.unpack_from(data, offset)
    layout, offset = _RESENT
    (resent,) = layout.unpack_from(data, offset)
    return Info(data.raw[0], sent, received, round_trip_us / 1e6, resent)


def own_address(fd: int) -> str:
    """HOST:PORT of our end; empty where it has none of IPv4."""
    return _address(fd, _LIBC.getsockname)


def peer_address(fd: int) -> str:
    """HOST:PORT of the other end; empty where it has none of IPv4."""
    return _address(fd, _LIBC.getpeername)


def _address(fd: int, ask: Callable[..., int]) -> str:
    data, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if ask(fd, data, ctypes.byref(size)):
        return ""
    family, port, address = _ADDRESS.unpack_from(data)
    if family != socket.AF_INET:
        return ""
    return f"{socket.inet_ntoa(address)}:{int.from_bytes(port, 'big')}"


LOOPBACK = "127."

INCOMING = ""
"""Whom connections lead to that others have opened."""


class PeerTraffic(NamedTuple):
    """All that went between this process and one peer, since the process began.

    Attributes:
        peer: HOST:PORT that connections lead to, or INCOMING; of tensors the member's name.
        sent, received: bytes.
        round_trip_s: of the fastest that is open; 0: none is.
    """

    peer: str
    sent: int
    received: int
    round_trip_s: float


class Traffic:
    """Counts what has gone over connections, also over those that are closed again."""

    def __init__(self) -> None:
        self._leads_to: dict[str, str] = {}
        self._listening: set[str] = set()
        self._open: dict[str, Info] = {}
        self._closed: dict[str, tuple[int, int]] = {}

    def read(self, sockets: Iterable[tuple[str, int]]) -> list[PeerTraffic]:
        """What has gone over all connections to each address, and over those that others opened.

        Args:
            sockets: all that it has, by their identity in the kernel, and their descriptors.
        """
        found = {name: (fd, seen) for name, fd in sockets if (seen := info(fd)) is not None}
        for fd, seen in found.values():
            if seen.state == LISTEN:
                self._listening.add(own_address(fd))
        for name, (fd, seen) in found.items():
            if name not in self._leads_to and seen.state == ESTABLISHED:
                peer = peer_address(fd)
                if peer.startswith(LOOPBACK):
                    own = own_address(fd)
                    self._leads_to[name] = INCOMING if own in self._listening else peer
        self._forget(found)
        self._open = {name: found[name][1] for name in self._leads_to}
        return list(self._ways())

    def _forget(self, found: Iterable[str]) -> None:
        """Keep the counts of what is closed, and let go of it."""
        for name in self._leads_to.keys() - set(found):
            peer, last = self._leads_to.pop(name), self._open.get(name)
            if last is not None:
                sent, received = self._closed.get(peer, (0, 0))
                self._closed[peer] = sent + last.sent, received + last.received

    def _ways(self) -> Iterator[PeerTraffic]:
        for peer in dict.fromkeys((*self._closed, *self._leads_to.values())):
            infos = [info for name, info in self._open.items() if self._leads_to[name] == peer]
            sent, received = self._closed.get(peer, (0, 0))
            yield PeerTraffic(
                peer,
                sent + sum(info.sent for info in infos),
                received + sum(info.received for info in infos),
                min((info.round_trip_s for info in infos), default=0.0),
            )
