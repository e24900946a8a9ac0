"""Connections to hosts that may vanish.

TensorPipe opens a connection when it first needs it and never asks again whether anybody is there:
when a cable is pulled, both sides would wait for ever. The kernel can ask, and it is the other
host's kernel that answers: a process that computes for a long time is not cut off, but one is that
for so long reads nothing of what has been sent to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys

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
