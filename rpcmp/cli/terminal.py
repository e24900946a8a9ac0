"""Output on a terminal. Only `echo` here and `Console` in rpcmp.cli.console print.

A run does not depend on its output: it goes on if the output's disk is full, if its pipe has been
closed, and if the terminal is gone.
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
    """Print `text`, made visible first; see click.echo."""
    click.echo(visible(str(text)), err=err, nl=nl)


class Forgiving(io.FileIO):
    """A file that ignores failed writes: what cannot be written is lost.

    Args:
        tell: called with the first failure.

    Attributes:
        failure: the first, if any.
    """

    def __init__(self, fd: int, tell: Callable[[OSError], None]) -> None:
        super().__init__(fd, "w", closefd=False)
        self._tell = tell
        self.failure: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Return how many bytes were written or lost, which may be less than all."""
        try:
            while (written := super().write(data)) is None:  # it was made non-blocking
                select.select([], [self], [])
        except OSError as error:
            if self.failure is None:
                self.failure = error
                self._tell(error)
            return memoryview(data).nbytes
        return written


def forgive(is_a_run: bool) -> Callable[[], bool]:
    """Replace standard output and standard error by streams that never fail.

    Args:
        is_a_run: whether the output only reports on what is done, and is not itself the result.

    Returns:
        A function that returns whether part of the result was lost.
    """

    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)  # else it would be the next socket's, and children write to it
    os.close(fd)

    def tell(error: OSError) -> None:
        if is_a_run or error.errno != errno.EPIPE:  # EPIPE: the reader has closed it on purpose
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
    """Return a forgiving stream and its file; the stream itself and None if it is not a file."""
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
