"""Lines on a terminal. `echo` here and `Console` in rpcmp.cli.console are the only ways to it.

What is shown is not what is done: a run goes on when its output is on a disk that is full, when
nobody reads the pipe any more, and when the terminal is gone.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import select
import sys
from collections.abc import Callable
from typing import Any, TextIO

import click

from rpcmp.process.logging.records import visible

log = logging.getLogger(__name__)


def echo(text: object = "", err: bool = False, nl: bool = True) -> None:
    """Print `text`, made visible first; see click.echo.

    Args:
        text: an object is printed as its text.
        err: to standard error.
        nl: add a new line.
    """
    click.echo(visible(str(text)), err=err, nl=nl)


class Forgiving(io.FileIO):
    """A descriptor of which nobody hears that it cannot be written; what was to be, is lost.

    Args:
        fd: of the file; it stays open.
        tell: told of the first failure.

    Attributes:
        failure: the first; None: all has been written.
    """

    def __init__(self, fd: int, tell: Callable[[OSError], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._tell = tell
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """See io.RawIOBase: how much was written or lost, which may be less than all."""
        try:
            while (written := super().write(data)) is None:  # somebody made it non-blocking
                select.select([], [self], [])
        except OSError as error:
            if self.failure is None:
                self.failure = error
                self._tell(error)
            return memoryview(data).nbytes
        return written


def forgive(is_a_run: bool) -> Callable[[], bool]:
    """Have standard output and standard error never fail from now on.

    Args:
        is_a_run: whether what is shown tells of what is done, and is not itself what is wanted.

    Returns:
        tells whether something was lost that was wanted.
    """

    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # else it would be the next socket's, and children write to it
    os.close(fd)

    def tell(error: OSError) -> None:
        if is_a_run or error.errno != errno.EPIPE:  # whoever has closed it has had enough
            goes_on = "; what is done goes on" if is_a_run else ""
            text = "standard output cannot be written, and what would stand there is lost: %s%s"
            log.warning(text, error.strerror, goes_on)

    sys.stderr, _ = _forgiving(sys.stderr, lambda error: None)
    sys.stdout, output = _forgiving(sys.stdout, tell)

    def is_lost() -> bool:
        if output is None:
            return False
        sys.stdout.flush()
        failure = output.failure
        return not is_a_run and failure is not None and failure.errno != errno.EPIPE

    return is_lost


def _forgiving(stream: TextIO, tell: Callable[[OSError], None]) -> tuple[TextIO, Forgiving | None]:
    """The same stream, forgiving; None: it has been closed, or is no file."""
    try:
        raw = Forgiving(stream.fileno(), tell)
    except (AttributeError, OSError, ValueError):
        return stream, None
    made = io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=os.isatty(raw.fileno()) or stream is sys.stderr,
    )
    return made, raw
