"""What the kernel knows of TCP connections that are this process's, by their descriptors.

Not by Python's sockets, which may change the blocking mode of what they are made for.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

ESTABLISHED, LISTEN = 1, 10
"""States; see tcp(7)."""

_LIBC = ctypes.CDLL(None)

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
