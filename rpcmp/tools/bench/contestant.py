"""What `rpcmp bench` compares: ways to train one job, each in processes of its own.

A contestant is started once, trains a few steps whenever it is its turn, and blocks in between
without a spinning thread, so that it takes nothing from the others.

What ends a measurement before its time: its budget, and a user who wants the results so far.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class TimedSegment:
    """Consecutive training steps, timed by the contestant's own clock.

    Attributes:
        seconds_per_step: from the first step's begin to the last one's end, by their number;
            nothing waits between two steps but for what training itself makes wait.
        losses: the mini-batch's loss in each step.
        driver_cpu_seconds: what a step costs the process that drives the others, on average; None
            where there is none.
    """

    seconds_per_step: float
    losses: list[float]
    driver_cpu_seconds: float | None = None


class Contestant(Protocol):
    """One way to train the job. The steps of all segments follow on each other."""

    @property
    def name(self) -> str:
        """Short, unique among those compared, such as "torch-1f1b"."""

    @property
    def settings(self) -> Mapping[str, str | int]:
        """What it runs with, such as {"schedule": "zbv"}; complete once it is started."""

    async def start(self) -> None:
        """Bring its processes to life and choose what is best for it; nobody else runs meanwhile.

        Raises:
            UnsupportedJobError: it cannot run this job.
        """

    async def run(self, steps: int) -> TimedSegment:
        """Train the next `steps` mini-batches."""

    async def close(self) -> None:
        """End its processes; also after a failed start."""


Item = TypeVar("Item")


class StoppedError(Exception):
    """The user wants the results so far."""


class OverBudgetError(StoppedError):
    """The budget is spent."""


class TimeLimits:
    """A budget that is being spent from now on, and an event that ends everything at once.

    Create it in the event loop whose clock counts.

    Args:
        budget: seconds.
        stop: set when the user wants the results so far.
    """

    def __init__(self, budget: float = math.inf, stop: asyncio.Event | None = None) -> None:
        self.budget = budget
        self._deadline = asyncio.get_running_loop().time() + budget
        self._stop = stop or asyncio.Event()

    @property
    def left(self) -> float:
        """Seconds of the budget; negative once it is overdrawn."""
        return self._deadline - asyncio.get_running_loop().time()

    @property
    def at_most(self) -> float:
        """Seconds that are left while nothing better is known; infinite if overdrawn."""
        return self.left if self.left > 0 else math.inf

    @property
    def is_stopped(self) -> bool:
        """Whether the user has stopped the measurement."""
        return self._stop.is_set()

    async def run(self, work: Awaitable[Item], is_needed: bool = False) -> Item:
        """Return what `work` returns, or cancel it at the limit.

        Args:
            work: what to measure.
            is_needed: the result is of no use without it, so the budget does not end it.

        Raises:
            StoppedError: the user has stopped the measurement.
            OverBudgetError: the budget was spent first.
        """
        timeout = None if is_needed or math.isinf(self.left) else max(0.0, self.left)
        running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait(
                [running, stopping], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if running.done():
                return await running
            raise StoppedError if self.is_stopped else OverBudgetError
        finally:
            stopping.cancel()
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
