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
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TextIO

from rpcmp.logs.capture import show_warnings
from rpcmp.logs.entry import Entry, as_json, as_text, entry_of, number_of
from rpcmp.logs.fold import Fold
from rpcmp.logs.line import Line, cut

MOST = 10_000
"""Entries that may wait to be written; more are counted and left out."""

PATIENCE = 10.0
"""Seconds for the last entries to be written."""


class Place(NamedTuple):
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
        self.place: Callable[[], Place] = Place
        self.report: Callable[[Entry], None] | None = None
        self._stream = stream or sys.stderr
        self._waiting: queue.SimpleQueue[Entry | Line | None] = queue.SimpleQueue()
        self._left_out = 0
        self._fold = Fold()
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
                self._put(Line(record.levelname, record.name, text))

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
        thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join(PATIENCE)

    def finish(self) -> None:
        """Show the rest, and no more from now on."""
        logging.root.removeHandler(self)
        self.drain()

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
        try:
            while True:
                said = self._next()
                if said is None:
                    self._tell(self._fold.flush())
                    return
                if isinstance(said, Line):
                    self._tell(self._fold.take(said, time.monotonic()))
                else:
                    self._write(said)
        except (OSError, ValueError):  # nobody reads it any more
            self._waiting = queue.SimpleQueue()

    def _next(self) -> Entry | Line | None:
        """What was said next; what flood control has counted is told meanwhile."""
        while True:
            due = self._fold.next_due()
            wait = None if due is None else max(0.0, due - time.monotonic())
            try:
                return self._waiting.get(timeout=wait)
            except queue.Empty:
                self._tell(self._fold.due(time.monotonic()))

    def _tell(self, lines: list[Line]) -> None:
        for line in lines:
            stage, generation, step = self.place()
            entry = entry_of(replace(line, step=step), stage, generation)
            if self.report is None:
                self._write(entry)
            else:
                self.report(entry)

    def _write(self, entry: Entry) -> None:
        left_out, self._left_out = self._left_out, 0
        if left_out:
            text = f"{left_out:,} lines were left out: standard error was not read in time"
            self._write(entry_of(Line("WARNING", "rpcmp.logs", text), *self.place()[:2]))
        # On a terminal a progress bar may have put itself in front of it, and has to be asked.
        stream = sys.stderr if self._stream.isatty() else self._stream
        stream.write((as_json(entry) if self.json else as_text(entry)) + "\n")
        stream.flush()


def options() -> list[str]:
    """What gives a server that this process starts a log like this process's."""
    shown = [each for each in logging.root.handlers if isinstance(each, Display)]
    return shown[0].options if shown else []
