"""The log lines of a generation's workers, as their servers pass them on."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable

from rpcmp.process.logging.records import Entry, Line, entry_of
from rpcmp.v1 import control_pb2 as pb


class LogCollector:
    """Passes the log lines of a generation's workers on, in order, and reports gaps.

    A stage server numbers its worker's lines and keeps only the newest ones.
    """

    def __init__(self, generation: int, log: Callable[[Entry], None]) -> None:
        self._numbers: defaultdict[str, int] = defaultdict(int)
        self._generation = generation
        self._log = log
        self._added = asyncio.Condition()

    async def add(self, label: str, lines: Iterable[pb.LogLine]) -> None:
        """Log lines of a worker, and a warning for each gap in their numbers."""
        for line in lines:
            missed = line.number - self._numbers[label] - 1
            if missed > 0:
                self.add_own(label, f"{missed:,} lines are missing here: they were too many")
            self._numbers[label] = line.number
            self._log_line(label, Line(line.level, line.logger, line.text, line.step, line.count))
        async with self._added:
            self._added.notify_all()

    def add_own(self, label: str, text: str, level: str = "WARNING") -> None:
        """Log a line of the driver's about a worker or its server."""
        self._log_line(label, Line(level, "rpcmp.job", text))

    async def wait_for_line(self, label: str, number: int) -> None:
        async with self._added:
            await self._added.wait_for(lambda: self._numbers[label] >= number)

    def _log_line(self, label: str, line: Line) -> None:
        self._log(entry_of(line, label, self._generation))
