"""The last lines that a claim's worker has said, numbered: a watcher is told each of them once."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict

from rpcmp.logs.line import Line
from rpcmp.v1 import control_pb2 as pb

KEPT = 256
"""Lines that a watcher that is behind can still hear of; of others it sees the gap."""

AT_ONCE = 2**18
"""Characters in one message to a watcher; a longer line than that goes alone."""


class LogLines:
    """Lines of one generation, from number 1.

    Attributes:
        newest: the number of the last; 0: there is none.
    """

    def __init__(self) -> None:
        self.newest = 0
        self._lines: deque[pb.LogLine] = deque(maxlen=KEPT)

    def add(self, line: Line) -> None:
        """Note a line."""
        self._lines.append(pb.LogLine(number=self.newest + 1, **asdict(line)))
        self.newest += 1

    def after(self, number: int) -> list[pb.LogLine]:
        """The first of those that came after `number`, as many as go into one message."""
        found: list[pb.LogLine] = []
        size = 0
        for line in self._lines:
            if line.number > number:
                size += len(line.text)
                if found and size > AT_ONCE:
                    break
                found.append(line)
        return found
