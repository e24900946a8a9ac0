"""A job of one generation that trains a few steps on each call, so that they can be measured.

`rehearse` is the shortest use of it: what the first steps of a run will be like.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.errors import DrainingError, JobError
from rpcmp.job.generation import Generation
from rpcmp.job.server_pool import ServerPool
from rpcmp.observability.events import StepEvent
from rpcmp.pipelining.calibration import MeasuredSteps, summarize
from rpcmp.pipelining.simulation import SharedCores
from rpcmp.process.fork_client import Forks

ENDLESS = 10**9
"""Steps of the job; the caller decides how many are done."""


@dataclass(frozen=True)
class Segment:
    """Consecutive steps, timed by the driver process. All times are means in seconds per step.

    Attributes:
        seconds: wall clock, until the last stage has stepped its optimizer.
        cpu_seconds: CPU time of the driver process.
        losses: the mini-batch's loss in each step.
        steps: the events of them.
        shared: the cores that stages share.
    """

    seconds: float
    cpu_seconds: float
    losses: list[float]
    steps: list[StepEvent]
    shared: list[SharedCores]

    @property
    def busy_seconds(self) -> Mapping[str, float]:
        """The time that each worker computes, by its label."""
        busy: defaultdict[str, float] = defaultdict(float)
        for step in self.steps:
            for label, kinds in step.busy_seconds.items():
                busy[label] += sum(kinds.values()) / len(self.steps)
        return busy


class Segments:
    """A job that trains a few steps on each call and blocks in between, so that it can be measured.

    Args:
        settings: the schedules that it may change to, besides the config's own.
        takes_snapshots: whether it keeps them as a run does, though it never recovers.
    """

    def __init__(
        self,
        config: Config,
        connect: Sequence[str] | None = None,
        settings: Sequence[ScheduleOptions] = (),
        forks: Forks | None = None,
        takes_snapshots: bool = False,
    ) -> None:
        endless = {"steps": ENDLESS, "epochs": None, "checkpoint": None}
        own = config if takes_snapshots else config.without_recovery()
        self._config = own.model_copy(update=endless)
        self._pool = ServerPool(config, connect, forks=forks)
        self._settings = settings
        self._started: Generation | None = None

    @property
    def _generation(self) -> Generation:
        if self._started is None:
            raise JobError("these segments have not been started")
        return self._started

    async def start(self) -> None:
        await self._pool.open()
        self._started = Generation(self._config, self._pool, settings=self._settings)
        await self._started.start()
        self._started.send({"op": "segments"})

    def change_to(self, setting: ScheduleOptions) -> None:
        self._generation.send({"op": "reschedule", "setting": setting.model_dump()})

    async def run(self, steps: int, loads_ahead: bool = True) -> Segment:
        """Train the next steps; `loads_ahead`: load their samples before the clock starts."""
        self._generation.send({"op": "segment", "steps": steps, "loads_ahead": loads_ahead})
        events = []
        while True:
            match await self._generation.next_event():
                case StepEvent() as event:
                    events.append(event)
                case {"event": "draining", "stage": stage}:
                    raise DrainingError(f"the server of stage {stage!r} is being stopped")
                case dict() as message if message["event"] == "segment":
                    seconds, cpu_seconds = message["seconds"], message["cpu_seconds"]
                    shared = [SharedCores(*each) for each in message["shared_cores"]]
                    return Segment(
                        seconds / steps, cpu_seconds / steps, message["losses"], events, shared
                    )

    async def close(self) -> None:
        if self._started is not None:
            await self._started.close()
        await self._pool.free(generation=1)


FEWEST_STEPS, MOST_STEPS, BLOCK_SECONDS = 3, 20, 0.75
"""The steps of a block: as many as this time has, within limits. The last block counts."""

SETTLED = 0.9
"""A block that takes at least so much of the time of the one before is not followed by another: the
first steps touch memory and code for the first time, and take up to four times as long."""

MOST_SECONDS = 4.0
"""Of all blocks, after which no other begins."""

MOST_REHEARSED = 2.0
"""Seconds of the longest step that is rehearsed: messages are a small part of longer ones, and the
rehearsal would take as long as several."""


async def rehearse(
    config: Config,
    connect: Sequence[str] | None,
    forks: Forks,
    longest: float = MOST_REHEARSED,
    fewest: int = FEWEST_STEPS,
) -> MeasuredSteps:
    """Train the first steps of a job, which leave nothing behind.

    Args:
        connect: see `balanced`.
        longest: seconds of a step.
        fewest: steps that count, at least.

    Raises:
        JobError: a step takes too long for it.
        RpcmpError: whatever a run may end with, also what this one would not meet: it has no
            schedulers, and more steps than the run if that is short.
    """
    plain = config.without_schedulers().without_evaluation()
    # By its own name: servers remember a run of that name that has ended, for `--resume`.
    plain = plain.model_copy(update={"name": f"{config.name}-rehearsal"})
    segments = Segments(plain, connect, forks=forks, takes_snapshots=config.takes_snapshots)
    try:
        await segments.start()
        # The first step touches memory and code for the first time; it may take twice as long.
        seconds = (await segments.run(1, loads_ahead=False)).seconds / 2
        if seconds <= longest:
            seconds = (await segments.run(1, loads_ahead=False)).seconds
        if seconds > longest:
            raise JobError(f"a step takes {seconds:.1f} s, too long to rehearse some")
        return await _settled(config, segments, seconds, fewest)
    finally:
        await segments.close()


async def _settled(
    config: Config, segments: Segments, seconds: float, fewest: int
) -> MeasuredSteps:
    """Train blocks of steps until they get no faster; `seconds`: of a step, as far as is known."""
    before, ends = math.inf, time.monotonic() + MOST_SECONDS
    while True:
        count = max(fewest, min(int(BLOCK_SECONDS / seconds), MOST_STEPS))
        done = await segments.run(count + 1, loads_ahead=False)
        steps = done.steps[1:]  # the pipeline was empty before the first
        measured = summarize(config, steps, done.shared)
        seconds = measured.step_s
        if seconds >= SETTLED * before or time.monotonic() > ends:
            return measured
        before = seconds
