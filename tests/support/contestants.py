"""Fake contestants of a benchmark, and helpers that compare contestants."""

from __future__ import annotations

import asyncio

from rpcmp.errors import UnsupportedJobError
from rpcmp.tools.bench import benchmark
from rpcmp.tools.bench.benchmark import ComparisonRounds
from rpcmp.tools.bench.contestants import Contestant, TimedSegment


class Pretender:
    """A contestant that records its requests; its n-th segment takes `seconds` x n per step.

    Both segments of the warm-up count as the first.
    """

    def __init__(
        self, name: str, log: list[str], seconds: float = 1.0, drift: float = 0.0, why: str = ""
    ) -> None:
        self.name = name
        self.settings: dict[str, str | int] = {}
        self.pids: list[int] = []
        self._log, self._seconds, self._drift, self._why = log, seconds, drift, why
        self._segments = self._steps = 0

    async def start(self) -> None:
        self._log.append(f"start {self.name}")
        if self._why:
            raise UnsupportedJobError(self._why)
        self.settings["max_in_flight"] = 5

    async def run(self, steps: int) -> TimedSegment:
        self._log.append(f"run {self.name}")
        self._segments += self._segments != 1 or self._steps > 1
        first, self._steps = self._steps + 1, self._steps + steps
        losses = [1 / step + self._drift for step in range(first, self._steps + 1)]
        return TimedSegment(self._seconds * self._segments, losses)

    async def close(self) -> None:
        self._log.append(f"close {self.name}")


def compare(*contestants: Contestant, pairs: int = 3) -> ComparisonRounds:
    return asyncio.run(benchmark.compare(contestants, pairs, 2, lambda what, left: None))
