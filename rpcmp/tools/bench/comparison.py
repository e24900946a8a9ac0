"""Interleaved rounds: each round runs every contestant once, each round beginning with another."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rpcmp.errors import MismatchError, UnsupportedJobError
from rpcmp.tools.bench.contestant import Contestant, StoppedError, TimedSegment, TimeLimits

WARMUP_STEPS = 5
"""Steps of each contestant before the first round: first touch of memory, connections, caches."""

WARMUP_SHARE = 1 / 6
"""Of the budget; a warm-up that would take longer is of one step."""

MIN_STEPS = 5
"""Of a round, where their number is not given and the budget is large enough."""

ROUND_SECONDS = 2.0
"""What everybody's part of a round should take, or more: what is cold after a pause, and the first
step's start, then weigh little."""

LOSS_TOLERANCE = 1e-4
"""Relative. Sums over samples are taken in another order by each contestant."""

Progress = Callable[[str, float], None]
"""Called with what is measured now, and an estimate of the seconds for that and the rest."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class ContestantTimes:
    """What one contestant did.

    Attributes:
        seconds: of a step, in each round.
        losses: of every step, warm-up included.
        driver_cpu_seconds: of a step, in each round, where a process drives the others.
    """

    name: str
    settings: Mapping[str, str | int]
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    driver_cpu_seconds: list[float] = field(default_factory=list)

    def add(self, segment: TimedSegment, is_warmup: bool) -> None:
        """Note a segment; a warm-up's time does not count, its losses do."""
        self.losses.extend(segment.losses)
        if not is_warmup:
            self.seconds.append(segment.seconds_per_step)
            if segment.driver_cpu_seconds is not None:
                self.driver_cpu_seconds.append(segment.driver_cpu_seconds)

    def cut(self, rounds: int, steps: int) -> None:
        """Leave out what others have not done."""
        del self.seconds[rounds:], self.driver_cpu_seconds[rounds:], self.losses[steps:]


@dataclass(frozen=True)
class ComparisonRounds:
    """What was measured.

    Attributes:
        series: everybody's.
        steps: of each in each round.
        unfit: for those who could not take part, why.
    """

    series: list[ContestantTimes]
    steps: int
    unfit: dict[str, str]


async def compare(
    contestants: Sequence[Contestant],
    pairs: int,
    steps: int | None,
    progress: Progress,
    limits: TimeLimits | None = None,
) -> ComparisonRounds:
    """Run `pairs` rounds of `steps` steps, or as many rounds as there is time for, at least one.

    Args:
        contestants: all are started, whatever the budget.
        pairs: the most rounds.
        steps: None for as many as take the fastest ROUND_SECONDS, or as the budget allows.
        progress: called before each measurement.
        limits: end the rounds with what there is.

    Raises:
        RpcmpError: a contestant failed.
        StoppedError: there is nothing yet.
    """
    unfit: dict[str, str] = {}
    limits = limits or TimeLimits()
    async with _started(contestants, unfit, progress, limits) as fit:
        if not fit:
            return ComparisonRounds([], 0, unfit)
        comparison = _Comparison(fit, pairs, steps, progress, limits)
        with contextlib.suppress(StoppedError):
            await comparison.run()
    return ComparisonRounds(comparison.whole_rounds(), comparison.steps, unfit)


class _Comparison:
    """The rounds of contestants that have been started; see `compare`."""

    def __init__(
        self,
        fit: Sequence[Contestant],
        pairs: int,
        steps: int | None,
        progress: Progress,
        limits: TimeLimits,
    ) -> None:
        self._fit, self._pairs, self._steps = fit, pairs, steps
        self._progress, self._limits = progress, limits
        self._series = {one.name: ContestantTimes(one.name, one.settings) for one in fit}
        self._step_s: dict[str, float] = {}

    @property
    def steps(self) -> int:
        """Of each contestant in each round: enough to tell, fewer if all rounds would not fit."""
        fastest = min(self._step_s.values(), default=math.inf)
        whole = self._pairs * self._cost(self._fit, 1)
        return self._steps or _steps(fastest, whole, self._limits.left)

    async def run(self) -> None:
        """A warm-up and as many rounds as there is time for, at least one.

        Raises:
            StoppedError: a limit was reached in the middle of one.
        """
        await self._warm_up()
        self._steps = self.steps
        for number in range(1, self._pairs + 1):
            if number > 1 and self._limits.left < self._cost(self._fit, self.steps):
                break
            order, what = rotated(self._fit, number), f"round {number} of {self._pairs}"
            for place, one in enumerate(order):
                pending = self._cost(order[place:], self.steps)
                self._tell(f"{what}: {one.name}", pending, self._pairs - number)
                segment = await self._limits.run(one.run(self.steps), is_needed=number == 1)
                self._add(one, segment, is_warmup=False)

    async def _warm_up(self) -> None:
        """The first steps of all, the same for each; the first shows how long a step takes."""
        share = self._limits.left * WARMUP_SHARE
        for one in self._fit:
            self._progress(f"warm-up: {one.name}", self._limits.at_most)
            self._add(one, await self._limits.run(one.run(1), is_needed=True), is_warmup=True)
        steps = WARMUP_STEPS - 1
        if self._cost(self._fit, steps) > share:
            return
        for place, one in enumerate(self._fit):
            pending = self._cost(self._fit[place:], steps)
            self._tell(f"warm-up: {one.name}", pending, self._pairs)
            self._add(one, await self._limits.run(one.run(steps), is_needed=True), is_warmup=True)

    def _add(self, one: Contestant, segment: TimedSegment, is_warmup: bool) -> None:
        self._series[one.name].add(segment, is_warmup)
        self._step_s[one.name] = segment.seconds_per_step

    def _tell(self, what: str, pending: float, rounds: int) -> None:
        """Say what is measured; it and what else is `pending` come before so many rounds."""
        rest = min(rounds * self._cost(self._fit, self.steps), self._limits.left - pending)
        self._progress(what, pending + max(0.0, rest))

    def _cost(self, contestants: Sequence[Contestant], steps: int) -> float:
        """Seconds of so many steps of each."""
        return steps * sum(self._step_s[one.name] for one in contestants)

    def whole_rounds(self) -> list[ContestantTimes]:
        """Everybody's, as far as all have come.

        Raises:
            StoppedError: that is nowhere.
        """
        every = list(self._series.values())
        rounds = min((len(one.seconds) for one in every), default=0)
        if every and not rounds:
            raise StoppedError
        for one in every:
            one.cut(rounds, min(len(each.losses) for each in every))
        return every


def _steps(fastest: float, whole: float, budget: float) -> int:
    """Of each contestant in each round.

    Args:
        fastest: seconds of a step of the fastest.
        whole: seconds of a step of all, as often as there are rounds.
        budget: seconds that all may take.
    """
    wanted = max(MIN_STEPS, round(ROUND_SECONDS / fastest))
    return wanted if whole * wanted <= budget else max(1, int(budget / whole))


def rotated(items: Sequence[Item], number: int) -> list[Item]:
    """The order of round `number`."""
    start = number % len(items) if items else 0
    return [*items[start:], *items[:start]]


def loss_difference(series: Sequence[ContestantTimes]) -> str | None:
    """Where the first contestant's losses and another's part, or None."""
    first = series[0]
    for other in series[1:]:
        pairs = zip(first.losses, other.losses, strict=True)
        for step, (mine, theirs) in enumerate(pairs, start=1):
            if not math.isclose(mine, theirs, rel_tol=LOSS_TOLERANCE):
                return f"step {step}: loss {mine} of {first.name}, {theirs} of {other.name}"
    return None


def require_equal_losses(series: Sequence[ContestantTimes]) -> None:
    """Who trains something else is not comparable.

    Raises:
        MismatchError: the first difference.
    """
    if difference := loss_difference(series):
        raise MismatchError(f"the contestants do not train the same: {difference}")


@contextlib.asynccontextmanager
async def _started(
    contestants: Sequence[Contestant],
    unfit: dict[str, str],
    progress: Progress,
    limits: TimeLimits,
) -> AsyncIterator[list[Contestant]]:
    """Those who can take part, one started after the other, since starting measures as well."""
    fit: list[Contestant] = []
    clock = asyncio.get_running_loop().time
    begin = clock()
    async with contextlib.AsyncExitStack() as stack:
        for number, one in enumerate(contestants):
            usual = (clock() - begin) / number if number else 0.0
            left = max(limits.left, usual * (len(contestants) - number))
            what = f"starting {one.name} ({number + 1} of {len(contestants)})"
            progress(what, left if left > 0 else math.inf)
            stack.push_async_callback(one.close)
            try:
                await limits.run(one.start(), is_needed=True)
            except UnsupportedJobError as error:
                unfit[one.name] = str(error)
                await one.close()
            else:
                fit.append(one)
        yield fit
