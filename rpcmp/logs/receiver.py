"""The supervisor's end of a child's log."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from collections.abc import Callable

from rpcmp import sealed
from rpcmp.logs.line import MAX_BYTES, Line, unpack
from rpcmp.logs.sender import MEMORY, held

Hear = Callable[[Line], None]

AT_ONCE = 64
"""Lines that are read before others have their turn on the event loop."""

ROUNDS = 64
"""How often so many are read at an end, where somebody may still go on."""

BUFFER = 4 * 2**20
"""Bytes that may be under way, if the system allows so many."""


class Receiver:
    """Hears what one child says. Closed by `close`, after the child has ended.

    Args:
        hear: told of each line, in order.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear = hear
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._ours.setblocking(False)
        self._memory_fd = sealed.memory("rpcmp-log", MEMORY)
        self._memory = mmap.mmap(self._memory_fd, MEMORY)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = True

    @property
    def fds(self) -> tuple[int, int]:
        """What the child needs: its socket and the memory."""
        return self._theirs.fileno(), self._memory_fd

    def begin(self) -> None:
        """Hear from now on; the child has inherited `fds`."""
        self._close_theirs()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)

    def hear_all(self) -> None:
        """Hear now what has been said by now."""
        for _ in range(ROUNDS):
            if not self._open or not self._read():
                return

    def close(self) -> None:
        """Hear the rest, what is held back included; does nothing the second time."""
        if not self._open:
            return
        self.hear_all()
        if data := held(self._memory):
            self._unpacked(data)
        self._open = False
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._ours)
        self._ours.close()
        self._close_theirs()
        self._memory.close()

    def _close_theirs(self) -> None:
        if self._memory_fd >= 0:
            self._theirs.close()
            os.close(self._memory_fd)
            self._memory_fd = -1

    def _read(self) -> bool:
        """Hear some lines; whether there may be more."""
        for _ in range(AT_ONCE):
            try:
                data = self._ours.recv(MAX_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:  # all who could say something have ended
                if self._loop is not None:
                    self._loop.remove_reader(self._ours)
                return False
            self._unpacked(data)
        return True

    def _unpacked(self, data: bytes) -> None:
        with contextlib.suppress(ValueError):  # not one of ours: the child's memory is broken
            self._hear(unpack(data))
