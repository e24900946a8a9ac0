"""Measure settings in interleaved rounds, drop the slow ones, choose, and measure the choice again.

Among many settings that are equally fast the fastest is chosen by chance, and beats the config's
own in the rounds by which it was chosen. Only rounds after the choice tell whether it is faster.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from statistics import mean, median

from rpcmp.config.schema import Config, ScheduleOptions
from rpcmp.tools.measurement import (
    Estimate,
    Progress,
    StoppedError,
    TimeLimits,
    paired_ratio,
    rotated,
)
from rpcmp.tools.tune.grid import Grid, Plan, spread_out
from rpcmp.tools.tune.setting_times import Runner, SettingTimes, Tuned, common_rounds

MOST_STEPS = 5
"""Most steps per round by default."""

NEEDED = 2
"""Settings that are measured once whatever the budget: the config's own and one to compare."""


async def tune(
    config: Config,
    grid: Grid,
    runner: Runner,
    rounds: int,
    steps: int | None,
    progress: Progress,
    limits: TimeLimits | None = None,
) -> Tuned:
    """Measure the settings of `grid` and choose.

    Args:
        rounds: number of rounds, and of rounds of the confirmation.
        steps: per round; None: as many as the budget allows, up to MOST_STEPS.
        limits: at a limit, the results so far are returned; the config's own setting and another
            one are measured whatever the budget.

    Raises:
        StoppedError: stopped before the config's own setting was measured.
    """
    sweep = _Sweep(grid, runner, rounds, steps, progress, limits or TimeLimits())
    with contextlib.suppress(StoppedError):
        await sweep.run()
    return sweep.results(config)


class _Sweep:
    def __init__(
        self,
        grid: Grid,
        runner: Runner,
        rounds: int,
        steps: int | None,
        progress: Progress,
        limits: TimeLimits,
    ) -> None:
        self._grid, self._runner, self._rounds = grid, runner, rounds
        self._steps, self._progress, self._limits = steps, progress, limits
        self._series = {setting: SettingTimes(setting) for setting in grid.settings}
        self._alive = list(grid.settings)
        self._dropped: set[ScheduleOptions] = set()
        self._again: list[SettingTimes] = []

    async def run(self) -> None:
        """Measure all settings, or those for which there is time.

        Raises:
            StoppedError: a limit was reached.
        """
        await self._warm_up()
        self._alive = [one for one in self._alive if self._series[one].warm_up]
        self._steps = self._steps or self._affordable_steps()
        await self._halve()
        await self._confirm()

    def results(self, config: Config) -> Tuned:
        """Return the results so far.

        Raises:
            StoppedError: not even the config's own setting was measured.
        """
        series = [one for one in self._series.values() if one.counted]
        own = self._series[self._grid.own]
        if not own.counted:
            raise StoppedError
        return Tuned(
            config=config,
            rounds=max(len(one.measured) for one in series),
            steps=self._steps or 1,
            series=series,
            best=self._best,
            own=own,
            confirmed=self._confirmed,
            dropped=frozenset(self._dropped),
            unmeasured=[one.setting for one in self._series.values() if not one.counted],
            left_out=list(self._grid.notes()),
            is_cut_short=self._limits.is_stopped,
        )

    @property
    def _best(self) -> SettingTimes:
        """The fastest in the rounds that all have, whichever the current round has reached."""
        # Settings that were dropped have lost already.
        running = [one for one in map(self._series.__getitem__, self._alive) if one.counted]
        both = common_rounds(running)
        return min(running, key=lambda one: median(one.seconds_of(both)))

    @property
    def _confirmed(self) -> Estimate | None:
        both = common_rounds(self._again) if self._again else 0
        if not both:
            return None
        return paired_ratio(*(one.seconds_of(both) for one in self._again))

    async def _warm_up(self) -> None:
        """Touch memory, connections and caches for the first time, and measure roughly."""
        order = spread_out(self._grid.settings, self._grid.own)
        for number, setting in enumerate(order):
            if number >= NEEDED and not self._has_time_to_warm_up():
                break
            self._report_warm_up(order[number:])
            work = self._runner.run(setting, 1)
            rough = await self._limits.run(work, is_needed=number < NEEDED)
            self._series[setting].warm_up.append(rough)

    def _has_time_to_warm_up(self) -> bool:
        """Return whether one more setting fits, if it is as fast as the fastest so far."""
        plan = self._plan(1)
        known = [one for one in self._alive if self._series[one].warm_up]
        fastest = min(plan.cost([one]) for one in known)
        return fastest + self._plan(self._steps or 1).reserve(known) <= self._limits.left

    async def _halve(self) -> None:
        for number in range(self._rounds):
            plan, left = self._plan(), self._limits.left
            kept = plan.survivors(self._alive, number, left)
            if not plan.has_time(kept, left):
                break
            self._dropped.update(set(self._alive) - set(kept))
            self._alive = kept
            after = plan.expected(kept, number + 1, left - plan.cost(kept))
            series = [self._series[one] for one in kept]
            await self._round(series, number, f"round {number + 1} of {self._rounds}", after)

    async def _confirm(self) -> None:
        """Measure the best against the config's own again, unless they are the same."""
        both = [self._best.setting, self._grid.own]
        if both[0] == both[1]:
            return
        self._again = [SettingTimes(one) for one in both]
        cost = self._plan().cost(both)
        for number in range(self._rounds):
            if self._limits.left < cost:
                break
            after = cost * (self._rounds - number - 1)
            await self._round(
                self._again, number, f"once more: {both[0]} and your {both[1]}", after
            )

    async def _round(
        self, series: Sequence[SettingTimes], number: int, what: str, after: float
    ) -> None:
        """Measure each of `series` once; `after` is the time of what follows the round."""
        stride = max(1, len(series) // self._rounds)  # early in some rounds, late in others
        order = rotated(series, number * stride)
        for place, one in enumerate(order):
            pending = [each.setting for each in order[place:]]
            self._report(f"{what}: {one.setting}", self._plan(), pending, after)
            work = self._runner.run(one.setting, self._steps or 1)
            one.measured.append(await self._limits.run(work))

    def _report_warm_up(self, pending: Sequence[ScheduleOptions]) -> None:
        what = f"warm-up: {pending[0]}"
        if not self._series[self._grid.own].warm_up:
            self._progress(what, self._limits.at_most)
            return
        plan = self._plan(1)
        after = self._plan().expected(self._alive, 0, self._limits.left - plan.cost(pending))
        self._report(what, plan, pending, after)

    def _report(
        self, what: str, plan: Plan, pending: Sequence[ScheduleOptions], after: float
    ) -> None:
        seconds = min(self._limits.left, plan.cost(pending) + after)
        self._progress(what, max(seconds, plan.cost(pending[:1])))

    def _plan(self, steps: int | None = None) -> Plan:
        """Return the plan; a setting that was not measured yet takes as long as the others."""
        known = {one.setting: one.median_s for one in self._series.values() if one.counted}
        usual = mean(known.values())
        return Plan(
            own=self._grid.own,
            rounds=self._rounds,
            steps=steps or self._steps or self._affordable_steps(),
            budget=self._limits.budget,
            step_s={one: known.get(one, usual) for one in self._grid.settings},
        )

    def _affordable_steps(self) -> int:
        """Return the most steps for which all that would be measured without a budget fits."""
        left = self._limits.left
        return next(
            (
                steps
                for steps in range(MOST_STEPS, 1, -1)
                if self._plan(steps).expected(self._alive, 0, math.inf) <= left
            ),
            1,
        )
