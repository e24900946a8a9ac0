"""The supervisor's end of a child's log, and of a confined child's standard output and error.

C code and other programs write to the descriptors of standard output and error, which are the
supervisor's own terminal or log file. A confined process must not have these: it could read what is
typed, send a terminal commands, or truncate the file. So it gets a pipe, and its output becomes
log lines too.
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

from rpcmp.process import resources
from rpcmp.process.logging.capture import MEMORY, Stream, held
from rpcmp.process.logging.records import MAX_BYTES, Line, LogRateLimiter, unpack

LineHandler = Callable[[Line], None]

LINES_PER_TURN = 64
"""Lines that are read before the event loop runs other callbacks."""

MAX_TURNS = 64
"""How often so many are read by `receive_pending`, while the child may go on logging."""

BUFFER = 4 * 2**20
"""Bytes that may be in flight, if the system allows it."""

READ_BYTES = 64 * 1024
"""Bytes of output that are read before the event loop runs other callbacks."""

LAST_BYTES = 1024 * 1024
"""Bytes of output that are read on closing, while a process may still write."""


class Receiver:
    """Receives one child's log lines. Closed by `close`, after the child has ended."""

    def __init__(self, on_line: LineHandler) -> None:
        self._on_line = on_line
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        self._ours.setblocking(False)
        self._memory_fd = resources.shared_memory("rpcmp-log", MEMORY)
        self._memory = mmap.mmap(self._memory_fd, MEMORY)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = True

    @property
    def fds(self) -> tuple[int, int]:
        return self._theirs.fileno(), self._memory_fd

    def start(self) -> None:
        """Start receiving; the child has inherited `fds`."""
        self._close_theirs()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)

    def receive_pending(self) -> None:
        """Handle the lines that have arrived so far."""
        for _ in range(MAX_TURNS):
            if not self._open or not self._read():
                return

    def close(self) -> None:
        """Handle the remaining lines, those held back included. Idempotent."""
        if not self._open:
            return
        self.receive_pending()
        if data := held(self._memory):
            self._unpack(data)
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
        """Handle some lines; return whether there may be more."""
        for _ in range(LINES_PER_TURN):
            try:
                data = self._ours.recv(MAX_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:  # all processes that had the socket have ended
                if self._loop is not None:
                    self._loop.remove_reader(self._ours)
                return False
            self._unpack(data)
        return True

    def _unpack(self, data: bytes) -> None:
        with contextlib.suppress(ValueError):  # not a line: the child's memory is corrupt
            self._on_line(unpack(data))


class Output:
    """Receives a child's writes to descriptors. Closed by `close`, after the child has ended."""

    def __init__(self, on_line: LineHandler) -> None:
        self._on_line = on_line
        self._limiter = LogRateLimiter()
        self._lines = Stream("stderr", self._log, sys.stderr)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ours, self._theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def fd(self) -> int:
        """Descriptor for the child to write to."""
        return self._theirs

    def start(self) -> None:
        """Start receiving; the child has inherited `fd`."""
        self._close_theirs()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)

    def close(self) -> None:
        """Handle the remaining output. Idempotent."""
        if self._ours < 0:
            return
        self._close_theirs()
        for _ in range(LAST_BYTES // READ_BYTES):
            if not self._read():
                break
        self._lines.flush()
        for line in self._limiter.flush():
            self._on_line(line)
        self._stop_reading()
        os.close(self._ours)
        self._ours = -1

    def _close_theirs(self) -> None:
        if self._theirs >= 0:
            os.close(self._theirs)
            self._theirs = -1

    def _read(self) -> bool:
        """Handle some output; return whether there may be more."""
        try:
            data = os.read(self._ours, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:  # all processes that had the pipe have ended
            self._stop_reading()
            return False
        for line in self._decoder.decode(data).splitlines(keepends=True):
            self._lines.write(line)  # one by one, so that similar lines are counted
        return True

    def _stop_reading(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._ours)

    def _log(self, level: str, name: str, text: str) -> None:
        for line in self._limiter.take(Line(level, name, text), time.monotonic()):
            self._on_line(line)
