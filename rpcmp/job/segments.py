"""A job that trains a few steps whenever it is told to, and blocks in between: to be measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from rpcmp.config.schema import Config, ScheduleOptions
from rpcmp.errors import DrainingError, JobError
from rpcmp.job.generation import Generation
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events.definitions import StepEvent
from rpcmp.process.fork_client import Forks

ENDLESS = 10**9
"""Steps: as many as somebody asks for."""


@dataclass(frozen=True)
class Segment:
    """Consecutive steps, timed by the driver process. All times are means in seconds a step.

    Attributes:
        seconds: of the wall clock, until the last stage has stepped its optimizer.
        cpu_seconds: of the driver process.
        busy_seconds: in which each worker computes, by its label.
        losses: the mini-batch's loss in each step.
    """

    seconds: float
    cpu_seconds: float
    busy_seconds: dict[str, float]
    losses: list[float]


class Segments:
    """A group that is started once; the steps of all its segments follow on each other.

    Args:
        config: the job; how long it says to train does not count.
        connect: addresses of running stage servers; see ServerPool.
        settings: what it may change to on the way, besides the config's own.
        forks: where processes come from; see ServerPool.
    """

    def __init__(
        self,
        config: Config,
        connect: Sequence[str] | None = None,
        settings: Sequence[ScheduleOptions] = (),
        forks: Forks | None = None,
    ) -> None:
        endless = config.model_copy(update={"steps": ENDLESS, "epochs": None})
        self._config = endless.without_recovery()
        self._fleet = ServerPool(config, connect, forks=forks)
        self._settings = settings
        self._opened: Generation | None = None

    @property
    def _session(self) -> Generation:
        if self._opened is None:
            raise JobError("these segments have not been started")
        return self._opened

    async def start(self) -> None:
        """Bring the group to life.

        Raises:
            RpcmpError: why it cannot; call `close` all the same.
        """
        await self._fleet.open()
        self._opened = Generation(self._config, self._fleet, settings=self._settings)
        await self._session.start()
        self._session.send({"op": "segments"})

    def change_to(self, setting: ScheduleOptions) -> None:
        """Train the next segments under another setting, one that was given at the start."""
        self._session.send({"op": "reschedule", "setting": setting.model_dump()})

    async def run(self, steps: int) -> Segment:
        """Train the next `steps` steps.

        Raises:
            RpcmpError: the job has failed, or a server is being stopped.
        """
        self._session.send({"op": "segment", "steps": steps})
        busy: defaultdict[str, float] = defaultdict(float)
        while True:
            match await self._session.next_event():
                case StepEvent() as event:
                    for stage, share in event.busy.items():
                        busy[stage] += share * event.step_s / steps
                case {"event": "draining", "stage": stage}:
                    raise DrainingError(f"the server of stage {stage!r} is being stopped")
                case dict() as message if message["event"] == "segment":
                    seconds, cpu_seconds = message["seconds"], message["cpu_seconds"]
                    losses = message["losses"]
                    return Segment(seconds / steps, cpu_seconds / steps, dict(busy), losses)

    async def close(self) -> None:
        """End whatever runs and free every server."""
        if self._opened is not None:
            await self._opened.close()
        await self._fleet.free(generation=1)
