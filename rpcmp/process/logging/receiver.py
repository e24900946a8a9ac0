"""The supervisor's end of a child's log.

The supervisor's end of a confined child's standard output and error.

What C code and other programs write there would else go to the supervisor's own terminal or log
file, which a confined process must not have: it could read what is typed, send a terminal commands,
or cut off the file. So it has a pipe, and what comes out of it is lines like all others.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import mmap
import os
import socket
import sys
import time
from collections.abc import Callable

from rpcmp.process import descriptors
from rpcmp.process.logging.capture import Stream
from rpcmp.process.logging.rate_limit import LogRateLimiter
from rpcmp.process.logging.records import MAX_BYTES, Line, unpack
from rpcmp.process.logging.sender import MEMORY, held

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
        self._memory_fd = descriptors.memory("rpcmp-log", MEMORY)
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


READ_BYTES = 64 * 1024
"""Bytes that are read before others have their turn on the event loop."""

LAST = 1024 * 1024
"""Bytes that are read at the end, where somebody may still write."""


class Output:
    """Hears what one child writes. Closed by `close`, after the child has ended.

    Args:
        hear: told of each line, in order.
    """

    def __init__(self, hear: Callable[[Line], None]) -> None:
        self._hear = hear
        self._fold = LogRateLimiter()
        self._lines = Stream("stderr", self._tell, sys.stderr)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ours, self._theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def fd(self) -> int:
        """What the child needs: where it writes to."""
        return self._theirs

    def begin(self) -> None:
        """Hear from now on; the child has inherited `fd`."""
        self._close_theirs()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)

    def close(self) -> None:
        """Hear the rest; does nothing the second time."""
        if self._ours < 0:
            return
        self._close_theirs()
        for _ in range(LAST // READ_BYTES):
            if not self._read():
                break
        self._lines.flush()
        for line in self._fold.flush():
            self._hear(line)
        self._stop_reading()
        os.close(self._ours)
        self._ours = -1

    def _close_theirs(self) -> None:
        if self._theirs >= 0:
            os.close(self._theirs)
            self._theirs = -1

    def _read(self) -> bool:
        """Hear some; whether there may be more."""
        try:
            data = os.read(self._ours, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:  # all who could write have ended
            self._stop_reading()
            return False
        for line in self._decoder.decode(data).splitlines(keepends=True):
            self._lines.write(line)  # one by one, so that those that are alike are counted
        return True

    def _stop_reading(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._ours)

    def _tell(self, level: str, name: str, text: str) -> None:
        for line in self._fold.take(Line(level, name, text), time.monotonic()):
            self._hear(line)
