"""Where this process listens."""

from __future__ import annotations

import contextlib
import os
import socket

from rpcmp import addresses


def listeners() -> dict[str, str]:
    """The addresses at which this process listens for TCP, by the sockets' identity in the kernel.

    Whatever network they are in: they are found by this process's descriptors.
    """
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:") and (address := _listens_at(int(name))):
                found[link] = address
    return found


def _listens_at(fd: int) -> str:
    """HOST:PORT where a socket listens; empty where it does not, or not for TCP."""
    with socket.socket(fileno=os.dup(fd)) as copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return ""
        host, port, *_ = copy.getsockname()
        return addresses.joined(host, port)
