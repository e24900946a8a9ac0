"""What `rpcmp bench` compares: ways to train one job, each in processes of its own.

A contestant is started once, trains a few steps whenever it is its turn, and blocks in between
without a spinning thread, so that it takes nothing from the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Segment:
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
            UnfitError: it cannot run this job.
        """

    async def run(self, steps: int) -> Segment:
        """Train the next `steps` mini-batches."""

    async def close(self) -> None:
        """End its processes; also after a failed start."""
