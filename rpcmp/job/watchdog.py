"""What hangs when nothing moves, though every process is alive: a lock that nobody frees, a loader
that waits for a disk for ever. A slow step is none of that: some stage begins an action now and
then.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from rpcmp.errors import WorkerHungError
from rpcmp.process.activity import Doing
from rpcmp.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rpcmp.job.stages import Stages


WITH_OTHERS = ("join", "sum")
"""Phases that end once all have come to them: in one of these, a stage may wait for who hangs."""


class Watchdog:
    """Watches the driver's progress, and asks the stages when there is none.

    Args:
        seconds: without any progress that count as a hang; 0: nothing does.
        stages: to be asked.
    """

    def __init__(self, seconds: float, stages: Stages) -> None:
        self._seconds = seconds
        self._stages = stages
        self._moved = time.monotonic()
        self._driver: Doing | None = None

    def note(self, doing: Doing) -> None:
        """Hear what the driver process does; one that waits for us is not stuck."""
        if self._driver is None or self._driver[:3] != doing[:3] or not doing.phase:
            self._moved = time.monotonic()
        self._driver = doing

    async def run(self) -> None:
        """Return never.

        Raises:
            WorkerHungError: nothing moves any more; names what does not.
        """
        while True:
            left = self._moved + (self._seconds or float("inf")) - time.monotonic()
            if left > 0:
                await asyncio.sleep(min(left, 3600.0))
                continue
            found = await self._stages.inspect()
            youngest = min((answer.doing.seconds for answer in found.values()), default=0.0)
            if youngest >= self._seconds:
                raise _named(self._driver, found)
            self._moved = time.monotonic() - youngest


def _named(driver: Doing | None, found: dict[str, pb.InspectResponse]) -> WorkerHungError:
    """The stage that has been in the middle of something for the longest time; else the driver.

    One that does something of its own comes before those that may wait for it.
    """
    busy = {stage: answer for stage, answer in found.items() if answer.doing.phase}
    stage, answer = max(
        busy.items(),
        key=lambda item: (item[1].doing.phase not in WITH_OTHERS, item[1].doing.seconds),
        default=("driver", pb.InspectResponse(doing=driver and pb.Doing(**driver._asdict()))),
    )
    doing = answer.doing
    return WorkerHungError(
        stage,
        answer.host,
        0,
        doing.phase,
        doing.step,
        doing.microbatch,
        doing.seconds,
        answer.stacks,
    )
