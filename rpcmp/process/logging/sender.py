"""The end of the line at which a process speaks, and which it never waits for.

Each line is one datagram, so that threads and forked processes share the socket, and what was said
is with the supervisor even if the next instruction crashes. Where the supervisor does not keep up,
lines are lost, and counted. The last line that flood control holds back lies in memory that both
share: often it is the one that tells why a process has died.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from rpcmp.process.logging.rate_limit import LogRateLimiter
from rpcmp.process.logging.records import MAX_BYTES, Line, cut

_SIZE = struct.Struct("<I")

MEMORY = _SIZE.size + MAX_BYTES
"""Bytes that both ends share: the size of a packed line, then the line. Size 0: none is held."""


class Sender:
    """Says lines to the supervisor, from any thread.

    Args:
        line: descriptor of the socket.
        memory: descriptor of MEMORY bytes.
        step: the optimizer step of this moment.
    """

    def __init__(self, line: int, memory: int, step: Callable[[], int] = lambda: 0) -> None:
        self._socket = socket.socket(fileno=line)
        self._socket.setblocking(False)
        self._memory = mmap.mmap(memory, MEMORY)
        self._step = step
        self._begin()
        # A process that is forked has none of our threads, and perhaps a lock that one of them had.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._fold = LogRateLimiter()
        self._lock = threading.RLock()
        self._busy = False
        self._lost = 0
        self._held: Line | None = None
        self._telling = False

    def tell(self, level: str, logger: str, text: str) -> None:
        """Say a line; returns at once."""
        line = Line(level, logger, cut(text), self._step())
        with self._lock:
            if self._busy:  # said by what runs in between, such as a finalizer, in this very thread
                self._send(line)
                return
            self._busy = True
            try:
                passing = self._fold.take(line, time.monotonic())
                self._pass_on(passing)
                if not any(one is line for one in passing):
                    self._hold(self._fold.newest_held or line)
            finally:
                self._busy = False
            if not self._telling and self._fold.next_due() is not None:
                self._telling = True
                threading.Thread(target=self._tell_held, name="rpcmp-logs", daemon=True).start()

    def flush(self) -> None:
        """Say what is held back; before an end that is no crash."""
        with self._lock:
            self._pass_on(self._fold.flush())

    def _tell_held(self) -> None:
        """Say what flood control has counted, when that is due; ends when nothing is held."""
        pause = threading.Event()
        while True:
            with self._lock:
                self._pass_on(self._fold.due(time.monotonic()))
                due = self._fold.next_due()
                if due is None:
                    self._telling = False
                    return
            pause.wait(max(0.05, due - time.monotonic()))

    def _pass_on(self, lines: list[Line]) -> None:
        for line in lines:
            if self._held is not None and line.text.endswith(self._held.text):
                self._let_go()
            self._send(line)

    def _send(self, line: Line) -> None:
        if self._lost:
            text = f"{self._lost:,} lines were lost: the supervisor did not take them in time"
            if not self._sent(Line("WARNING", "rpcmp.process.logging", text, line.step)):
                self._lost += 1
                self._hold(line)
                return
            self._lost = 0
        if not self._sent(line):
            self._lost += 1
            self._hold(line)

    def _sent(self, line: Line) -> bool:
        """Whether there was room for it; nobody being there any more counts as that."""
        try:
            self._socket.send(line.pack(), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:  # the supervisor is gone, and so will be this process
            return True
        return True

    def _hold(self, line: Line) -> None:
        """Leave a line where the supervisor finds it if nothing else is said."""
        data = line.pack()
        with contextlib.suppress(ValueError):  # it has been closed
            _SIZE.pack_into(self._memory, 0, 0)
            self._memory[_SIZE.size : _SIZE.size + len(data)] = data
            _SIZE.pack_into(self._memory, 0, len(data))
        self._held = line

    def _let_go(self) -> None:
        _SIZE.pack_into(self._memory, 0, 0)
        self._held = None


def held(memory: mmap.mmap) -> bytes:
    """The packed line that a sender has left in memory; empty: none."""
    (size,) = _SIZE.unpack_from(memory)
    return bytes(memory[_SIZE.size : _SIZE.size + min(size, MAX_BYTES)])
