"""Having all that Python code says in this process go to its supervisor.

Prints, warnings, records of `logging` and exceptions that nobody catches. Which records there are
is the user's business: levels are as Python has them, WARNING unless somebody says otherwise. What
`logging.basicConfig` is asked for holds, but for where it writes.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rpcmp.logs.sender import Sender
from rpcmp.logs.streams import Stream


def begin(sender: Sender) -> None:
    """Capture from now on."""
    before = sys.stdout, sys.stderr
    sys.stdout = Stream("stdout", sender.tell, sys.stdout)
    sys.stderr = Stream("stderr", sender.tell, sys.stderr)
    handler = _Handler(sender)
    logging.root.addHandler(handler)
    _let_go_of(before, handler)
    _keep(handler)
    show_warnings(lambda text: sender.tell("WARNING", "py.warnings", text))
    sys.excepthook = _hook(sender, "")
    threading.excepthook = lambda args: _hook(sender, f"in thread {_name_of(args.thread)}: ")(
        args.exc_type, args.exc_value, args.exc_traceback
    )


class _Handler(logging.Handler):
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
