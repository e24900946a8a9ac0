"""The contestants of `rpcmp bench`: rpcmp itself, and its peers with processes of their own.

    benchmark ──job────────> peer       `python -m rpcmp.tools.bench.contestants`
              ──build(way)──>      ──built or refused──> benchmark
              ──run(steps)──>      ──ran───────────────> benchmark

A peer's process builds and trains on request, and blocks in between without a spinning thread, so
that it takes no time from the others; see `peer_trainers.py`.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import pkgutil
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rpcmp.config.importing import explain_error
from rpcmp.errors import (
    ConfigError,
    JobError,
    RpcmpError,
    UnsupportedJobError,
    WorkerDiedError,
    from_wire,
    to_wire,
)
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.process import interpreter
from rpcmp.process.channel import Message, connect_to_supervisor
from rpcmp.process.child import Child
from rpcmp.tools.bench.cases import Case

if TYPE_CHECKING:
    from rpcmp.job.segments import Segments

TRAINERS = "rpcmp.tools.bench.peer_trainers"

SETTLE_STEPS = 2
"""Steps of a trial before its clock counts: torch infers shapes and connects in the first one."""

TRIALS = 2
"""Trials of each way; the faster one counts, since the first trial pays for all first times."""

TRIAL_STEPS, TRIAL_SECONDS = 3, 1.0
"""Least length of a trial."""

MEASUREMENTS = 10
"""Measurements of each stage's times."""

BEST_SCHEDULES = ["1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]


@dataclass(frozen=True)
class TimedSegment:
    """Consecutive training steps, timed by the contestant's own clock.

    Attributes:
        seconds_per_step: from the start of the first step to the end of the last one, divided by
            their number; nothing but training happens between two steps.
        driver_cpu_seconds: CPU time per step of the driver process, if there is one.
    """

    seconds_per_step: float
    losses: list[float]
    driver_cpu_seconds: float | None = None


class Contestant(Protocol):
    """One way to train the job. Each segment continues where the one before it stopped."""

    @property
    def name(self) -> str:
        """Short and unique, such as "torch-1f1b"."""

    @property
    def settings(self) -> Mapping[str, str | int]:
        """Such as {"schedule": "zbv"}; complete once it is started."""

    @property
    def pids(self) -> Sequence[int]:
        """The processes that work for it, besides those that these have started."""

    async def start(self) -> None:
        """Start its processes and choose its best settings; no other contestant runs meanwhile.

        Raises:
            UnsupportedJobError: it cannot run this job.
        """

    async def run(self, steps: int) -> TimedSegment:
        """Train the next `steps` mini-batches."""

    async def close(self) -> None:
        """Stop its processes; also after a failed start."""


class OwnPipeline:
    """The contestant "rpcmp": the job on stage servers here, under the options it starts with."""

    name = "rpcmp"

    def __init__(self, case: Case) -> None:
        options = case.config.options
        self.settings: dict[str, str | int] = {
            "schedule": options.schedule,
            "max_in_flight": options.max_in_flight or "default",
            "microbatches_per_message": options.microbatches_per_message,
        }
        self._config = case.config
        self._segments: Segments | None = None

    @property
    def pids(self) -> Sequence[int]:
        """This process, which is the supervisor of the driver process and starts the servers."""
        return [os.getpid()]

    async def start(self) -> None:
        # Here, since it imports gRPC, which peers' processes do not need.
        from rpcmp.job.segments import Segments

        self._segments = Segments(self._config)
        await self._segments.start()

    async def run(self, steps: int) -> TimedSegment:
        if self._segments is None:
            raise RuntimeError("not started")
        done = await self._segments.run(steps)
        return TimedSegment(done.seconds, done.losses, done.cpu_seconds)

    async def close(self) -> None:
        if self._segments is not None:
            await self._segments.close()


class PeerGroup:
    """A contestant other than rpcmp: processes that do the same at the same time.

    Args:
        trainer: "module:class" of the object that trains in each process.
        job: argument of the class; each process adds its "rank", the "world_size" and the "store",
            the path of the file through which the processes find each other.
        folder: of Python files that the class or the job needs; empty if there are none.
        threads: of each process.
        ways: ways to train, by the name of the setting that differs; `start` finds the fastest.
    """

    def __init__(
        self,
        name: str,
        trainer: str,
        job: Message,
        folder: str,
        threads: Sequence[int],
        ways: Mapping[str, list[str]],
        settings: Mapping[str, str | int] | None = None,
    ) -> None:
        self.name = name
        self.settings: dict[str, str | int] = dict(settings or {})
        self._message = {"name": name, "trainer": trainer, "folder": folder}
        self._job, self._threads = job, threads
        ((self._setting, self._ways),) = ways.items()
        self._children: list[Child] = []
        self._messages: list[AsyncIterator[Message]] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def pids(self) -> Sequence[int]:
        return [child.pid for child in self._children]

    async def start(self) -> None:
        """Try every way for a few steps, and build the model for the fastest; see Contestant."""
        self._folder = tempfile.TemporaryDirectory(prefix="rpcmp-bench-")
        size, store = len(self._threads), str(Path(self._folder.name) / "store")
        for rank, threads in enumerate(self._threads):
            environment = interpreter.compute_environment(threads)
            environment = {**environment, "GLOO_SOCKET_IFNAME": "lo"}
            child = await Child.spawn(__name__, environment, file_access=None)
            self._children.append(child)
            self._messages.append(child.messages())
            place = {"rank": rank, "world_size": size, "store": store}
            child.send({**self._message, "job": {**self._job, **place}})
        self.settings[self._setting] = best = await self._best_way()
        await self._build(best)

    async def run(self, steps: int) -> TimedSegment:
        answers = await self.ask(op="run", steps=steps)
        start, end = min(a["begin"] for a in answers), max(a["end"] for a in answers)
        parts = [answer["losses"] for answer in answers if answer["losses"]]
        losses = [sum(losses) for losses in zip(*parts, strict=True)]
        return TimedSegment((end - start) / 1e9 / steps, losses)

    async def ask(self, **message: str | int) -> list[Message]:
        for child in self._children:
            child.send(message)
        return await asyncio.gather(*map(self._answer, range(len(self._children))))

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
        raise WorkerDiedError(f"{self.name}: the process of rank {rank} {how}")

    async def _build(self, way: str) -> None:
        for answer in await self.ask(op="build", way=way):
            if answer["event"] == "refused":
                raise UnsupportedJobError(answer["reason"])

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
        await self._build(way)
        settling = await self.run(SETTLE_STEPS)
        steps = max(TRIAL_STEPS, math.ceil(TRIAL_SECONDS / settling.seconds_per_step))
        return (await self.run(steps)).seconds_per_step


def peer(
    name: str,
    case: Case,
    trainer: str,
    threads: Sequence[int],
    ways: Mapping[str, list[str]],
    settings: Mapping[str, str | int] | None = None,
) -> PeerGroup:
    """Return a peer whose processes train the case's job with a class of `peer_trainers.py`."""
    both = {"config": case.config, "halves": case.halves}
    job = {key: config.model_dump(mode="json") for key, config in both.items()}
    folder = "" if case.is_frozen else str(case.config.folder)
    return PeerGroup(name, f"{TRAINERS}:{trainer}", job, folder, threads, ways, settings)


def _one_process(name: str, threads: int, case: Case) -> PeerGroup:
    ways = {"batch": ["whole batch", "micro-batches"]}
    return peer(name, case, "OneProcess", [threads], ways, {"threads": threads})


def _torch(name: str, schedules: list[str], case: Case) -> PeerGroup:
    threads = [case.config.stage(index).threads for index in range(case.config.num_stages)]
    return peer(name, case, "TorchRank", threads, {"schedule": schedules})


CONTESTANTS: dict[str, Callable[[Case], Contestant]] = {
    OwnPipeline.name: OwnPipeline,
    "one-process-1-thread": partial(_one_process, "one-process-1-thread", 1),
    "one-process-all-threads": partial(
        _one_process, "one-process-all-threads", len(os.sched_getaffinity(0))
    ),
    "torch-1f1b": partial(_torch, "torch-1f1b", ["1f1b"]),
    "torch-best": partial(_torch, "torch-best", BEST_SCHEDULES),
}


def contestants(case: Case, peers: Sequence[str] | None = None) -> list[Contestant]:
    """Create rpcmp and its `peers` by name; by default the case's own choice, or all of them."""
    chosen = peers if peers is not None else case.peers or list(CONTESTANTS)
    for name in chosen:
        if name not in CONTESTANTS:
            raise ConfigError(f"no contestant {name!r}; there are {', '.join(CONTESTANTS)}")
    return [CONTESTANTS[name](case) for name in dict.fromkeys((OwnPipeline.name, *chosen))]


async def stage_times(case: Case) -> list[ActionTimes]:
    """Return every stage's nominal times, or measure them while nothing else runs.

    Raises:
        UnsupportedJobError: the stages are not a chain.
    """
    if case.nominal is not None:
        return [case.nominal] * case.config.num_stages
    threads = max(case.config.stage(index).threads for index in range(case.config.num_stages))
    clock = peer("stage-times", case, "StageClock", [threads], {"batch": ["micro-batches"]})
    try:
        await clock.start()
        (answer,) = await clock.ask(op="run", steps=MEASUREMENTS)
    finally:
        await clock.close()
    return [ActionTimes(*times) for times in answer["stages"]]


def main() -> None:
    """Serve the benchmark as a peer's process, which ends here."""
    # First of all, and torch is imported after it: a supervisor that dies meanwhile must not leave
    # a process behind.
    channel = connect_to_supervisor().channel
    if (message := channel.receive()) is None:
        return
    try:
        if message["folder"]:
            sys.path.insert(0, message["folder"])
        trainer = pkgutil.resolve_name(message["trainer"])(message["job"])
        while request := channel.receive():
            channel.send(_reply(trainer, request))
    except Exception as error:
        text = f"{message['name']} (rank {message['job']['rank']}): {explain_error(error)}"
        known = error if isinstance(error, RpcmpError) else JobError(text)
        channel.send({"event": "error", "error": to_wire(known)})
    os._exit(0)  # without exit handlers, which wait for other processes that may be gone


def _reply(trainer: Any, request: Message) -> Message:
    if request["op"] == "run":
        return {"event": "ran", **trainer.run(request["steps"])}
    try:
        gc.collect()  # torch's schedules are cycles: the model built before is still in memory
        trainer.build(request["way"])
    except UnsupportedJobError as error:
        return {"event": "refused", "reason": str(error)}
    return {"event": "built"}


if __name__ == "__main__":
    main()
