"""One case from begin to end: the bound, the rounds, the check that all train the same.

Who is compared: ours, and the peers by name.

Ours: the same job by the way of `rpcmp drive`, on stage servers of this machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rpcmp.errors import ConfigError, UnsupportedJobError
from rpcmp.job.segments import Segments
from rpcmp.tools.bench import comparison
from rpcmp.tools.bench.cases import Case
from rpcmp.tools.bench.comparison import ContestantTimes, Progress
from rpcmp.tools.bench.contestant import Contestant, TimedSegment, TimeLimits
from rpcmp.tools.bench.peers.group import PeerGroup, Processes, stage_times
from rpcmp.tools.bench.peers.trainers import ONE_PROCESS_WAYS
from rpcmp.tools.bench.statistics import Bound, estimate, is_telling


class OwnPipeline:
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

    async def run(self, steps: int) -> TimedSegment:
        """See Contestant. Ends when the last stage has stepped its optimizer."""
        if self._running is None:
            raise RuntimeError("not started")
        done = await self._running.run(steps)
        return TimedSegment(done.seconds, done.losses, done.cpu_seconds)

    async def close(self) -> None:
        """See Contestant."""
        if self._running is not None:
            await self._running.close()


BEST_SCHEDULES = ["1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]


def _one_thread(case: Case) -> Contestant:
    return _one_process("one-process-1-thread", case, 1)


def _all_threads(case: Case) -> Contestant:
    return _one_process("one-process-all-threads", case, len(os.sched_getaffinity(0)))


def _one_process(name: str, case: Case, threads: int) -> Contestant:
    processes = Processes("one-process", case, [threads])
    return PeerGroup(name, processes, "batch", ONE_PROCESS_WAYS, {"threads": threads})


def _torch_1f1b(case: Case) -> Contestant:
    return _torch("torch-1f1b", case, ["1f1b"])


def _torch_best(case: Case) -> Contestant:
    return _torch("torch-best", case, BEST_SCHEDULES)


def _torch(name: str, case: Case, schedules: list[str]) -> Contestant:
    threads = [case.config.stage(index).threads for index in range(case.num_stages)]
    processes = Processes("torch-pipelining", case, threads)
    return PeerGroup(name, processes, "schedule", schedules)


OURS = "rpcmp"

CONTESTANTS: dict[str, Callable[[Case], Contestant]] = {
    OURS: OwnPipeline,
    "one-process-1-thread": _one_thread,
    "one-process-all-threads": _all_threads,
    "torch-1f1b": _torch_1f1b,
    "torch-best": _torch_best,
}
"""Everybody by name."""


def contestants(case: Case, peers: Sequence[str] | None = None) -> list[Contestant]:
    """Ours, and then the `peers` by name; by default the case's own choice, else everybody.

    Raises:
        ConfigError: there is nobody of that name.
    """
    chosen = peers if peers is not None else case.peers or list(CONTESTANTS)
    for name in (*chosen, OURS):
        if name not in CONTESTANTS:
            raise ConfigError(f"no contestant {name!r}; there are {', '.join(CONTESTANTS)}")
    return [CONTESTANTS[name](case) for name in dict.fromkeys((OURS, *chosen))]


@dataclass(frozen=True)
class BenchmarkResult:
    """What was measured.

    Attributes:
        pairs, steps: rounds, and steps of each contestant in each round.
        bound_s: seconds of a step without a bubble; None where the stages are no chain.
        ours: the first contestant's series.
        peers: the others'.
        notes: what the reader of the figures has to know.
    """

    case: Case
    pairs: int
    steps: int
    bound_s: float | None
    ours: ContestantTimes
    peers: list[ContestantTimes]
    notes: list[str]


async def benchmark(
    case: Case,
    contestants: Sequence[Contestant],
    pairs: int,
    steps: int | None,
    bound: Bound,
    progress: Progress,
    limits: TimeLimits | None = None,
) -> BenchmarkResult:
    """Measure a case.

    Args:
        contestants: ours first; none has been started.
        pairs, steps: see `rounds.compare`.
        bound: the schedule's ideal step.
        progress: called before each measurement.
        limits: see `rounds.compare`.

    Raises:
        StoppedError: the user stopped it before there was anything.
        MismatchError: losses differ in a frozen case.
        UnsupportedJobError: ours cannot run it.
        RpcmpError: a contestant failed.
    """
    notes = list(case.notes)
    limits = limits or TimeLimits()
    progress("stage times", limits.left)
    bound_s = await limits.run(_bound(case, bound, notes), is_needed=True)
    done = await comparison.compare(contestants, pairs, steps, progress, limits)
    notes += [f"without {name}: {why}" for name, why in done.unfit.items()]
    own_name = contestants[0].name
    if own_name in done.unfit:
        raise UnsupportedJobError(f"{own_name}: {done.unfit[own_name]}")
    if case.is_frozen:
        comparison.require_equal_losses(done.series)
    elif difference := comparison.loss_difference(done.series):
        notes.append(f"losses differ (does the model draw random numbers?): {difference}")
    ours, *peers = done.series
    notes += _doubts(len(ours.seconds), limits)
    return BenchmarkResult(case, len(ours.seconds), done.steps, bound_s, ours, peers, notes)


def _doubts(pairs: int, limits: TimeLimits) -> Iterator[str]:
    """What keeps the result from being sure."""
    if limits.is_stopped:
        yield "stopped: this is what there was until then"
    if not is_telling(estimate([1.0] * pairs)):
        yield (
            f"{pairs} round{'s are' if pairs > 1 else ' is'} too few to tell contestants apart: "
            "more --pairs, or a larger --budget, could"
        )


async def _bound(case: Case, bound: Bound, notes: list[str]) -> float | None:
    try:
        return bound(await stage_times(case), case.config.num_microbatches)
    except UnsupportedJobError as error:
        notes.append(f"without a bound: {error}")
        return None
