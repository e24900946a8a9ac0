"""Capture what Python code prints and logs in this process, and send it to the supervisor.

Captured are prints, warnings, records of `logging` and uncaught exceptions. Logging levels are the
user's business: Python's default, WARNING, unless the code sets another. `logging.basicConfig` has
its effect, except for where records go.

The sender never waits. Each line is one datagram, so threads and forked processes may share the
socket, and a line has reached the supervisor even if the next instruction crashes. If the
supervisor does not keep up, lines are lost and counted. The last line that the rate limit holds
back lies in shared memory: often it is the one that explains why a process has died.
"""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
import re
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TextIO

from rpcmp.process.logging.records import MAX_BYTES, Line, LogRateLimiter, cut

_SIZE = struct.Struct("<I")

MEMORY = _SIZE.size + MAX_BYTES
"""Bytes that both ends share: the size of the packed line that is held, or 0, then the line."""

_LEVEL = re.compile(r"\b(CRITICAL|ERROR|WARNING|INFO|DEBUG)\b")

_LEVEL_CHARACTERS = 100
"""Characters in which a line may name its level."""

LogFunction = Callable[[str, str, str], None]
"""Takes level, logger and text."""


class Sender:
    """Sends log lines to the supervisor, from any thread.

    Args:
        fd: of the socket.
        memory: descriptor of MEMORY bytes.
        step: returns the current optimizer step.
    """

    def __init__(self, fd: int, memory: int, step: Callable[[], int] = lambda: 0) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._memory = mmap.mmap(memory, MEMORY)
        self._step = step
        self._reset()
        # A forked process has none of our threads, and perhaps a lock that one of them held.
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._limiter = LogRateLimiter()
        self._lock = threading.RLock()
        self._busy = False
        self._lost = 0
        self._held: Line | None = None
        self._is_flushing = False

    def log(self, level: str, logger: str, text: str) -> None:
        """Send a line; returns at once."""
        line = Line(level, logger, cut(text), self._step())
        with self._lock:
            if self._busy:  # logged by code that interrupts this very thread, such as a finalizer
                self._send(line)
                return
            self._busy = True
            try:
                passing = self._limiter.take(line, time.monotonic())
                self._send_all(passing)
                if not any(one is line for one in passing):
                    self._hold(self._limiter.newest_held or line)
            finally:
                self._busy = False
            if not self._is_flushing and self._limiter.next_due() is not None:
                self._is_flushing = True
                threading.Thread(target=self._send_due, name="rpcmp-logs", daemon=True).start()

    def flush(self) -> None:
        """Send the lines that are held back, before an exit that is not a crash."""
        with self._lock:
            self._send_all(self._limiter.flush())

    def _send_due(self) -> None:
        pause = threading.Event()
        while True:
            with self._lock:
                self._send_all(self._limiter.due(time.monotonic()))
                due = self._limiter.next_due()
                if due is None:
                    self._is_flushing = False
                    return
            pause.wait(max(0.05, due - time.monotonic()))

    def _send_all(self, lines: list[Line]) -> None:
        for line in lines:
            if self._held is not None and line.text.endswith(self._held.text):
                _SIZE.pack_into(self._memory, 0, 0)
                self._held = None
            self._send(line)

    def _send(self, line: Line) -> None:
        if self._lost:
            text = f"{self._lost:,} lines were lost: the supervisor did not take them in time"
            if not self._try_send(Line("WARNING", "rpcmp.process.logging", text, line.step)):
                self._lost += 1
                self._hold(line)
                return
            self._lost = 0
        if not self._try_send(line):
            self._lost += 1
            self._hold(line)

    def _try_send(self, line: Line) -> bool:
        try:
            self._socket.send(line.pack(), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:  # the supervisor is gone, and so will be this process
            return True
        return True

    def _hold(self, line: Line) -> None:
        """Leave a line where the supervisor finds it if no other follows."""
        data = line.pack()
        with contextlib.suppress(ValueError):  # the memory has been closed
            _SIZE.pack_into(self._memory, 0, 0)
            self._memory[_SIZE.size : _SIZE.size + len(data)] = data
            _SIZE.pack_into(self._memory, 0, len(data))
        self._held = line


def held(memory: mmap.mmap) -> bytes:
    """Return the packed line that a sender has left in memory; empty if there is none."""
    (size,) = _SIZE.unpack_from(memory)
    return bytes(memory[_SIZE.size : _SIZE.size + min(size, MAX_BYTES)])


class Stream(io.TextIOBase):
    """A text stream that logs each line, or several that are written at once. Thread-safe.

    Args:
        name: "stdout" or "stderr".
        log: takes level, name and text.
        original: the stream that it replaces, for code that needs a descriptor, or writes bytes.
    """

    def __init__(self, name: str, log: LogFunction, original: TextIO) -> None:
        self._name = name
        self._log = log
        self._original = original
        self._unfinished = threading.local()  # threads do not mix their unfinished lines

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def buffer(self) -> BinaryIO:
        """For bytes, which are not captured."""
        return self._original.buffer

    def write(self, text: str) -> int:
        """Log all lines that are finished by `text`."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        text_so_far = cut(getattr(self._unfinished, "text", "") + text)
        # A carriage return starts the line anew: each update of a progress bar is a line.
        finished, newline, self._unfinished.text = (
            text_so_far.replace("\r\n", "\n").replace("\r", "\n").rpartition("\n")
        )
        if newline:
            self._log_text(finished)
        return len(text)

    def flush(self) -> None:
        """Log the unfinished line as well: it may be the last before a crash."""
        text, self._unfinished.text = getattr(self._unfinished, "text", ""), ""
        self._log_text(text)

    def fileno(self) -> int:
        """The original's descriptor: a program that is started may write to it."""
        return self._original.fileno()

    def isatty(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def reconfigure(self, **_: Any) -> None:
        """Accepted and ignored; see io.TextIOWrapper."""

    def _log_text(self, text: str) -> None:
        text = text.strip("\n").rstrip()
        if text:
            level = _LEVEL.search(text, 0, _LEVEL_CHARACTERS)
            self._log(level[1] if level else "INFO", self._name, text)


def start(sender: Sender) -> None:
    """Capture everything that this process prints and logs."""
    before = sys.stdout, sys.stderr
    sys.stdout = Stream("stdout", sender.log, sys.stdout)
    sys.stderr = Stream("stderr", sender.log, sys.stderr)
    handler = _ForwardingHandler(sender)
    logging.root.addHandler(handler)
    _replace_stream_handlers(before, handler)
    _wrap_basic_config(handler)
    show_warnings(lambda text: sender.log("WARNING", "py.warnings", text))
    sys.excepthook = _excepthook(sender, "")
    threading.excepthook = lambda args: _excepthook(sender, f"in thread {_name(args.thread)}: ")(
        args.exc_type, args.exc_value, args.exc_traceback
    )


class _ForwardingHandler(logging.Handler):
    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self._sender.log(record.levelname, record.name, text)


def _replace_stream_handlers(streams: tuple[TextIO, TextIO], handler: logging.Handler) -> None:
    """Remove handlers of imported libraries that write to `streams`: lines would come twice."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if not isinstance(logger, logging.Logger):
            continue
        for other in list(logger.handlers):
            if isinstance(other, logging.StreamHandler) and other.stream in streams:
                logger.removeHandler(other)
                if not logger.propagate:
                    logger.addHandler(handler)


def _wrap_basic_config(handler: logging.Handler) -> None:
    """Let `logging.basicConfig` have its effect though `handler` exists, and add no second one."""
    configure = logging.basicConfig

    def basic_config(**options: Any) -> None:
        logging.root.removeHandler(handler)
        try:
            configure(**options)
        finally:
            for other in list(logging.root.handlers):
                if isinstance(other, logging.StreamHandler) and isinstance(other.stream, Stream):
                    logging.root.removeHandler(other)
            logging.root.addHandler(handler)

    logging.basicConfig = basic_config


def warning_text(
    message: Warning | str, category: type[Warning], filename: str, lineno: int
) -> str:
    """Return one line for a warning: "UserWarning: it is deprecated (my_model.py:12)"."""
    return f"{category.__name__}: {message} ({Path(filename).name}:{lineno})"


def show_warnings(show: Callable[[str], None]) -> None:
    """Call `show` with each warning of this process that is not written to a file."""

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is None:
            show(warning_text(message, category, filename, lineno))
        else:
            file.write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.showwarning = showwarning


def _excepthook(sender: Sender, where: str) -> Any:
    def hook(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not issubclass(kind, SystemExit):
            text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
            sender.log("ERROR", "python", f"{where}{text}")

    return hook


def _name(thread: threading.Thread | None) -> str:
    return repr(thread.name) if thread is not None else "unknown"
