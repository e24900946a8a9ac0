"""Ours: the same job by the way of `rpcmp drive`, on stage servers of this machine."""

from __future__ import annotations

from collections.abc import Mapping

from rpcmp.bench.cases import Case
from rpcmp.bench.contestant import Segment
from rpcmp.job.segments import Segments


class Pipeline:
    """The contestant "rpcmp"."""

    name = "rpcmp"

    def __init__(self, case: Case) -> None:
        self._config = case.config
        self._running: Segments | None = None

    @property
    def settings(self) -> Mapping[str, str | int]:
        """Its schedule, and how many micro-batches a stage may hold and a message has."""
        in_flight = self._config.max_in_flight
        return {
            "schedule": self._config.schedule,
            "max_in_flight": "default" if in_flight is None else in_flight,
            "microbatches_per_message": self._config.microbatches_per_message,
        }

    async def start(self) -> None:
        """See Contestant."""
        self._running = Segments(self._config)
        await self._running.start()

    async def run(self, steps: int) -> Segment:
        """See Contestant. Ends when the last stage has stepped its optimizer."""
        if self._running is None:
            raise RuntimeError("not started")
        done = await self._running.run(steps)
        return Segment(done.seconds, done.losses, done.cpu_seconds)

    async def close(self) -> None:
        """See Contestant."""
        if self._running is not None:
            await self._running.close()
