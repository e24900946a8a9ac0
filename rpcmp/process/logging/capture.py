"""Having all that Python code says in this process go to its supervisor.

Prints, warnings, records of `logging` and exceptions that nobody catches. Which records there are
is the user's business: levels are as Python has them, WARNING unless somebody says otherwise. What
`logging.basicConfig` is asked for holds, but for where it writes.

Standard output and error of a process whose lines go to its supervisor.
"""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TextIO

from rpcmp.process.logging.records import cut
from rpcmp.process.logging.sender import Sender

Tell = Callable[[str, str, str], None]

_LEVEL = re.compile(r"\b(CRITICAL|ERROR|WARNING|INFO|DEBUG)\b")

_LOOKED_AT = 100
"""Characters in which a line may name its level."""


class Stream(io.TextIOBase):
    """Tells of each line, or of several where they are written at once. Any thread may write.

    Args:
        name: "stdout" or "stderr".
        tell: takes level, name and text.
        behind: what was there before; what has to have a descriptor, or bytes, still gets it.
    """

    def __init__(self, name: str, tell: Tell, behind: TextIO) -> None:
        self._name = name
        self._tell = tell
        self._behind = behind
        self._begun = threading.local()  # lines that are not finished: threads do not mix theirs

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """See io.TextIOBase."""
        return "utf-8"

    @property
    def buffer(self) -> BinaryIO:
        """For bytes: not captured."""
        return self._behind.buffer

    def write(self, text: str) -> int:
        """Tell of all lines that are finished with this."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        begun = cut(getattr(self._begun, "text", "") + text)
        # A carriage return begins a line anew: a progress bar's are as many lines as it is shown.
        finished, newline, self._begun.text = (
            begun.replace("\r\n", "\n").replace("\r", "\n").rpartition("\n")
        )
        if newline:
            self._say(finished)
        return len(text)

    def flush(self) -> None:
        """Tell of what has been begun as well: it may be the last that is ever heard."""
        text, self._begun.text = getattr(self._begun, "text", ""), ""
        self._say(text)

    def fileno(self) -> int:
        """Of what was there before: a program that is started may write to it."""
        return self._behind.fileno()

    def isatty(self) -> bool:
        """See io.TextIOBase."""
        return False

    def writable(self) -> bool:
        """See io.TextIOBase."""
        return True

    def reconfigure(self, **_: Any) -> None:
        """Nothing here depends on it."""

    def _say(self, text: str) -> None:
        text = text.strip("\n").rstrip()
        if text:
            named = _LEVEL.search(text, 0, _LOOKED_AT)
            self._tell(named[1] if named else "INFO", self._name, text)


def begin(sender: Sender) -> None:
    """Capture from now on."""
    before = sys.stdout, sys.stderr
    sys.stdout = Stream("stdout", sender.tell, sys.stdout)
    sys.stderr = Stream("stderr", sender.tell, sys.stderr)
    handler = _ForwardingHandler(sender)
    logging.root.addHandler(handler)
    _let_go_of(before, handler)
    _keep(handler)
    show_warnings(lambda text: sender.tell("WARNING", "py.warnings", text))
    sys.excepthook = _hook(sender, "")
    threading.excepthook = lambda args: _hook(sender, f"in thread {_name_of(args.thread)}: ")(
        args.exc_type, args.exc_value, args.exc_traceback
    )


class _ForwardingHandler(logging.Handler):
    def __init__(self, sender: Sender) -> None:
        super().__init__()
        self._sender = sender

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
        else:
            self._sender.tell(record.levelname, record.name, text)


def _let_go_of(streams: tuple[TextIO, TextIO], handler: logging.Handler) -> None:
    """Handlers of libraries that were imported before: what they write would come twice."""
    for logger in list(logging.root.manager.loggerDict.values()):
        if not isinstance(logger, logging.Logger):
            continue
        for other in list(logger.handlers):
            if isinstance(other, logging.StreamHandler) and other.stream in streams:
                logger.removeHandler(other)
                if not logger.propagate:
                    logger.addHandler(handler)


def _keep(handler: logging.Handler) -> None:
    """Let `logging.basicConfig` have its effect though there is a handler, and no second one."""
    configure = logging.basicConfig

    def keeping(**options: Any) -> None:
        logging.root.removeHandler(handler)
        try:
            configure(**options)
        finally:
            for other in list(logging.root.handlers):
                if isinstance(other, logging.StreamHandler) and isinstance(other.stream, Stream):
                    logging.root.removeHandler(other)
            logging.root.addHandler(handler)

    logging.basicConfig = keeping


def warned(message: Warning | str, category: type[Warning], filename: str, lineno: int) -> str:
    """One line for a warning: "UserWarning: it is deprecated (my_model.py:12)"."""
    return f"{category.__name__}: {message} ({Path(filename).name}:{lineno})"


def show_warnings(tell: Callable[[str], None]) -> None:
    """Have `tell` told of this process's warnings, but of those that are written to a file."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is None:
            tell(warned(message, category, filename, lineno))
        else:
            file.write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.showwarning = show


def _hook(sender: Sender, where: str) -> Any:
    def hook(
        kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not issubclass(kind, SystemExit):
            text = "".join(traceback.format_exception(kind, error, trace)).rstrip()
            sender.tell("ERROR", "python", f"{where}{text}")

    return hook


def _name_of(thread: threading.Thread | None) -> str:
    return repr(thread.name) if thread is not None else "unknown"
