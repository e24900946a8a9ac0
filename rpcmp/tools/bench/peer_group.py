"""The processes of a benchmark's peer, seen from the benchmark, and the choice of its best way."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from rpcmp.errors import UnsupportedJobError, WorkerDiedError, from_wire
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.process import interpreter
from rpcmp.process.channel import Message
from rpcmp.process.child import Child
from rpcmp.process.interpreter import compute_environment
from rpcmp.tools.bench.cases import Case
from rpcmp.tools.bench.comparison import TimedSegment
from rpcmp.tools.bench.peer_process import Kind, PeerConfig

SETTLE_STEPS = 2
"""Steps of a trial before its clock counts: torch infers shapes and connects in the first one."""

TRIALS = 2
"""Trials of each way, of which the faster one counts: the first way would pay for all first times
otherwise."""

TRIAL_STEPS, TRIAL_SECONDS = 3, 1.0
"""Least length of a trial."""

MEASUREMENTS = 10
"""Measurements of each stage's times."""


class Processes:
    """Processes of one kind that do the same at the same time."""

    def __init__(self, kind: Kind, case: Case, threads: Sequence[int]) -> None:
        self._kind = kind
        self._case = case
        self._threads = threads
        self._children: list[Child] = []
        self._messages: list[AsyncIterator[Message]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    async def spawn(self) -> None:
        """Start them; they go on importing torch after this returns."""
        self._folder = tempfile.TemporaryDirectory(prefix="rpcmp-bench-")
        store = Path(self._folder.name) / "store"
        for rank, threads in enumerate(self._threads):
            environment = {**compute_environment(threads), "GLOO_SOCKET_IFNAME": "lo"}
            child = await Child.spawn("rpcmp.tools.bench.peer_process", environment)
            self._children.append(child)
            self._messages.append(child.messages())
            child.send(self._config(rank, store).model_dump(mode="json"))

    async def ask(self, **message: str | int) -> list[Message]:
        for child in self._children:
            child.send(message)
        return await asyncio.gather(*map(self._answer, range(len(self._children))))

    async def build(self, way: str) -> None:
        """Have them build the model anew.

        Raises:
            UnsupportedJobError: it cannot be trained in this way.
        """
        for answer in await self.ask(op="build", way=way):
            if answer["event"] == "refused":
                raise UnsupportedJobError(answer["reason"])

    async def close(self) -> None:
        await asyncio.gather(*(child.kill() for child in self._children))
        if self._folder is not None:
            self._folder.cleanup()

    async def _answer(self, rank: int) -> Message:
        async for message in self._messages[rank]:
            if message["event"] == "error":
                raise from_wire(message["error"])
            return message
        how = interpreter.describe_exit(self._children[rank].exit_code)
        raise WorkerDiedError(f"{self._kind}: the process of rank {rank} {how}")

    def _config(self, rank: int, store: Path) -> PeerConfig:
        return PeerConfig(
            kind=self._kind,
            config=self._case.config,
            halves=self._case.halves,
            folder="" if self._case.is_frozen else str(self._case.config.folder),
            rank=rank,
            world_size=len(self._threads),
            store=str(store),
        )


class PeerGroup:
    """A contestant other than rpcmp.

    Args:
        name: shown in the table.
        processes: not started yet.
        setting: what the ways differ in, such as "schedule".
        ways: ways to train; `start` finds the fastest.
        settings: other settings to show.
    """

    def __init__(
        self,
        name: str,
        processes: Processes,
        setting: str,
        ways: list[str],
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        self.name = name
        self.settings: dict[str, str | int] = dict(settings or {})
        self._processes = processes
        self._setting = setting
        self._ways = ways

    async def start(self) -> None:
        """Try every way for a few steps, and build the model for the fastest; see Contestant."""
        await self._processes.spawn()
        best = await self._best_way()
        self.settings[self._setting] = best
        await self._processes.build(best)

    async def run(self, steps: int) -> TimedSegment:
        answers = await self._processes.ask(op="run", steps=steps)
        start, end = min(a["begin"] for a in answers), max(a["end"] for a in answers)
        losses = next(a["losses"] for a in answers if a["losses"])
        return TimedSegment((end - start) / 1e9 / steps, losses)

    async def close(self) -> None:
        await self._processes.close()

    async def _best_way(self) -> str:
        if len(self._ways) == 1:
            return self._ways[0]
        seconds: dict[str, float] = {}
        refused: dict[str, str] = {}
        for way in self._ways * TRIALS:
            try:
                seconds[way] = min(await self._try_way(way), seconds.get(way, math.inf))
            except UnsupportedJobError as error:
                refused[way] = str(error)
        if not seconds:
            raise UnsupportedJobError("; ".join(f"{way}: {why}" for way, why in refused.items()))
        return min(seconds, key=seconds.__getitem__)

    async def _try_way(self, way: str) -> float:
        await self._processes.build(way)
        settling = await self.run(SETTLE_STEPS)
        steps = max(TRIAL_STEPS, math.ceil(TRIAL_SECONDS / settling.seconds_per_step))
        return (await self.run(steps)).seconds_per_step


async def stage_times(case: Case) -> list[ActionTimes]:
    """Return every stage's nominal times, or measure them while nothing else runs.

    Raises:
        UnsupportedJobError: the stages are not a chain.
    """
    if case.nominal is not None:
        return [case.nominal] * case.num_stages
    threads = max(case.config.stage(index).threads for index in range(case.num_stages))
    processes = Processes("stage-times", case, [threads])
    try:
        await processes.spawn()
        await processes.build("alone")
        (answer,) = await processes.ask(op="run", steps=MEASUREMENTS)
    finally:
        await processes.close()
    return [ActionTimes(*times) for times in answer["stages"]]
