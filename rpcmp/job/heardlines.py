"""What workers say, as the driver hears it from their servers: in order, and what is missing.

Servers number a worker's lines and keep the newest; a gap says that there were more than that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from rpcmp.logs.entry import Entry, entry_of
from rpcmp.logs.line import Line
from rpcmp.v1 import control_pb2 as pb


class HeardLines:
    """The lines of a generation's workers.

    Args:
        labels: of the workers.
        generation: which group they are in.
        log: told of each line.
    """

    def __init__(
        self, labels: Iterable[str], generation: int, log: Callable[[Entry], None]
    ) -> None:
        self._numbers = dict.fromkeys(labels, 0)
        self._generation = generation
        self._log = log
        self._told = asyncio.Condition()

    async def hear(self, label: str, lines: Iterable[pb.LogLine]) -> None:
        """Tell of what a worker has said, and of how much of it nobody has heard."""
        for line in lines:
            missed = line.number - self._numbers[label] - 1
            if missed > 0:
                text = f"{missed:,} lines are missing here: more were said than could be carried"
                self._tell(label, Line("WARNING", "rpcmp.logs", text))
            self._numbers[label] = line.number
            self._tell(label, Line(line.level, line.logger, line.text, line.step, line.count))
        async with self._told:
            self._told.notify_all()

    async def up_to(self, label: str, number: int) -> None:
        """Return when a worker's line of this number has been told."""
        async with self._told:
            await self._told.wait_for(lambda: self._numbers[label] >= number)

    def _tell(self, label: str, line: Line) -> None:
        self._log(entry_of(line, label, self._generation))
