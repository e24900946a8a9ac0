"""Sockets as the kernel sees them: liveness of connections, statistics, listeners, owners.

Descriptors are inspected by libc and not by Python's `socket`, which may change the blocking mode
of a descriptor that it wraps.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from rpcmp.config import addresses

SILENT_SECONDS = 6
"""After which a connection to a host that does not answer is broken."""

LOOK_SHARE, LOOK_SECONDS = 0.0005, 2.0
"""Part of a core that looks at all connections may take; the longest interval of two looks."""

ESTABLISHED, LISTEN = 1, 10
"""TCP states; see tcp(7)."""

LOOPBACK = "127."

INCOMING = ""
"""Peer of the connections that others have opened to this process."""

_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS - 2),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000),
)

# Offsets in `struct tcp_info`, which only ever grows at its end (linux/tcp.h).
_RTT_US = struct.Struct("<I"), 68
_RESENT = struct.Struct("<I"), 100
_ACKED_RECEIVED = struct.Struct("<QQ"), 120
_MIN_INFO_BYTES, _MAX_INFO_BYTES = 136, 512

_ADDRESS = struct.Struct("=H2s4s")
"""The head of a `struct sockaddr_in`: family, port, address."""

_LIBC = ctypes.CDLL(None)

_CONFINEMENT_MARKS = ("NoNewPrivs", "Seccomp_filters")
"""Fields of /proc/PID/status that only grow, in a process and in all that it starts."""


def _sockets() -> list[tuple[int, int]]:
    if sys.platform != "linux":
        return []
    sockets = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                sockets.append((status.st_ino, fd))
    return sockets


def listeners() -> dict[int, str]:
    """Return the addresses at which this process listens for TCP, by the sockets' inodes.

    They are found by this process's descriptors, in whatever network they are.
    """
    result = {}
    for identity, fd in _sockets():
        with contextlib.suppress(OSError):  # closed meanwhile
            if address := _listening_address(fd):
                result[identity] = address
    return result


def _listening_address(fd: int) -> str:
    with socket.socket(fileno=os.dup(fd)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return ""
        host, port, *_ = copy.getsockname()
        return addresses.format_address(host, port)


class Links:
    """The TCP connections of this process, which may lead to hosts that vanish.

    TensorPipe opens a connection when it first needs it and never checks that its peer is alive: if
    a cable is pulled, both sides would wait for ever. The kernel can check, and the other host's
    kernel answers. So a process that computes for a long time is not cut off, but one that reads
    nothing of what it was sent for SILENT_SECONDS is.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()

    def watch(self) -> list[tuple[int, int]]:
        """Enable keep-alive on all new connections; to be called periodically.

        Returns:
            All sockets of this process: their inodes, and their descriptors.
        """
        present = set(_sockets())
        for _, fd in present - self._known:
            keep_alive(fd)
        self._known = present
        return list(present)


def keep_alive(fd: int) -> None:
    """Have the kernel check that the peer is alive; does nothing for other kinds of sockets."""
    for level, option, value in _KEEPALIVE:
        number = ctypes.c_int(value)
        _LIBC.setsockopt(fd, level, option, ctypes.byref(number), ctypes.sizeof(number))


class Info(NamedTuple):
    """The kernel's statistics of one TCP connection.

    Attributes:
        state: TCP state.
        sent: bytes that the other end has acknowledged.
        received: bytes that have arrived.
        round_trip_s: the kernel's smoothed estimate of the round trip, in seconds.
        resent: packets, including the handshake's.
    """

    state: int
    sent: int
    received: int
    round_trip_s: float
    resent: int


def info(fd: int) -> Info | None:
    """Return a connection's statistics; None if it is not TCP, or the kernel is too old."""
    data = ctypes.create_string_buffer(_MAX_INFO_BYTES)
    size = ctypes.c_uint32(_MAX_INFO_BYTES)
    arguments = (fd, socket.IPPROTO_TCP, socket.TCP_INFO, data, ctypes.byref(size))
    if _LIBC.getsockopt(*arguments) or size.value < _MIN_INFO_BYTES:
        return None
    layout, offset = _RTT_US
    (round_trip_us,) = layout.unpack_from(data, offset)
    layout, offset = _ACKED_RECEIVED
    sent, received = layout.unpack_from(data, offset)
    layout, offset = _RESENT
    (resent,) = layout.unpack_from(data, offset)
    return Info(data.raw[0], sent, received, round_trip_us / 1e6, resent)


def own_address(fd: int) -> str:
    """Return HOST:PORT of our end; empty if it has no IPv4 address."""
    return _address(fd, _LIBC.getsockname)


def peer_address(fd: int) -> str:
    """Return HOST:PORT of the other end; empty if it has no IPv4 address."""
    return _address(fd, _LIBC.getpeername)


def _address(fd: int, get_name: Callable[..., int]) -> str:
    data, size = ctypes.create_string_buffer(128), ctypes.c_uint32(128)
    if get_name(fd, data, ctypes.byref(size)):
        return ""
    family, port, address = _ADDRESS.unpack_from(data)
    if family != socket.AF_INET:
        return ""
    return f"{socket.inet_ntoa(address)}:{int.from_bytes(port, 'big')}"


class PeerTraffic(NamedTuple):
    """Everything that went between this process and one peer since the process started.

    Attributes:
        peer: HOST:PORT that connections lead to, or INCOMING; of tensors the member's name.
        sent, received: bytes.
        round_trip_s: of the fastest open connection; 0 if there is none.
    """

    peer: str
    sent: int
    received: int
    round_trip_s: float


class Traffic:
    """Counts the bytes between this process and the members of its group, by peer.

    Agents listen on loopback, each at an address of its own, and so does a relay for each peer that
    it leads to: a connection's destination identifies the peer. Only the end that opened a
    connection can tell: the other end sees an arbitrary port.
    """

    def __init__(self) -> None:
        self._peers: dict[int, str] = {}
        self._listening: set[str] = set()
        self._open: dict[int, Info] = {}
        self._closed: dict[str, tuple[int, int]] = {}

    def read(self, sockets: Iterable[tuple[int, int]]) -> list[PeerTraffic]:
        """Return the totals of open and closed connections, per peer and for INCOMING."""
        infos = {inode: (fd, seen) for inode, fd in sockets if (seen := info(fd)) is not None}
        for fd, seen in infos.values():
            if seen.state == LISTEN:
                self._listening.add(own_address(fd))
        for inode, (fd, seen) in infos.items():
            if inode not in self._peers and seen.state == ESTABLISHED:
                peer = peer_address(fd)
                if peer.startswith(LOOPBACK):
                    is_incoming = own_address(fd) in self._listening
                    self._peers[inode] = INCOMING if is_incoming else peer
        self._add_closed(infos)
        self._open = {inode: infos[inode][1] for inode in self._peers}
        return list(self._totals())

    def _add_closed(self, still_open: Iterable[int]) -> None:
        for inode in self._peers.keys() - set(still_open):
            peer, last = self._peers.pop(inode), self._open.get(inode)
            if last is not None:
                sent, received = self._closed.get(peer, (0, 0))
                self._closed[peer] = sent + last.sent, received + last.received

    def _totals(self) -> Iterator[PeerTraffic]:
        by_peer: dict[str, list[Info]] = {peer: [] for peer in self._closed}
        for inode, peer in self._peers.items():  # the driver has a peer for each stage
            by_peer.setdefault(peer, []).append(self._open[inode])
        for peer, infos in by_peer.items():
            sent, received = self._closed.get(peer, (0, 0))
            yield PeerTraffic(
                peer,
                sent + sum(info.sent for info in infos),
                received + sum(info.received for info in infos),
                min((info.round_trip_s for info in infos), default=0.0),
            )


class Connections:
    """Watches all connections of this process and counts their bytes, as long as that is cheap.

    The driver of many stages has connections to each of them, so its looks become rare instead of
    expensive.
    """

    def __init__(self) -> None:
        self._links, self._traffic = Links(), Traffic()
        self._due = -math.inf

    def look(self) -> list[PeerTraffic] | None:
        """Return `Traffic.read`; None if it is too early for another look."""
        now = time.monotonic()
        if now < self._due:
            return None
        began = time.thread_time()
        found = self._traffic.read(self._links.watch())
        self._due = now + min((time.thread_time() - began) / LOOK_SHARE, LOOK_SECONDS)
        return found


def is_of_family(inode: int, parent: int, likely: int = 0) -> bool:
    """Return whether a process, or a child of it, has a socket.

    Args:
        likely: the process to look at first; the driver of many stages has many children.
    """
    if likely and parent in (likely, _parent(likely)) and has_socket(likely, inode):
        return True
    return _owner(inode, [parent, *_children(parent)]) is not None


def is_free(inode: int) -> bool:
    """Return whether a process of this user that is confined no more than we are has a socket.

    A connection's user does not prove which program opened it: code of jobs runs as the same user,
    confined to its files but free to open connections on its host. A socket whose owner we cannot
    see, as from another container, counts as confined.
    """
    pid = _owner(inode, _processes_of_this_user())
    if pid is None:
        return False
    # If this process itself runs in a container that filters calls, so do its neighbours.
    own = _confinement_level(os.getpid())
    return all(theirs <= ours for theirs, ours in zip(_confinement_level(pid), own, strict=True))


def has_socket(pid: int, inode: int) -> bool:
    """Return whether process `pid` has the socket with number `inode`."""
    with contextlib.suppress(OSError):  # it has ended
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(entry.path) == f"socket:[{inode}]":
                    return True
    return False


def _owner(inode: int, pids: Iterable[int]) -> int | None:
    return next((pid for pid in pids if has_socket(pid, inode)), None)


def _parent(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    return int(_kernel_status(pid).get("PPid", "0"))


def _children(parent: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(OSError):
                yield from map(int, (thread / "children").read_text().split())


def _processes_of_this_user() -> Iterator[int]:
    """Newest first: these are the likeliest to have opened a connection just now."""
    processes = (entry for entry in os.scandir("/proc") if entry.name.isdecimal())
    for entry in sorted(processes, key=lambda entry: -int(entry.name)):
        with contextlib.suppress(OSError):  # it has ended
            if entry.stat().st_uid == os.geteuid():
                yield int(entry.name)


def _confinement_level(pid: int) -> list[int]:
    """The values of _CONFINEMENT_MARKS; the highest possible if the process has ended."""
    if not (status := _kernel_status(pid)):
        return [2**31] * len(_CONFINEMENT_MARKS)
    return [int(status.get(mark, "0")) for mark in _CONFINEMENT_MARKS]


def _kernel_status(pid: int) -> dict[str, str]:
    """Return the fields of /proc/PID/status; none if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(errors="replace")  # its name may be anything
    except OSError:
        return {}
    return dict(row.split(":", 1) for row in text.splitlines() if ":" in row)
