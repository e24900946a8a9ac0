"""Measures all settings in interleaved rounds, chooses, and measures the choice again.

The fastest of many settings that are equally fast is chosen by chance, and beats the config's own
in the rounds that it was chosen by. Only rounds after the choice can tell whether it is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rpcmp.bench.rounds import Progress, rotated
from rpcmp.bench.statistics import Estimate, paired_ratio
from rpcmp.config import Config
from rpcmp.setting import Setting
from rpcmp.tune.grid import Grid
from rpcmp.tune.runner import Measured, Runner

LEAST_CONFIDENCE = 0.9
"""Of an interval that is to say anything; five rounds are the fewest that reach it."""


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
        rounds, steps: of each setting, and of each round.
        series: of all settings.
        best: the one with the smallest median.
        own: the config's.
        confirmed: best / own, in rounds after the choice; None where they are the same.
        left_out: settings that were not measured, and why, a line each.
    """

    config: Config
    rounds: int
    steps: int
    series: list[Series]
    best: Series
    own: Series
    confirmed: Estimate | None
    left_out: list[str]

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
        return paired_ratio(one.seconds, self.best.seconds)


def is_less(ratio: Estimate) -> bool:
    """Whether the ratio is known to lie below one."""
    return ratio.high < 1 and ratio.confidence >= LEAST_CONFIDENCE


def is_more(ratio: Estimate) -> bool:
    """Whether the ratio is known to lie above one."""
    return ratio.low > 1 and ratio.confidence >= LEAST_CONFIDENCE


async def tune(
    config: Config, grid: Grid, runner: Runner, rounds: int, steps: int, progress: Progress
) -> Tuned:
    """Measure the settings of `grid` and choose.

    Args:
        config: the job.
        runner: started.
        rounds: how often each setting is measured.
        steps: of each time.
        progress: told what happens.

    Raises:
        RpcmpError: the job failed.
    """
    for setting in grid.settings:  # first touch of memory, connections, caches
        progress(f"warm-up: {setting}")
        await runner.run(setting, 1)
    series = await _measure(runner, grid.settings, rounds, steps, progress)
    own = next(one for one in series if one.setting == grid.own)
    best = min(series, key=lambda one: one.median_s)
    confirmed = None
    if best is not own:
        progress(f"once more: {best.setting} and your {own.setting}")
        again = await _measure(runner, [best.setting, own.setting], rounds, steps, progress)
        confirmed = paired_ratio(again[0].seconds, again[1].seconds)
    return Tuned(config, rounds, steps, series, best, own, confirmed, list(grid.notes()))


async def _measure(
    runner: Runner, settings: Sequence[Setting], rounds: int, steps: int, progress: Progress
) -> list[Series]:
    series = [Series(setting) for setting in settings]
    stride = max(1, len(series) // rounds)  # each is early in some rounds and late in others
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for one in rotated(series, number * stride):
            one.measured.append(await runner.run(one.setting, steps))
    return series
