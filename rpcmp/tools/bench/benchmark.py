"""`rpcmp bench` for one case: measure all contestants in turns, and compare their step times.

Each round runs every contestant, and starts with another one. Losses are compared too: contestants
that train differently have no times to compare.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from rpcmp.errors import MismatchError, UnsupportedJobError
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.tools.bench.cases import Case
from rpcmp.tools.bench.contestants import Contestant, stage_times
from rpcmp.tools.bench.cpu_usage import CpuMeter, MachineTimes, disturbance
from rpcmp.tools.measurement import (
    Estimate,
    Progress,
    StoppedError,
    TimeLimits,
    estimate,
    is_conclusive,
    paired_ratio,
    rotated,
    spread,
)

WARMUP_STEPS = 5
"""Steps of each contestant before the first round: first touch of memory, connections, caches."""

WARMUP_SHARE = 1 / 6
"""Part of the budget; a warm-up that would take longer is of one step."""

MIN_STEPS = 5
"""Default steps of a round, if the budget is large enough."""

ROUND_SECONDS = 2.0
"""Least time of each contestant's part of a round, so that caches gone cold in the pause and the
first step's start weigh little."""

LOSS_TOLERANCE = 1e-4
"""Relative: each contestant sums over samples in another order."""


@dataclass(frozen=True)
class ContestantTimes:
    """Measurements of one contestant: the times of a step in each round, and all its losses.

    Attributes:
        cpu_seconds: of all processes that work for it, what prepares a round's steps included.
    """

    name: str
    settings: Mapping[str, str | int]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    driver_cpu_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class ComparisonRounds:
    """Measurements of all contestants.

    Attributes:
        times: one per contestant that could take part.
        steps: steps per round.
        unsupported: why the others could not take part, by name.
        disturbance: what else the machine was busy with during the rounds; empty: with little.
    """

    times: list[ContestantTimes]
    steps: int
    unsupported: dict[str, str]
    disturbance: str


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

    @property
    def ratios(self) -> dict[str, Estimate]:
        """Our step time / theirs, by name; and ours / "bound" if there is one."""
        ours = self.ours.seconds
        ratios = {one.name: paired_ratio(ours, one.seconds) for one in self.peers}
        if self.bound_s:
            ratios["bound"] = estimate([seconds / self.bound_s for seconds in ours])
        return ratios

    @property
    def cpu_ratios(self) -> dict[str, Estimate]:
        """Our CPU time / theirs, by name."""
        ours = self.ours.cpu_seconds
        return {
            one.name: paired_ratio(ours, one.cpu_seconds)
            for one in self.peers
            if all(one.cpu_seconds)
        }

    @property
    def driver_cpu_s(self) -> float | None:
        """The driver's CPU time per step; None if no process drives the others."""
        measured = self.ours.driver_cpu_seconds
        return spread(measured).median if measured else None

    def as_json(self) -> dict[str, Any]:
        """Return plain data; times in seconds."""
        everyone = [self.ours, *self.peers]
        return {
            "case": self.case.name,
            "num_stages": self.case.config.num_stages,
            "num_microbatches": self.case.config.num_microbatches,
            "step_s": spread(self.ours.seconds).median,
            "bound_s": self.bound_s,
            "cpu_s": spread(self.ours.cpu_seconds).median,
            "driver_cpu_s": self.driver_cpu_s,
            "peers": {one.name: spread(one.seconds).median for one in self.peers},
            "peers_cpu_s": {one.name: spread(one.cpu_seconds).median for one in self.peers},
            "pairs": self.pairs,
            "steps": self.steps,
            "ratios": {name: asdict(ratio) for name, ratio in self.ratios.items()},
            "cpu_ratios": {name: asdict(ratio) for name, ratio in self.cpu_ratios.items()},
            "spreads": {one.name: asdict(spread(one.seconds)) for one in everyone},
            "settings": {one.name: dict(one.settings) for one in everyone},
            "notes": self.notes,
        }


async def benchmark(
    case: Case,
    contestants: Sequence[Contestant],
    pairs: int,
    steps: int | None,
    progress: Progress,
    limits: TimeLimits,
) -> BenchmarkResult:
    """Measure a case; see `compare` for the arguments. The first contestant is rpcmp.

    Raises:
        StoppedError: stopped before the end of the first round.
        UnsupportedJobError: rpcmp cannot run the job.
    """
    notes = list(case.notes)
    progress("stage times", limits.left)
    bound_s = None
    try:
        stages = await limits.run(stage_times(case), is_needed=True)
        bound_s = fill_then_no_bubble(stages, case.config.num_microbatches)
    except UnsupportedJobError as error:
        notes.append(f"without a bound: {error}")
    done = await compare(contestants, pairs, steps, progress, limits)
    notes += [f"without {name}: {why}" for name, why in done.unsupported.items()]
    own_name = contestants[0].name
    if own_name in done.unsupported:
        raise UnsupportedJobError(f"{own_name}: {done.unsupported[own_name]}")
    if case.is_frozen:
        require_equal_losses(done.times)
    elif difference := loss_difference(done.times):
        notes.append(f"losses differ (does the model draw random numbers?): {difference}")
    if done.disturbance:
        notes.append(done.disturbance)
    if limits.is_stopped:
        notes.append("stopped: these are the results so far")
    ours, *peers = done.times
    rounds = len(ours.seconds)
    if not is_conclusive(estimate(ours.seconds)):
        notes.append(
            f"{rounds} round{'s are' if rounds > 1 else ' is'} too few to tell contestants apart: "
            "more --pairs, or a larger --budget, could"
        )
    return BenchmarkResult(case, rounds, done.steps, bound_s, ours, peers, notes)


async def compare(
    contestants: Sequence[Contestant],
    pairs: int,
    steps: int | None,
    progress: Progress,
    limits: TimeLimits | None = None,
) -> ComparisonRounds:
    """Run `pairs` rounds of `steps` steps, or as many rounds as there is time for, at least one.

    Args:
        contestants: all of them are started, whatever the budget.
        pairs: greatest number of rounds.
        steps: per round; None for as many as the fastest does in ROUND_SECONDS, or fewer if the
            budget is too small.
        progress: called before each measurement.

    Raises:
        StoppedError: stopped before the end of the first round.
    """
    rounds = _RoundRunner(contestants, pairs, steps, progress, limits or TimeLimits())
    async with contextlib.AsyncExitStack() as stack:
        await rounds.start(stack)
        with contextlib.suppress(StoppedError):
            await rounds.run()
    return rounds.result()


class _RoundRunner:
    """The rounds of contestants; see `compare`."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        pairs: int,
        steps: int | None,
        progress: Progress,
        limits: TimeLimits,
    ) -> None:
        self._contestants, self._pairs, self._steps = contestants, pairs, steps
        self._progress, self._limits = progress, limits
        self._unsupported: dict[str, str] = {}
        self._times: dict[str, ContestantTimes] = {}
        self._step_s: dict[str, float] = {}
        self._meter = CpuMeter()
        self._disturbance = ""

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the contestants, which `stack` closes, and drop those that cannot take part."""
        clock, count = asyncio.get_running_loop().time, len(self._contestants)
        start_time = clock()
        started = []
        for number, one in enumerate(self._contestants):
            usual = (clock() - start_time) / number if number else 0.0
            left = max(self._limits.left, usual * (count - number))
            what = f"starting {one.name} ({number + 1} of {count})"
            self._progress(what, left if left > 0 else math.inf)
            stack.push_async_callback(one.close)
            try:
                await self._limits.run(one.start(), is_needed=True)
            except UnsupportedJobError as error:
                self._unsupported[one.name] = str(error)
                await one.close()
            else:
                started.append(one)
                self._times[one.name] = ContestantTimes(one.name, one.settings)
        self._contestants = started

    @property
    def steps(self) -> int:
        """Steps per round: enough to tell, or fewer if all rounds would not fit otherwise."""
        fastest = min(self._step_s.values(), default=math.inf)
        whole = self._pairs * self._cost(self._contestants, 1)
        return self._steps or _steps(fastest, whole, self._limits.left)

    async def run(self) -> None:
        """Run a warm-up and as many rounds as there is time for, at least one.

        Raises:
            StoppedError: a limit was reached in the middle of a round.
        """
        share = self._limits.left * WARMUP_SHARE
        for one in self._contestants:  # the first step shows how long a step takes
            self._progress(f"warm-up: {one.name}", self._limits.at_most)
            await self._measure(one, 1, number=0)
        if self._cost(self._contestants, WARMUP_STEPS - 1) <= share:
            await self._round(0, WARMUP_STEPS - 1)
        self._steps = self.steps
        before = MachineTimes.read(self._meter)
        try:
            for number in range(1, self._pairs + 1):
                if number > 1 and self._limits.left < self._cost(self._contestants, self.steps):
                    break
                await self._round(number, self.steps)
        finally:
            self._disturbance = disturbance(before, MachineTimes.read(self._meter))

    async def _round(self, number: int, steps: int) -> None:
        """Let each contestant train once; round 0 is the warm-up."""
        what = f"round {number} of {self._pairs}" if number else "warm-up"
        order = rotated(self._contestants, number)
        for place, one in enumerate(order):
            pending = self._cost(order[place:], steps)
            later = (self._pairs - number) * self._cost(self._contestants, self.steps)
            rest = max(0.0, min(later, self._limits.left - pending))
            self._progress(f"{what}: {one.name}", pending + rest)
            await self._measure(one, steps, number)

    async def _measure(self, one: Contestant, steps: int, number: int) -> None:
        # Others' processes are idle now. They do not count, though this process has started them.
        without = [pid for other in self._contestants if other is not one for pid in other.pids]
        cpu_before = self._meter.read(one.pids, without)
        segment = await self._limits.run(one.run(steps), is_needed=number <= 1)
        cpu_seconds = max(0.0, self._meter.read(one.pids, without) - cpu_before)
        self._step_s[one.name] = segment.seconds_per_step
        times = self._times[one.name]
        times.losses.extend(segment.losses)
        if number == 0:  # a warm-up's losses count, its time does not
            return
        times.seconds.append(segment.seconds_per_step)
        times.cpu_seconds.append(cpu_seconds / steps)
        if segment.driver_cpu_seconds is not None:
            times.driver_cpu_seconds.append(segment.driver_cpu_seconds)

    def _cost(self, contestants: Sequence[Contestant], steps: int) -> float:
        return steps * sum(self._step_s[one.name] for one in contestants)

    def result(self) -> ComparisonRounds:
        """Return the rounds that all contestants have finished.

        Raises:
            StoppedError: not one whole round.
        """
        times = list(self._times.values())
        rounds = min((len(one.seconds) for one in times), default=0)
        steps = min((len(one.losses) for one in times), default=0)
        if times and not rounds:
            raise StoppedError
        for one in times:
            for series in (one.seconds, one.cpu_seconds, one.driver_cpu_seconds):
                del series[rounds:]
            del one.losses[steps:]
        return ComparisonRounds(times, self.steps, self._unsupported, self._disturbance)


def _steps(fastest: float, whole: float, budget: float) -> int:
    """Choose the steps per round."""
    wanted = max(MIN_STEPS, round(ROUND_SECONDS / fastest))
    if not whole or whole * wanted <= budget:  # no contestant started: no round takes time
        return wanted
    return max(1, int(budget / whole))


def loss_difference(times: Sequence[ContestantTimes]) -> str | None:
    """Describe the first step in which a loss differs from the first contestant's, or None."""
    first = times[0]
    for other in times[1:]:
        pairs = zip(first.losses, other.losses, strict=True)
        for step, (ours, theirs) in enumerate(pairs, start=1):
            if not math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE):
                return f"step {step}: loss {ours} of {first.name}, {theirs} of {other.name}"
    return None


def require_equal_losses(times: Sequence[ContestantTimes]) -> None:
    if difference := loss_difference(times):
        raise MismatchError(f"the contestants do not train the same: {difference}")


def fill_then_no_bubble(stages: Sequence[ActionTimes], num_microbatches: int) -> float:
    """Return the time of a step in which a stage waits for its first micro-batch and never again.

    The slowest stage decides. With equal stages this is what zero-bubble schedules reach:
    (stages - 1) x F + micro-batches x (F + B + W). Transfers and the optimizer take no time.

    The bound is for one step by itself, with one stage per process. If the first stage starts the
    next step while the last one still works, the mean over many steps may be lower. So may
    schedules with two half stages per process, whose pipeline fills in half the time.
    """
    arrivals = accumulate((stage.forward for stage in stages), initial=0.0)
    return max(
        arrival + num_microbatches * stage.total
        for arrival, stage in zip(arrivals, stages, strict=False)
    )
