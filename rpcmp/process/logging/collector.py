"""The supervisor's side of the log: receive its children's lines, and write all to standard error.

C code and other programs write to the descriptors of standard output and error, which are the
supervisor's own terminal or log file. A confined process must not have these: it could read what is
typed, send a terminal commands, or truncate the file. So it gets a pipe, and its output becomes
log lines too.

A thread of its own writes to standard error, which may be read slowly, or not at all for a while:
the event loop, which carries a job's tensors, must not wait for that.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import mmap
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import replace
from io import FileIO
from typing import TYPE_CHECKING, NamedTuple, TextIO

from rpcmp.process.logging.capture import MEMORY, Stream, held, show_warnings
from rpcmp.process.logging.records import (
    MAX_BYTES,
    Entry,
    Line,
    LogRateLimiter,
    Unreported,
    as_json,
    as_text,
    cut,
    entry_of,
    number_of,
    unpack,
)

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop  # slow to import, and most commands need none

LineHandler = Callable[[Line], None]

LINES_PER_TURN, BYTES_PER_TURN = 64, 64 * 1024
"""Lines, and bytes of output, that are read before the event loop runs other callbacks."""

MAX_TURNS = 64
"""Turns in which `receive_pending` reads, while the child may continue to write."""

BUFFER = 4 * 2**20
"""Bytes that may be in flight, if the system allows it."""

MAX_QUEUED = 10_000
"""Entries that may wait to be written; further ones are counted and left out."""

PATIENCE = 10.0
"""Seconds for the last entries to be written."""

DUE = "due"
"""Queue item: the rate limit has summaries to log."""

_Item = Entry | Line | threading.Event | str | None
"""What the writing thread takes; an event is set once all before it is written, None stops it."""

_is_unreported = ContextVar("is_unreported", default=False)


class _Receiving:
    """Reads `ours` in an event loop; a child inherits `theirs`. `close` it after the child."""

    def __init__(
        self,
        on_line: LineHandler,
        ours: socket.socket | FileIO,
        theirs: Sequence[socket.socket | FileIO],
    ) -> None:
        self._on_line = on_line
        self._end, self._theirs = ours, theirs
        self._loop: AbstractEventLoop | None = None
        self._is_open = True

    @property
    def fds(self) -> list[int]:
        """Descriptors for the child."""
        return [end.fileno() for end in self._theirs]

    def start(self, loop: AbstractEventLoop) -> None:
        """Start to read; the child has inherited `fds`."""
        self._close_theirs()
        self._loop = loop
        loop.add_reader(self._end, self._read)

    def receive_pending(self) -> None:
        """Handle what has arrived so far."""
        for _ in range(MAX_TURNS):
            if not self._is_open or not self._read():
                return

    def close(self) -> None:
        """Handle the rest, lines that are held back included. Idempotent."""
        if self._is_open:
            self._close_theirs()
            self.receive_pending()
            self._flush()
            self._is_open = False
            self._stop_reading()
            self._end.close()

    def _read(self) -> bool:
        """Handle a part of what has arrived; return whether there may be more."""
        raise NotImplementedError

    def _flush(self) -> None:
        raise NotImplementedError

    def _close_theirs(self) -> None:
        for end in self._theirs:
            end.close()

    def _stop_reading(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._end)


class Receiver(_Receiving):
    """Receives one child's log lines."""

    def __init__(self, on_line: LineHandler) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        ours.setblocking(False)
        from rpcmp.process.resources import shared_memory  # imports much that few commands need

        memory = FileIO(shared_memory("rpcmp-log", MEMORY), "r+")
        self._memory = mmap.mmap(memory.fileno(), MEMORY)
        self._socket = ours
        super().__init__(on_line, ours, [theirs, memory])

    def _flush(self) -> None:
        if data := held(self._memory):
            self._unpack(data)
        self._memory.close()

    def _read(self) -> bool:
        for _ in range(LINES_PER_TURN):
            try:
                data = self._socket.recv(MAX_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                data = b""
            if not data:  # all processes that had the socket have ended
                self._stop_reading()
                return False
            self._unpack(data)
        return True

    def _unpack(self, data: bytes) -> None:
        with contextlib.suppress(ValueError):  # not a line: the child's memory is corrupt
            self._on_line(unpack(data))


class Output(_Receiving):
    """Receives a child's writes to descriptors."""

    def __init__(self, on_line: LineHandler) -> None:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        self._pipe = FileIO(ours)
        self._limiter = LogRateLimiter()
        self._lines = Stream("stderr", self._log, sys.stderr)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        super().__init__(on_line, self._pipe, [FileIO(theirs, "w")])

    def _flush(self) -> None:
        self._lines.flush()
        for line in self._limiter.flush():
            self._on_line(line)

    def _read(self) -> bool:
        data = self._pipe.read(BYTES_PER_TURN)
        if data is None:  # nothing has arrived
            return False
        if not data:  # all processes that had the pipe have ended
            self._stop_reading()
            return False
        for line in self._decoder.decode(data).splitlines(keepends=True):
            self._lines.write(line)  # one by one, so that similar lines are counted
        return True

    def _log(self, level: str, name: str, text: str) -> None:
        for line in self._limiter.take(Line(level, name, text), time.monotonic()):
            self._on_line(line)


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """Display what this thread logs within the block, but do not report it.

    For observers of a run: reporting a line that an observer logs would cause another one.
    """
    token = _is_unreported.set(True)
    try:
        yield
    finally:
        _is_unreported.reset(token)


class RecordSource(NamedTuple):
    """The process that a supervisor's own records come from: "driver", "stage 1" or "spare"."""

    stage: str = ""
    generation: int = 0
    step: int = 0


class Display(logging.Handler):
    """Writes entries and this process's own records to standard error. Closed by `finish`.

    Attributes:
        json: whether to write JSON objects.
        lowest: the name of the lowest level that is written.
        source: returns the source of this process's own records.
        report: called with own records instead of writing them; it has them written.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.json = False
        self.lowest = "info"
        self.source: Callable[[], RecordSource] = RecordSource
        self.report: Callable[[Entry], None] | None = None
        self._stream = stream or sys.stderr
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._left_out = 0
        self._limiters: dict[type[Line], LogRateLimiter] = {
            Line: LogRateLimiter(),
            Unreported: LogRateLimiter(),
        }
        self._patience = PATIENCE
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def install(self) -> None:
        """Write all records of `logging` in this process, and its warnings."""
        logging.root.addHandler(self)
        log = logging.getLogger("py.warnings")
        show_warnings(lambda text: log.warning("%s", text))

    def set(self, as_json: bool, lowest: str) -> None:
        self.json, self.lowest = as_json, lowest
        logging.getLogger("rpcmp").setLevel(number_of(lowest))
        logging.root.setLevel(logging.DEBUG if lowest == "debug" else logging.WARNING)

    def show(self, entry: Entry) -> None:
        """Write an entry; returns at once."""
        if number_of(entry["level"]) >= number_of(self.lowest):
            self._put(entry)

    def emit(self, record: logging.LogRecord) -> None:
        if (entry := getattr(record, "entry", None)) is not None:
            self.show(entry)
            return
        try:
            text = cut(self.format(record))
        except Exception:
            self.handleError(record)
        else:
            if record.levelno >= number_of(self.lowest):
                kind = Unreported if _is_unreported.get() else Line
                self._put(kind(record.levelname, record.name, text))

    @contextlib.contextmanager
    def reporting(self, report: Callable[[Entry], None]) -> Iterator[None]:
        """Report own records within the block, so that observers of the run get them too."""
        self.report = report
        try:
            yield
        finally:
            self.drain()
            self.report = None

    def drain(self) -> None:
        """Wait until everything before is written, for at most PATIENCE."""
        if self._thread is not None:
            written = threading.Event()
            self._queue.put(written)
            if not written.wait(self._patience):
                self._patience = 0.0  # standard error is not read: waiting once is enough

    def finish(self) -> None:
        """Write the rest, and stop."""
        logging.root.removeHandler(self)
        self.drain()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join(self._patience)

    def _put(self, item: Entry | Line) -> None:
        if self._queue.qsize() >= MAX_QUEUED:
            self._left_out += 1
            return
        self._queue.put(item)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rpcmp-log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._process(item)
            except (OSError, ValueError):  # standard error is gone
                pass
            except Exception:
                traceback.print_exc()
            finally:
                if isinstance(item, threading.Event):
                    item.set()

    def _next(self) -> _Item:
        times = [limiter.next_due() for limiter in self._limiters.values()]
        due = min((at for at in times if at is not None), default=None)
        try:
            return self._queue.get(timeout=due and max(0.0, due - time.monotonic()))
        except queue.Empty:
            return DUE

    def _process(self, item: Entry | Line | threading.Event | str) -> None:
        if isinstance(item, Line):
            self._log(self._limiters[type(item)].take(item, time.monotonic()))
        elif isinstance(item, dict):
            self._write(item)
        else:
            for limiter in self._limiters.values():
                self._log(limiter.due(time.monotonic()) if item is DUE else limiter.flush())

    def _log(self, lines: list[Line]) -> None:
        for line in lines:
            stage, generation, step = self.source()
            entry = entry_of(replace(line, step=step), stage, generation)
            report = None if isinstance(line, Unreported) else self.report
            (report or self._write)(entry)

    def _write(self, entry: Entry) -> None:
        left_out, self._left_out = self._left_out, 0
        if left_out:
            text = f"{left_out:,} lines were left out: standard error was not read in time"
            self._write(
                entry_of(Line("WARNING", "rpcmp.process.logging", text), *self.source()[:2])
            )
        # On a terminal a progress bar may have replaced sys.stderr to keep itself below the log.
        stream = sys.stderr if self._stream.isatty() else self._stream
        stream.write((as_json(entry) if self.json else as_text(entry)) + "\n")
        stream.flush()


def options() -> list[str]:
    """Return options that give a server which this process starts the same log."""
    for display in logging.root.handlers:
        if isinstance(display, Display):
            return [*(["--log-json"] if display.json else []), "--log-level", display.lowest]
    return []
