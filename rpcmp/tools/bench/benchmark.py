"""`rpcmp bench` for one case: its contestants, the measurement, and the table of results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.table import Table

from rpcmp.errors import ConfigError, UnsupportedJobError
from rpcmp.job.generation import Segments
from rpcmp.tools.bench import comparison
from rpcmp.tools.bench.cases import Case
from rpcmp.tools.bench.comparison import (
    Contestant,
    ContestantTimes,
    Progress,
    TimedSegment,
    TimeLimits,
)
from rpcmp.tools.bench.peer_group import PeerGroup, Processes, stage_times
from rpcmp.tools.bench.statistics import (
    Bound,
    Estimate,
    estimate,
    is_conclusive,
    paired_ratio,
    spread,
)

COLUMNS = ("contestant", "settings", "ms a step", "quartiles", "ours / it", "interval")


class OwnPipeline:
    """The contestant "rpcmp": the job as `rpcmp drive` runs it, on stage servers here."""

    name = "rpcmp"

    def __init__(self, case: Case) -> None:
        self._config = case.config
        self._running: Segments | None = None

    @property
    def settings(self) -> Mapping[str, str | int]:
        in_flight = self._config.max_in_flight
        return {
            "schedule": self._config.schedule,
            "max_in_flight": "default" if in_flight is None else in_flight,
            "microbatches_per_message": self._config.microbatches_per_message,
        }

    async def start(self) -> None:
        self._running = Segments(self._config)
        await self._running.start()

    async def run(self, steps: int) -> TimedSegment:
        if self._running is None:
            raise RuntimeError("not started")
        # Ends when the last stage has stepped its optimizer.
        done = await self._running.run(steps)
        return TimedSegment(done.seconds, done.losses, done.cpu_seconds)

    async def close(self) -> None:
        if self._running is not None:
            await self._running.close()


ONE_PROCESS_WAYS = ["whole batch", "micro-batches"]

BEST_SCHEDULES = ["1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"]


def _one_process(name: str, case: Case, threads: int) -> Contestant:
    processes = Processes("one-process", case, [threads])
    return PeerGroup(name, processes, "batch", ONE_PROCESS_WAYS, {"threads": threads})


def _torch(name: str, case: Case, schedules: list[str]) -> Contestant:
    threads = [case.config.stage(index).threads for index in range(case.num_stages)]
    processes = Processes("torch-pipelining", case, threads)
    return PeerGroup(name, processes, "schedule", schedules)


OURS = "rpcmp"

CONTESTANTS: dict[str, Callable[[Case], Contestant]] = {
    OURS: OwnPipeline,
    "one-process-1-thread": partial(_one_process, "one-process-1-thread", threads=1),
    "one-process-all-threads": partial(
        _one_process, "one-process-all-threads", threads=len(os.sched_getaffinity(0))
    ),
    "torch-1f1b": partial(_torch, "torch-1f1b", schedules=["1f1b"]),
    "torch-best": partial(_torch, "torch-best", schedules=BEST_SCHEDULES),
}


def contestants(case: Case, peers: Sequence[str] | None = None) -> list[Contestant]:
    """Create rpcmp and its `peers` by name; by default the case's own choice, or all of them."""
    chosen = peers if peers is not None else case.peers or list(CONTESTANTS)
    for name in (*chosen, OURS):
        if name not in CONTESTANTS:
            raise ConfigError(f"no contestant {name!r}; there are {', '.join(CONTESTANTS)}")
    return [CONTESTANTS[name](case) for name in dict.fromkeys((OURS, *chosen))]


@dataclass(frozen=True)
class BenchmarkResult:
    """Measurements of a case.

    Attributes:
        pairs, steps: rounds, and steps of each contestant in each round.
        bound_s: seconds of a step without a bubble; None if the stages are not a chain.
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
        contestants: rpcmp first; none has been started.
        pairs, steps, progress, limits: see `comparison.compare`.
        bound: the schedule's ideal step.

    Raises:
        StoppedError: stopped before the end of the first round.
        UnsupportedJobError: rpcmp cannot run the job.
    """
    notes = list(case.notes)
    limits = limits or TimeLimits()
    progress("stage times", limits.left)
    bound_s = await limits.run(_bound(case, bound, notes), is_needed=True)
    done = await comparison.compare(contestants, pairs, steps, progress, limits)
    notes += [f"without {name}: {why}" for name, why in done.unsupported.items()]
    own_name = contestants[0].name
    if own_name in done.unsupported:
        raise UnsupportedJobError(f"{own_name}: {done.unsupported[own_name]}")
    if case.is_frozen:
        comparison.require_equal_losses(done.series)
    elif difference := comparison.loss_difference(done.series):
        notes.append(f"losses differ (does the model draw random numbers?): {difference}")
    ours, *peers = done.series
    notes += _doubts(len(ours.seconds), limits)
    return BenchmarkResult(case, len(ours.seconds), done.steps, bound_s, ours, peers, notes)


def _doubts(pairs: int, limits: TimeLimits) -> Iterator[str]:
    if limits.is_stopped:
        yield "stopped: these are the results so far"
    if not is_conclusive(estimate([1.0] * pairs)):
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


def as_json(result: BenchmarkResult) -> dict[str, Any]:
    """Return the results as plain data; times in seconds, ratios are ours / theirs."""
    everyone = [result.ours, *result.peers]
    return {
        "case": result.case.name,
        "num_stages": result.case.num_stages,
        "num_microbatches": result.case.config.num_microbatches,
        "step_s": spread(result.ours.seconds).median,
        "bound_s": result.bound_s,
        "driver_cpu_s": _driver_cpu(result),
        "peers": {one.name: spread(one.seconds).median for one in result.peers},
        "pairs": result.pairs,
        "steps": result.steps,
        "ratios": {name: asdict(ratio) for name, ratio in paired_ratios(result).items()},
        "spreads": {one.name: asdict(spread(one.seconds)) for one in everyone},
        "settings": {one.name: dict(one.settings) for one in everyone},
        "notes": result.notes,
    }


def paired_ratios(result: BenchmarkResult) -> dict[str, Estimate]:
    """Return ours / theirs by name, and ours / "bound" if there is one."""
    ratios = {one.name: paired_ratio(result.ours.seconds, one.seconds) for one in result.peers}
    if result.bound_s:
        ratios["bound"] = estimate([seconds / result.bound_s for seconds in result.ours.seconds])
    return ratios


def table(result: BenchmarkResult) -> Table:
    """Return a table with a row per contestant and one for the bound."""
    config = result.case.config
    title = (
        f"{result.case.name}: {result.case.num_stages} stages, "
        f"{config.num_microbatches} micro-batches, "
        f"{result.pairs} interleaved pair{'s' * (result.pairs > 1)} of "
        f"{result.steps} step{'s' * (result.steps > 1)}"
    )
    rows = Table(*COLUMNS, title=title, title_justify="left", box=None, header_style="bold")
    ratios = paired_ratios(result)
    rows.add_row(*_measured(result.ours), "", "")
    for one in result.peers:
        rows.add_row(*_measured(one), *_compared(ratios[one.name]))
    if result.bound_s:
        milliseconds = f"{result.bound_s * 1e3:.1f}"
        rows.add_row("bound", "", milliseconds, "", *_compared(ratios["bound"]))
    return rows


def lines(result: BenchmarkResult) -> Iterator[str]:
    """Yield the lines below the table."""
    if (seconds := _driver_cpu(result)) is not None:
        per_microbatch = seconds / result.case.config.num_microbatches
        yield f"driver: {per_microbatch * 1e3:.2f} ms of CPU a micro-batch"
    yield from (f"note: {note}" for note in result.notes)


def _driver_cpu(result: BenchmarkResult) -> float | None:
    measured = result.ours.driver_cpu_seconds
    return spread(measured).median if measured else None


def _measured(one: ContestantTimes) -> tuple[str, ...]:
    times = spread(one.seconds)
    return (
        one.name,
        ", ".join(f"{key} {value}" for key, value in one.settings.items()),
        f"{times.median * 1e3:.1f}",
        f"{times.lower_quartile * 1e3:.1f} to {times.upper_quartile * 1e3:.1f}",
    )


def _compared(ratio: Estimate) -> tuple[str, str]:
    interval = f"{ratio.low:.3f} to {ratio.high:.3f} ({ratio.confidence:.0%})"
    return f"{ratio.median:.3f}", interval
