"""Measure settings on one group of workers, drop the slow ones, choose, and measure again.

A group per setting would take seconds to start, memory for all of them at once, and more than one
job at a time from every stage server. So the same processes take a new setting between two steps.
Training just goes on; the parameters do not matter.

Settings are measured in interleaved rounds. Among many that are equally fast the fastest is chosen
by chance, and beats the config's own in the rounds by which it was chosen. Only rounds after the
choice tell whether it is faster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import NamedTuple

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError
from rpcmp.job.segments import Segments
from rpcmp.pipelining.setting_grid import SETTLE_STEPS, Grid
from rpcmp.tools.measurement import (
    Estimate,
    Progress,
    StoppedError,
    TimeLimits,
    is_conclusive,
    paired_ratio,
    rotated,
)
from rpcmp.tools.tuning_rounds import SweepPlan, spread_out


class Measurement(NamedTuple):
    """Seconds of a step.

    Attributes:
        step: from start to end.
        busiest_stage: in which the busiest stage computes: the step's time without a bubble.
    """

    step: float
    busiest_stage: float


Measure = Callable[[ScheduleOptions, int], Awaitable[Measurement]]
"""Trains this many steps under a setting; returns their mean."""


async def measure(segments: Segments, setting: ScheduleOptions, steps: int) -> Measurement:
    """Train as `rpcmp drive` does; see `Measure`."""
    segments.change_to(setting)
    await segments.run(SETTLE_STEPS)
    done = await segments.run(steps)
    return Measurement(done.seconds, max(done.busy_seconds.values()))


def plain_training(config: Config) -> Config:
    """Reduce the job to train steps on mini-batches of one size.

    Clipping stays, since the stages wait for it. A learning-rate scheduler goes, since it may fail
    after the number of steps that it was made for.
    """
    section = config.require_data("tuning")
    if config.balance_replicas and any(
        stage.num_replicas > 1 and stage.shares is None for stage in config.stages
    ):
        raise ConfigError(
            "balance_replicas = true: give the `shares` that `rpcmp drive` shows, so that all "
            "settings are measured with the same"
        )
    data = section.model_copy(update={"test": None, "drop_last": True})
    return config.without_schedulers().without_evaluation().model_copy(update={"data": data})


@dataclass(frozen=True)
class SettingTimes:
    """Measurements of one setting.

    Attributes:
        warm_up: one rough measurement, which counts until there is a round; or none.
        measured: one per round.
    """

    setting: ScheduleOptions
    warm_up: list[Measurement] = field(default_factory=list)
    measured: list[Measurement] = field(default_factory=list)

    @property
    def counted(self) -> list[Measurement]:
        """The rounds, or the warm-up if there are none."""
        return self.measured or self.warm_up

    @property
    def seconds(self) -> list[float]:
        return [each.step for each in self.counted]

    @property
    def median_s(self) -> float:
        return median(self.seconds)

    @property
    def busiest_stage_s(self) -> float:
        return median(each.busiest_stage for each in self.counted)

    def seconds_in(self, rounds: int) -> list[float]:
        """Return the seconds of a step in the first `rounds` rounds, or in the warm-up if 0."""
        return [each.step for each in self.measured[:rounds] or self.warm_up]


@dataclass(frozen=True)
class Tuned:
    """Results of a sweep.

    Attributes:
        rounds, steps: rounds of a setting that was not dropped, and steps per round.
        series: of all settings that were measured.
        best: the fastest in the rounds that all settings have that were not dropped.
        own: the config's own setting.
        confirmed: best / own in rounds after the choice; None if they are the same, or if there
            was no time.
        dropped: settings that were measured until they could not win any more.
        unmeasured: settings for which there was no time.
        left_out: lines about settings that are not worth measuring.
        is_cut_short: whether the user has stopped it.
    """

    config: Config
    rounds: int
    steps: int
    series: list[SettingTimes]
    best: SettingTimes
    own: SettingTimes
    confirmed: Estimate | None
    dropped: frozenset[ScheduleOptions]
    unmeasured: list[ScheduleOptions]
    left_out: list[str]
    is_cut_short: bool = False

    @property
    def basis(self) -> str:
        """The measurements from which the figures come, in words."""
        if not self.rounds:
            return "one step each, in the warm-up alone"
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        return f"{self.rounds} interleaved round{'s' * (self.rounds > 1)} of {steps}"

    @property
    def is_faster(self) -> bool:
        """Whether the best setting is known to be faster than the config's own."""
        ratio = self.confirmed
        return ratio is not None and ratio.high < 1 and is_conclusive(ratio)

    @property
    def recommended(self) -> ScheduleOptions:
        """The setting that the config should have."""
        return self.best.setting if self.is_faster else self.own.setting

    def ratio_to_best(self, times: SettingTimes) -> Estimate:
        """Estimate how much slower than the best a setting is, in the rounds that both have."""
        return _ratio(times, self.best)


def _common_rounds(series: Iterable[SettingTimes]) -> int:
    return min(len(times.measured) for times in series)


def _ratio(ours: SettingTimes, theirs: SettingTimes) -> Estimate:
    rounds = _common_rounds([ours, theirs])
    return paired_ratio(ours.seconds_in(rounds), theirs.seconds_in(rounds))


MOST_STEPS = 5
"""Most steps per round by default."""

NEEDED = 2
"""Settings that are measured once whatever the budget: the config's own and one to compare."""


@dataclass
class Sweep:
    """Measures the settings of a grid, and chooses the fastest.

    Attributes:
        rounds: number of rounds, and of rounds of the confirmation.
        steps: per round; None: as many as the budget allows, up to MOST_STEPS.
        limits: at a limit, the results so far are returned; the config's own setting and another
            one are measured whatever the budget.
        dropped: settings that cannot win any more; the others are `alive`.
        repeated: times of the best and of the config's own setting, measured after the choice.
    """

    grid: Grid
    measure: Measure
    rounds: int
    steps: int | None
    progress: Progress
    limits: TimeLimits
    dropped: set[ScheduleOptions] = field(default_factory=set)
    repeated: list[SettingTimes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.series = {setting: SettingTimes(setting) for setting in self.grid.settings}
        self.alive = self.grid.settings

    async def run(self, config: Config) -> Tuned:
        """Measure all settings, or those for which there is time.

        Raises:
            StoppedError: stopped before the config's own setting was measured.
        """
        with contextlib.suppress(StoppedError):
            await self._warm_up()
            self.alive = [one for one in self.alive if self.series[one].warm_up]
            self.steps = self.steps or self._affordable_steps()
            await self._halve()
            await self._confirm()
        series = [times for times in self.series.values() if times.counted]
        own = self.series[self.grid.own]
        if not own.counted:
            raise StoppedError
        is_confirmed = self.repeated and _common_rounds(self.repeated)
        return Tuned(
            config=config,
            rounds=max(len(times.measured) for times in series),
            steps=self.steps or 1,
            series=series,
            best=self._best,
            own=own,
            confirmed=_ratio(*self.repeated) if is_confirmed else None,
            dropped=frozenset(self.dropped),
            unmeasured=[times.setting for times in self.series.values() if not times.counted],
            left_out=self.grid.left_out,
            is_cut_short=self.limits.is_stopped,
        )

    @property
    def _best(self) -> SettingTimes:
        """The fastest in the rounds that all have, whichever the current round has reached.

        Settings that were dropped have lost already.
        """
        running = [self.series[one] for one in self.alive if self.series[one].counted]
        rounds = _common_rounds(running)
        return min(running, key=lambda times: median(times.seconds_in(rounds)))

    async def _warm_up(self) -> None:
        """Touch memory, connections and caches for the first time, and measure roughly."""
        order = spread_out(self.grid.settings, self.grid.own)
        for number, setting in enumerate(order):
            if number >= NEEDED and not self._has_time_to_warm_up():
                break
            self._report_warm_up(order[number:])
            work = self.measure(setting, 1)
            rough = await self.limits.run(work, is_needed=number < NEEDED)
            self.series[setting].warm_up.append(rough)

    def _has_time_to_warm_up(self) -> bool:
        """Return whether one more setting fits, if it is as fast as the fastest so far."""
        plan = self._plan(1)
        known = [one for one in self.alive if self.series[one].warm_up]
        fastest = min(plan.cost([one]) for one in known)
        return fastest + self._plan(self.steps or 1).reserve(known) <= self.limits.left

    async def _halve(self) -> None:
        for number in range(self.rounds):
            plan, left = self._plan(), self.limits.left
            kept = plan.survivors(self.alive, number, left)
            if not plan.has_time(kept, left):
                break
            self.dropped.update(set(self.alive) - set(kept))
            self.alive = kept
            after = plan.expected(kept, number + 1, left - plan.cost(kept))
            series = [self.series[one] for one in kept]
            await self._round(series, number, f"round {number + 1} of {self.rounds}", after)

    async def _confirm(self) -> None:
        """Measure the best against the config's own again, unless they are the same."""
        both = [self._best.setting, self.grid.own]
        if both[0] == both[1]:
            return
        self.repeated = [SettingTimes(one) for one in both]
        cost = self._plan().cost(both)
        for number in range(self.rounds):
            if self.limits.left < cost:
                break
            after = cost * (self.rounds - number - 1)
            what = f"once more: {both[0]} and your {both[1]}"
            await self._round(self.repeated, number, what, after)

    async def _round(
        self, series: Sequence[SettingTimes], number: int, what: str, after: float
    ) -> None:
        """Measure each of `series` once; `after` is the time of what follows the round."""
        stride = max(1, len(series) // self.rounds)  # early in some rounds, late in others
        order = rotated(series, number * stride)
        for place, one in enumerate(order):
            pending = [each.setting for each in order[place:]]
            self._report(f"{what}: {one.setting}", self._plan(), pending, after)
            work = self.measure(one.setting, self.steps or 1)
            one.measured.append(await self.limits.run(work))

    def _report_warm_up(self, pending: Sequence[ScheduleOptions]) -> None:
        what = f"warm-up: {pending[0]}"
        if not self.series[self.grid.own].warm_up:
            self.progress(what, self.limits.at_most)
            return
        plan = self._plan(1)
        after = self._plan().expected(self.alive, 0, self.limits.left - plan.cost(pending))
        self._report(what, plan, pending, after)

    def _report(
        self, what: str, plan: SweepPlan, pending: Sequence[ScheduleOptions], after: float
    ) -> None:
        seconds = min(self.limits.left, plan.cost(pending) + after)
        self.progress(what, max(seconds, plan.cost(pending[:1])))

    def _plan(self, steps: int | None = None) -> SweepPlan:
        """Return the plan; a setting that was not measured yet takes as long as the others."""
        known = {one.setting: one.median_s for one in self.series.values() if one.counted}
        usual = mean(known.values())
        return SweepPlan(
            own=self.grid.own,
            rounds=self.rounds,
            steps=steps or self.steps or self._affordable_steps(),
            budget=self.limits.budget,
            step_s={one: known.get(one, usual) for one in self.grid.settings},
        )

    def _affordable_steps(self) -> int:
        """Return the most steps for which all that would be measured without a budget fits."""
        for steps in range(MOST_STEPS, 1, -1):
            if self._plan(steps).expected(self.alive, 0, math.inf) <= self.limits.left:
                return steps
        return 1
