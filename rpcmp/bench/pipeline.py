"""Ours: the same job by the way of `rpcmp drive`, on stage servers of this machine."""

from __future__ import annotations

from collections.abc import Mapping

from rpcmp.bench.cases import Case
from rpcmp.bench.contestant import Segment
from rpcmp.job.session import Session

ENDLESS = 10**9
"""Steps: as many as somebody asks for."""


class Pipeline:
    """The contestant "rpcmp"."""

    name = "rpcmp"

    def __init__(self, case: Case) -> None:
        endless = case.config.model_copy(update={"steps": ENDLESS, "epochs": None})
        self._config = endless.with_folder(case.config.folder)
        self._running: Session | None = None
        self.driver_cpu_seconds = 0.0

    @property
    def settings(self) -> Mapping[str, str | int]:
        """Its schedule, and how many micro-batches a stage may hold."""
        in_flight = self._config.max_in_flight
        return {
            "schedule": self._config.schedule,
            "max_in_flight": "default" if in_flight is None else in_flight,
        }

    async def start(self) -> None:
        """See Contestant."""
        self._running = Session(self._config)
        await self._running.start()
        self._running.send({"op": "segments"})

    async def run(self, steps: int) -> Segment:
        """See Contestant. Ends when the last stage has stepped its optimizer."""
        self._session.send({"op": "segment", "steps": steps})
        while (event := await self._session.next_event())["event"] != "segment":
            pass
        self.driver_cpu_seconds = event["cpu_seconds"] / steps
        return Segment(event["seconds"] / steps, event["losses"])

    async def close(self) -> None:
        """See Contestant."""
        if self._running is not None:
            await self._running.close()

    @property
    def _session(self) -> Session:
        if self._running is None:
            raise RuntimeError("not started")
        return self._running
