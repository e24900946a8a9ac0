"""Measure contestants in interleaved rounds: each round runs all of them, and starts with another.

A contestant is a way to train one job, in processes of its own. It is started once, trains some
steps when it is its turn, and blocks in between without a spinning thread, so that it takes no time
from the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rpcmp.errors import MismatchError, UnsupportedJobError

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

Progress = Callable[[str, float], None]
"""Called with what is measured now, and an estimate of the seconds for this and the rest."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class TimedSegment:
    """Consecutive training steps, timed by the contestant's own clock.

    Attributes:
        seconds_per_step: from the start of the first step to the end of the last one, divided by
            their number; between two steps it waits only for what training itself waits for.
        losses: the mini-batch's loss in each step.
        driver_cpu_seconds: mean CPU time of a step in the process that drives the others; None if
            there is no such process.
    """

    seconds_per_step: float
    losses: list[float]
    driver_cpu_seconds: float | None = None


class Contestant(Protocol):
    """One way to train the job. Each segment goes on where the one before it stopped."""

    @property
    def name(self) -> str:
        """Short and unique, such as "torch-1f1b"."""

    @property
    def settings(self) -> Mapping[str, str | int]:
        """Such as {"schedule": "zbv"}; complete once it is started."""

    async def start(self) -> None:
        """Start its processes and choose its best settings; no other contestant runs meanwhile.

        Raises:
            UnsupportedJobError: it cannot run this job.
        """

    async def run(self, steps: int) -> TimedSegment:
        """Train the next `steps` mini-batches."""

    async def close(self) -> None:
        """Stop its processes; also after a failed start."""


class StoppedError(Exception):
    """The user has stopped the measurement, and wants the results so far."""


class OverBudgetError(StoppedError):
    """The budget is spent."""


class TimeLimits:
    """Limits of a measurement: its budget, and a user who wants the results so far.

    The budget is spent from the moment of creation, which must be in a running event loop.

    Args:
        budget: seconds.
        stop: set to stop the measurement at once.
    """

    def __init__(self, budget: float = math.inf, stop: asyncio.Event | None = None) -> None:
        self.budget = budget
        self._deadline = asyncio.get_running_loop().time() + budget
        self._stop = stop or asyncio.Event()

    @property
    def left(self) -> float:
        """Seconds left of the budget; negative once it is overdrawn."""
        return self._deadline - asyncio.get_running_loop().time()

    @property
    def at_most(self) -> float:
        """Estimate of the seconds left if nothing better is known; infinite if overdrawn."""
        return self.left if self.left > 0 else math.inf

    @property
    def is_stopped(self) -> bool:
        return self._stop.is_set()

    async def run(self, work: Awaitable[Item], is_needed: bool = False) -> Item:
        """Return what `work` returns, or cancel it at the limit.

        Args:
            work: the measurement.
            is_needed: there is no result without it, so the budget does not end it.

        Raises:
            StoppedError: the user has stopped the measurement.
            OverBudgetError: the budget was spent first.
        """
        timeout = None if is_needed or math.isinf(self.left) else max(0.0, self.left)
        running, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait(
                [running, stopping], timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if running.done():
                return await running
            raise StoppedError if self.is_stopped else OverBudgetError
        finally:
            stopping.cancel()
            if not running.done():
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


@dataclass(frozen=True)
class ContestantTimes:
    """Measurements of one contestant.

    Attributes:
        seconds: of a step, per round.
        losses: of every step, warm-up included.
        driver_cpu_seconds: of a step, per round, if a process drives the others.
    """

    name: str
    settings: Mapping[str, str | int]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    driver_cpu_seconds: list[float] = field(default_factory=list)

    def add(self, segment: TimedSegment, is_warmup: bool) -> None:
        """Add a segment; a warm-up's losses count, its time does not."""
        self.losses.extend(segment.losses)
        if not is_warmup:
            self.seconds.append(segment.seconds_per_step)
            if segment.driver_cpu_seconds is not None:
                self.driver_cpu_seconds.append(segment.driver_cpu_seconds)

    def cut(self, rounds: int, steps: int) -> None:
        """Drop the rounds and steps that others have not done."""
        del self.seconds[rounds:], self.driver_cpu_seconds[rounds:], self.losses[steps:]


@dataclass(frozen=True)
class ComparisonRounds:
    """Measurements of all contestants.

    Attributes:
        series: one per contestant that could take part.
        steps: steps per round.
        unsupported: why the others could not take part, by name.
    """

    series: list[ContestantTimes]
    steps: int
    unsupported: dict[str, str]


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
    unsupported: dict[str, str] = {}
    limits = limits or TimeLimits()
    async with _start_all(contestants, unsupported, progress, limits) as started:
        if not started:
            return ComparisonRounds([], 0, unsupported)
        comparison = _Comparison(started, pairs, steps, progress, limits)
        with contextlib.suppress(StoppedError):
            await comparison.run()
    return ComparisonRounds(comparison.whole_rounds(), comparison.steps, unsupported)


class _Comparison:
    """The rounds of contestants that have been started; see `compare`."""

    def __init__(
        self,
        started: Sequence[Contestant],
        pairs: int,
        steps: int | None,
        progress: Progress,
        limits: TimeLimits,
    ) -> None:
        self._contestants, self._pairs, self._steps = started, pairs, steps
        self._progress, self._limits = progress, limits
        self._series = {one.name: ContestantTimes(one.name, one.settings) for one in started}
        self._step_s: dict[str, float] = {}

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
        await self._warm_up()
        self._steps = self.steps
        for number in range(1, self._pairs + 1):
            if number > 1 and self._limits.left < self._cost(self._contestants, self.steps):
                break
            order, what = rotated(self._contestants, number), f"round {number} of {self._pairs}"
            for place, one in enumerate(order):
                pending = self._cost(order[place:], self.steps)
                self._report(f"{what}: {one.name}", pending, self._pairs - number)
                segment = await self._limits.run(one.run(self.steps), is_needed=number == 1)
                self._add(one, segment, is_warmup=False)

    async def _warm_up(self) -> None:
        """Run the first steps, equally many for each; the first one shows how long a step takes."""
        share = self._limits.left * WARMUP_SHARE
        for one in self._contestants:
            self._progress(f"warm-up: {one.name}", self._limits.at_most)
            self._add(one, await self._limits.run(one.run(1), is_needed=True), is_warmup=True)
        steps = WARMUP_STEPS - 1
        if self._cost(self._contestants, steps) > share:
            return
        for place, one in enumerate(self._contestants):
            pending = self._cost(self._contestants[place:], steps)
            self._report(f"warm-up: {one.name}", pending, self._pairs)
            self._add(one, await self._limits.run(one.run(steps), is_needed=True), is_warmup=True)

    def _add(self, one: Contestant, segment: TimedSegment, is_warmup: bool) -> None:
        self._series[one.name].add(segment, is_warmup)
        self._step_s[one.name] = segment.seconds_per_step

    def _report(self, what: str, pending: float, rounds: int) -> None:
        rest = min(rounds * self._cost(self._contestants, self.steps), self._limits.left - pending)
        self._progress(what, pending + max(0.0, rest))

    def _cost(self, contestants: Sequence[Contestant], steps: int) -> float:
        return steps * sum(self._step_s[one.name] for one in contestants)

    def whole_rounds(self) -> list[ContestantTimes]:
        """Return what all contestants have done.

        Raises:
            StoppedError: not one whole round.
        """
        series = list(self._series.values())
        rounds = min((len(one.seconds) for one in series), default=0)
        if series and not rounds:
            raise StoppedError
        for one in series:
            one.cut(rounds, min(len(each.losses) for each in series))
        return series


def _steps(fastest: float, whole: float, budget: float) -> int:
    """Choose the steps per round."""
    wanted = max(MIN_STEPS, round(ROUND_SECONDS / fastest))
    return wanted if whole * wanted <= budget else max(1, int(budget / whole))


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """Return the order of round `number`."""
    start = number % len(items) if items else 0
    return [*items[start:], *items[:start]]


def loss_difference(series: Sequence[ContestantTimes]) -> str | None:
    """Describe where another contestant's losses first differ from the first one's, or None."""
    first = series[0]
    for other in series[1:]:
        pairs = zip(first.losses, other.losses, strict=True)
        for step, (ours, theirs) in enumerate(pairs, start=1):
            if not math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE):
                return f"step {step}: loss {ours} of {first.name}, {theirs} of {other.name}"
    return None


def require_equal_losses(series: Sequence[ContestantTimes]) -> None:
    """Fail if contestants train differently: their times cannot be compared."""
    if difference := loss_difference(series):
        raise MismatchError(f"the contestants do not train the same: {difference}")


@contextlib.asynccontextmanager
async def _start_all(
    contestants: Sequence[Contestant],
    unsupported: dict[str, str],
    progress: Progress,
    limits: TimeLimits,
) -> AsyncIterator[list[Contestant]]:
    started: list[Contestant] = []
    clock = asyncio.get_running_loop().time
    start_time = clock()
    async with contextlib.AsyncExitStack() as stack:
        for number, one in enumerate(contestants):
            usual = (clock() - start_time) / number if number else 0.0
            left = max(limits.left, usual * (len(contestants) - number))
            what = f"starting {one.name} ({number + 1} of {len(contestants)})"
            progress(what, left if left > 0 else math.inf)
            stack.push_async_callback(one.close)
            try:
                await limits.run(one.start(), is_needed=True)
            except UnsupportedJobError as error:
                unsupported[one.name] = str(error)
                await one.close()
            else:
                started.append(one)
        yield started
