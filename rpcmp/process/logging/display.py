"""The log of a supervisor on its standard error, in the one format.

A thread of its own writes it: standard error may be read slowly, or not at all for a while, and the
event loop, which carries a job's tensors, must not wait for that.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TextIO

from rpcmp.process.logging.capture import show_warnings
from rpcmp.process.logging.records import (
    Entry,
    Line,
    LogRateLimiter,
    Unreported,
    as_json,
    as_text,
    cut,
    entry_of,
    number_of,
)

MAX_QUEUED = 10_000
"""Entries that may wait to be written; further ones are counted and left out."""

PATIENCE = 10.0
"""Seconds for the last entries to be written."""

DUE = "due"
"""Queue item: the rate limit has summaries to log."""

_Item = Entry | Line | threading.Event | str | None
"""What the writing thread takes; an event is set once all before it is written, None stops it."""

_local = threading.local()


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """Display what this thread logs within the block, but do not report it.

    For observers of a run: reporting a line that an observer logs would cause another one.
    """
    before = _is_unreported()
    _local.is_unreported = True
    try:
        yield
    finally:
        _local.is_unreported = before


def _is_unreported() -> bool:
    return getattr(_local, "is_unreported", False)


class RecordSource(NamedTuple):
    """The process that a supervisor's own records come from.

    Attributes:
        stage: "driver", "stage 1" or "spare".
        generation: of the group that it works for; 0 if there is none.
    """

    stage: str = ""
    generation: int = 0
    step: int = 0


class Display(logging.Handler):
    """Writes entries and this process's own records. Closed by `finish`.

    Args:
        stream: to write to; None for standard error.

    Attributes:
        json: whether to write JSON objects.
        lowest: the name of the lowest level that is written.
        place: returns the source of this process's own records.
        report: called with own records instead of writing them; it has them written.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.json = False
        self.lowest = "info"
        self.place: Callable[[], RecordSource] = RecordSource
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

    @property
    def options(self) -> list[str]:
        """Options that give another `rpcmp serve` the same log."""
        return [*(["--log-json"] if self.json else []), "--log-level", self.lowest]

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
                kind = Unreported if _is_unreported() else Line
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
            stage, generation, step = self.place()
            entry = entry_of(replace(line, step=step), stage, generation)
            report = None if isinstance(line, Unreported) else self.report
            (report or self._write)(entry)

    def _write(self, entry: Entry) -> None:
        left_out, self._left_out = self._left_out, 0
        if left_out:
            text = f"{left_out:,} lines were left out: standard error was not read in time"
            self._write(entry_of(Line("WARNING", "rpcmp.process.logging", text), *self.place()[:2]))
        # On a terminal a progress bar may have replaced sys.stderr to keep itself below the log.
        stream = sys.stderr if self._stream.isatty() else self._stream
        stream.write((as_json(entry) if self.json else as_text(entry)) + "\n")
        stream.flush()


def options() -> list[str]:
    """Return options that give a server which this process starts the same log."""
    displays = [handler for handler in logging.root.handlers if isinstance(handler, Display)]
    return displays[0].options if displays else []
