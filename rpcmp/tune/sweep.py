"""Measures settings in interleaved rounds, drops the slow ones, chooses, measures the choice again.

    round 1   all        round 2   the better half        ...        again: the best, and yours

Successive halving (Jamieson and Talwalkar, AISTATS 2016) spends the time on settings that can win;
what is as good as the best, within TIED, is only dropped where the budget is too small for it.

The fastest of many settings that are equally fast is chosen by chance, and beats the config's own
in the rounds that it was chosen by. Only rounds after the choice can tell whether it is faster.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from rpcmp.bench.rounds import Progress, StoppedError, rotated, unless
from rpcmp.bench.statistics import Estimate, paired_ratio
from rpcmp.config import Config
from rpcmp.setting import Setting
from rpcmp.tune.grid import Grid
from rpcmp.tune.runner import SETTLE_STEPS, Measured, Runner

LEAST_CONFIDENCE = 0.9
"""Of an interval that is to say anything; five rounds are the fewest that reach it."""


TIED = 1.05
"""A setting whose step takes less than so much of the best one's may still win."""

FEWEST = 3
"""Settings that are not dropped any more, besides the config's own."""

ROUNDS_SHARE = 0.4
"""Of the budget that the first round may take, where the number of steps is not given."""

MOST_STEPS = 5
"""Of a round, where their number is not given."""


@dataclass(frozen=True)
class Series:
    """What was measured of one setting, in the order of the rounds."""

    setting: Setting
    measured: list[Measured] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Of a step, in each round."""
        return [each.step for each in self.measured]

    @property
    def median_s(self) -> float:
        """Of a step."""
        return median(self.seconds)

    @property
    def busiest_stage_s(self) -> float:
        """In which the busiest stage computes in a step; the median."""
        return median(each.busiest_stage for each in self.measured)


@dataclass(frozen=True)
class Tuned:
    """What a sweep found.

    Attributes:
        config: the job.
        rounds, steps: of a setting that was not dropped, and of each round.
        series: of all settings that were measured.
        best: the one with the smallest median.
        own: the config's.
        confirmed: best / own, in rounds after the choice; None where they are the same, or there
            was no time.
        left_out: settings that were not measured, and why, a line each.
        is_cut_short: whether somebody has stopped it.
    """

    config: Config
    rounds: int
    steps: int
    series: list[Series]
    best: Series
    own: Series
    confirmed: Estimate | None
    left_out: list[str]
    is_cut_short: bool = False

    @property
    def is_faster(self) -> bool:
        """Whether the best setting is known to be faster than the config's own."""
        return self.confirmed is not None and is_less(self.confirmed)

    @property
    def recommended(self) -> Setting:
        """What the config should say."""
        return self.best.setting if self.is_faster else self.own.setting

    def against_best(self, one: Series) -> Estimate:
        """How much slower than the best a setting is, in the rounds of the sweep."""
        both = min(len(one.seconds), len(self.best.seconds))
        return paired_ratio(one.seconds[:both], self.best.seconds[:both])


def is_less(ratio: Estimate) -> bool:
    """Whether the ratio is known to lie below one."""
    return ratio.high < 1 and ratio.confidence >= LEAST_CONFIDENCE


def is_more(ratio: Estimate) -> bool:
    """Whether the ratio is known to lie above one."""
    return ratio.low > 1 and ratio.confidence >= LEAST_CONFIDENCE


async def tune(
    config: Config,
    grid: Grid,
    runner: Runner,
    rounds: int,
    steps: int | None,
    progress: Progress,
    budget: float = math.inf,
    stop: asyncio.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuned:
    """Measure the settings of `grid` and choose.

    Args:
        config: the job.
        runner: started.
        rounds: how often a setting is measured that is not dropped.
        steps: of each time; None: as many as the budget allows, up to MOST_STEPS.
        progress: told how far it is.
        budget: seconds that it may take; the choice is not measured again where it does not allow
            it.
        stop: set by somebody else, ends it with what there is.
        clock: tells seconds.

    Raises:
        RpcmpError: the job failed.
        StoppedError: there is nothing yet.
    """
    sweep = _Sweep(grid, runner, rounds, steps, progress, clock() + budget, stop, clock)
    confirmed = None
    is_cut_short = False
    try:
        await sweep.measure()
        confirmed = await sweep.confirm()
    except StoppedError:
        is_cut_short = True
    series = [one for one in sweep.series if one.measured]
    if not sweep.own.measured:
        raise StoppedError
    return Tuned(
        config=config,
        rounds=max(len(one.measured) for one in series),
        steps=sweep.steps,
        series=series,
        best=sweep.best,
        own=sweep.own,
        confirmed=confirmed,
        left_out=list(grid.notes()),
        is_cut_short=is_cut_short,
    )


class _Sweep:
    """The rounds of one sweep; see `tune`."""

    def __init__(
        self,
        grid: Grid,
        runner: Runner,
        rounds: int,
        steps: int | None,
        progress: Progress,
        deadline: float,
        stop: asyncio.Event | None,
        clock: Callable[[], float],
    ) -> None:
        self._runner, self._rounds, self._progress = runner, rounds, progress
        self._deadline, self._stop, self._clock = deadline, stop, clock
        self._wanted = steps
        self.steps = steps or 1
        self.series = [Series(setting) for setting in grid.settings]
        self.own = next(one for one in self.series if one.setting == grid.own)
        self._first: dict[Setting, float] = {}

    @property
    def best(self) -> Series:
        """Of those that were measured most often, the one with the smallest median."""
        most = max(len(one.measured) for one in self.series)
        return min(
            (one for one in self.series if len(one.measured) == most), key=lambda one: one.median_s
        )

    async def measure(self) -> None:
        """All rounds, with fewer and fewer settings."""
        for one in self.series:  # first touch of memory, connections, caches
            self._tell(f"warm-up: {one.setting}", self.series, self._rounds)
            begin = self._clock()
            await unless(self._stop, self._runner.run(one.setting, 1))
            self._first[one.setting] = self._clock() - begin
        self.steps = self._wanted or self._affordable()
        alive = self.series
        for number in range(self._rounds):
            if number:
                alive = self._survivors(alive, self._rounds - number)
                if self._left() < self._cost(alive, 1):
                    break
            await self._round(alive, number, f"round {number + 1} of {self._rounds}")

    async def confirm(self) -> Estimate | None:
        """The best against the config's own once more; None where there is nothing to tell."""
        if self.best is self.own:
            return None
        again = [Series(self.best.setting), Series(self.own.setting)]
        said = f"once more: {again[0].setting} and your {again[1].setting}"
        for number in range(self._rounds):
            if self._left() < self._cost([self.best, self.own], 1):
                break
            await self._round(again, number, said, self._rounds - number)
        both = min(len(one.measured) for one in again)
        if not both:
            return None
        return paired_ratio(again[0].seconds[:both], again[1].seconds[:both])

    async def _round(
        self, series: Sequence[Series], number: int, what: str, rounds: int | None = None
    ) -> None:
        stride = max(1, len(series) // self._rounds)  # early in some rounds, late in others
        for one in rotated(series, number * stride):
            self._tell(f"{what}: {one.setting}", series, rounds or self._rounds - number)
            one.measured.append(await unless(self._stop, self._runner.run(one.setting, self.steps)))

    def _survivors(self, alive: list[Series], rounds: int) -> list[Series]:
        """The better half, and who is as good, as far as there is time; the config's own always."""
        ranked = sorted(alive, key=lambda one: one.median_s)
        half = max(FEWEST, math.ceil(len(ranked) / 2))
        tied = sum(one.median_s <= ranked[0].median_s * TIED for one in ranked)
        kept = ranked[: max(half, tied)]
        if self._left() < self._cost([*kept, self.own], rounds) + self._confirmation():
            kept = ranked[:half]
        return [one for one in alive if one in kept or one is self.own]

    def _affordable(self) -> int:
        whole = sum(self._first.values())
        share = ROUNDS_SHARE * self._left()
        most = MOST_STEPS if math.isinf(share) or not whole else int(share / whole)
        return max(1, min(MOST_STEPS, most))

    def _cost(self, series: Sequence[Series], rounds: int) -> float:
        """Seconds of so many rounds."""
        steps = self.steps + SETTLE_STEPS
        return rounds * steps * sum(self._step_s(one) for one in series)

    def _confirmation(self) -> float:
        return self._cost([self.best, self.own], self._rounds)

    def _step_s(self, one: Series) -> float:
        known = next(each for each in self.series if each.setting == one.setting)
        return known.median_s if known.measured else self._first.get(one.setting, 0.0)

    def _left(self) -> float:
        return self._deadline - self._clock()

    def _tell(self, what: str, series: Sequence[Series], rounds: int) -> None:
        """Say what is done, and how long all will take: what is to come shrinks by half."""
        expected, count = 0.0, len(series)
        mean = self._cost(series, 1) / max(1, count)
        for _ in range(rounds):
            expected += mean * count
            count = max(min(count, FEWEST), count // 2)
        expected += 2 * self._rounds * mean
        self._progress(what, max(0.0, min(self._left(), expected or math.inf)))
