"""Who is at the other end of a loopback connection.

Linux says of every socket whose it is. Servers that use no certificates take calls from their own
user and from root alone.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
from pathlib import Path

_TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))

_ESTABLISHED = "01"


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, or as root."""
    return _owner(connection) in (0, os.geteuid())


def _owner(connection: socket.socket) -> int | None:
    """The user id of the other end, as long as the connection lasts; None where it is not known."""
    ours, theirs = _rows(connection.getsockname()), _rows(connection.getpeername())
    for table, local, remote in zip(_TABLES, theirs, ours, strict=True):
        with contextlib.suppress(OSError), table.open() as rows:  # there may be no IPv6
            for row in rows:
                fields = row.split()
                # One that is closing would show user 0.
                if fields[1:4] == [local, remote, _ESTABLISHED]:
                    return int(fields[7])
    return None


def _rows(address: tuple[str, int] | tuple[str, int, int, int]) -> list[str]:
    """An address as the kernel's tables have it: words of four bytes in the machine's order.

    A client may well reach an IPv4 address through a socket for IPv6.
    """
    host, port = ipaddress.ip_address(address[0].partition("%")[0]), address[1]
    if isinstance(host, ipaddress.IPv4Address):
        mapped = ipaddress.IPv6Address(f"::ffff:{host}")
        return [f"{_words(host.packed)}:{port:04X}", f"{_words(mapped.packed)}:{port:04X}"]
    return ["", f"{_words(host.packed)}:{port:04X}"]


def _words(packed: bytes) -> str:
    words = (packed[i : i + 4] for i in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
