"""The log of a supervisor on its standard error, in the one format.

Written by a thread of its own: whoever reads standard error may be slow, or not read for a while,
and the event loop that carries a job's tensors must not wait for him.
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
from rpcmp.process.logging.rate_limit import LogRateLimiter
from rpcmp.process.logging.records import (
    Entry,
    Line,
    Unreported,
    as_json,
    as_text,
    cut,
    entry_of,
    number_of,
)

MOST = 10_000
"""Entries that may wait to be written; more are counted and left out."""

PATIENCE = 10.0
"""Seconds for the last entries to be written."""


DUE = "due"
"""Nothing was said, but what flood control has counted has to be told."""

_Waiting = Entry | Line | threading.Event | str | None
"""What the writing thread takes: what was said, who waits until it is written, DUE, or the end."""

_here = threading.local()


@contextlib.contextmanager
def unreported() -> Iterator[None]:
    """Have what this thread says within the block shown, but not reported.

    For whoever hears of all that is reported: each line of his would give him another to hear of.
    """
    before = _is_unreported()
    _here.is_unreported = True
    try:
        yield
    finally:
        _here.is_unreported = before


def _is_unreported() -> bool:
    return getattr(_here, "is_unreported", False)


class RecordSource(NamedTuple):
    """Where a supervisor's own records belong.

    Attributes:
        stage: "driver", "stage 1" or "spare".
        generation: of the group that it works for; 0: none.
        step: optimizer step; 0: none.
    """

    stage: str = ""
    generation: int = 0
    step: int = 0


class Display(logging.Handler):
    """Shows entries and this process's own records. Closed by `finish`.

    Args:
        stream: where to; None: standard error.

    Attributes:
        json: whether each is a JSON object.
        lowest: the name of the lowest level that is shown.
        place: where this process is, for its own records.
        report: told of own records instead; it sees to it that they are shown.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__()
        self.json = False
        self.lowest = "info"
        self.place: Callable[[], RecordSource] = RecordSource
        self.report: Callable[[Entry], None] | None = None
        self._stream = stream or sys.stderr
        self._waiting: queue.SimpleQueue[_Waiting] = queue.SimpleQueue()
        self._left_out = 0
        self._folds: dict[type[Line], LogRateLimiter] = {
            Line: LogRateLimiter(),
            Unreported: LogRateLimiter(),
        }
        self._patience = PATIENCE
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def install(self) -> None:
        """Have it show all records of `logging` in this process, and warnings."""
        logging.root.addHandler(self)
        log = logging.getLogger("py.warnings")
        show_warnings(lambda text: log.warning("%s", text))

    def set(self, as_json: bool, lowest: str) -> None:
        """Choose the format, and the lowest level."""
        self.json, self.lowest = as_json, lowest
        logging.getLogger("rpcmp").setLevel(number_of(lowest))
        logging.root.setLevel(logging.DEBUG if lowest == "debug" else logging.WARNING)

    @property
    def options(self) -> list[str]:
        """What makes the log of another `rpcmp serve` look the same."""
        return [*(["--log-json"] if self.json else []), "--log-level", self.lowest]

    def show(self, entry: Entry) -> None:
        """Show an entry; returns at once."""
        if number_of(entry["level"]) >= number_of(self.lowest):
            self._put(entry)

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
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
        """Have own records reported within the block: whoever looks at the run sees them too."""
        self.report = report
        try:
            yield
        finally:
            self.drain()
            self.report = None

    def drain(self) -> None:
        """Return when all that was said before is written; or after PATIENCE."""
        if self._thread is not None:
            written = threading.Event()
            self._waiting.put(written)
            if not written.wait(self._patience):
                self._patience = 0.0  # nobody reads: once is enough

    def finish(self) -> None:
        """Show the rest, and no more from now on."""
        logging.root.removeHandler(self)
        self.drain()
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join(self._patience)

    def _put(self, said: Entry | Line) -> None:
        if self._waiting.qsize() >= MOST:
            self._left_out += 1
            return
        self._waiting.put(said)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="rpcmp-log", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while (said := self._next()) is not None:
            try:
                self._take(said)
            except (OSError, ValueError):  # nobody reads it any more
                pass
            except Exception:
                traceback.print_exc()
            finally:
                if isinstance(said, threading.Event):
                    said.set()

    def _next(self) -> _Waiting:
        """What was said next, or DUE."""
        due = min((at for fold in self._folds.values() if (at := fold.next_due())), default=None)
        try:
            return self._waiting.get(timeout=due and max(0.0, due - time.monotonic()))
        except queue.Empty:
            return DUE

    def _take(self, said: Entry | Line | threading.Event | str) -> None:
        if isinstance(said, Line):
            self._tell(self._folds[type(said)].take(said, time.monotonic()))
        elif isinstance(said, dict):
            self._write(said)
        else:
            for fold in self._folds.values():
                self._tell(fold.due(time.monotonic()) if said is DUE else fold.flush())

    def _tell(self, lines: list[Line]) -> None:
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
        # On a terminal a progress bar may have put itself in front of it, and has to be asked.
        stream = sys.stderr if self._stream.isatty() else self._stream
        stream.write((as_json(entry) if self.json else as_text(entry)) + "\n")
        stream.flush()


def options() -> list[str]:
    """What gives a server that this process starts a log like this process's."""
    shown = [each for each in logging.root.handlers if isinstance(each, Display)]
    return shown[0].options if shown else []
