"""The supervisor's end of a confined child's standard output and error.

What C code and other programs write there would else go to the supervisor's own terminal or log
file, which a confined process must not have: it could read what is typed, send a terminal commands,
or cut off the file. So it has a pipe, and what comes out of it is lines like all others.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import sys
import time
from collections.abc import Callable

from rpcmp.logs.fold import Fold
from rpcmp.logs.line import Line
from rpcmp.logs.streams import Stream

AT_ONCE = 64 * 1024
"""Bytes that are read before others have their turn on the event loop."""

LAST = 1024 * 1024
"""Bytes that are read at the end, where somebody may still write."""


class Output:
    """Hears what one child writes. Closed by `close`, after the child has ended.

    Args:
        hear: told of each line, in order.
    """

    def __init__(self, hear: Callable[[Line], None]) -> None:
        self._hear = hear
        self._fold = Fold()
        self._lines = Stream("stderr", self._tell, sys.stderr)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ours, self._theirs = os.pipe()
        os.set_blocking(self._ours, False)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def fd(self) -> int:
        """What the child needs: where it writes to."""
        return self._theirs

    def begin(self) -> None:
        """Hear from now on; the child has inherited `fd`."""
        self._close_theirs()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._read)

    def close(self) -> None:
        """Hear the rest; does nothing the second time."""
        if self._ours < 0:
            return
        self._close_theirs()
        for _ in range(LAST // AT_ONCE):
            if not self._read():
                break
        self._lines.flush()
        for line in self._fold.flush():
            self._hear(line)
        self._stop_reading()
        os.close(self._ours)
        self._ours = -1

    def _close_theirs(self) -> None:
        if self._theirs >= 0:
            os.close(self._theirs)
            self._theirs = -1

    def _read(self) -> bool:
        """Hear some; whether there may be more."""
        try:
            data = os.read(self._ours, AT_ONCE)
        except BlockingIOError:
            return False
        if not data:  # all who could write have ended
            self._stop_reading()
            return False
        for line in self._decoder.decode(data).splitlines(keepends=True):
            self._lines.write(line)  # one by one, so that those that are alike are counted
        return True

    def _stop_reading(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._ours)

    def _tell(self, level: str, name: str, text: str) -> None:
        for line in self._fold.take(Line(level, name, text), time.monotonic()):
            self._hear(line)
