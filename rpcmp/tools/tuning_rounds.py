"""Choose the settings of a sweep that stay from round to round. Pure.

    round 1   all        round 2   the better half        ...        again: the best, and yours

Successive halving (Jamieson and Talwalkar, AISTATS 2016) spends the time on settings that can win.
Settings within TIED of the best are dropped only if the budget is too small for them. The same rule
decides and predicts, so the time left is predicted for what will really be measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.pipelining.setting_grid import SETTLE_STEPS

TIED = 1.05
"""A setting may still win if its step takes less than the best one's times this."""

ROUGHLY_TIED = 2.0
"""The same after the warm-up, which is a single step of each."""

FEWEST = 3
"""Least number of settings that stay in the sweep, besides the config's own."""

ALL_HALVES = 2
"""Rounds of all settings that take as long as one of all, of a half, of a quarter, and so on."""


@dataclass(frozen=True)
class SweepPlan:
    """The rest of a sweep, predicted from the speeds measured so far.

    Attributes:
        rounds: number of rounds, and of rounds of the confirmation.
        steps: steps per round.
        step_s: seconds of a step, by setting.
    """

    own: ScheduleOptions
    rounds: int
    steps: int
    budget: float
    step_s: Mapping[ScheduleOptions, float]

    def cost(self, settings: Iterable[ScheduleOptions]) -> float:
        return (self.steps + SETTLE_STEPS) * sum(self.step_s[one] for one in settings)

    def confirmation(self, alive: Sequence[ScheduleOptions]) -> float:
        """Return the seconds that it takes to measure the best against the config's own again."""
        best = min(alive, key=self.step_s.__getitem__)
        return 0.0 if best == self.own else self.rounds * self.cost([best, self.own])

    def reserve(self, alive: Sequence[ScheduleOptions]) -> float:
        """Return the seconds to keep for the confirmation; 0 if they exceed half the budget."""
        needed = self.confirmation(alive)
        return needed if needed <= self.budget / 2 else 0.0

    def survivors(
        self, alive: Sequence[ScheduleOptions], number: int, left: float
    ) -> list[ScheduleOptions]:
        """Return the settings of round `number`: the better half, and the config's own.

        Settings that are close to the best are kept too if `left` seconds suffice for them. Fewer
        than half are kept if the seconds do not even suffice for a round of these.
        """
        ranked = sorted(alive, key=self.step_s.__getitem__)
        limit = self.step_s[ranked[0]] * (TIED if number else ROUGHLY_TIED)
        close = sum(self.step_s[one] <= limit for one in ranked)
        half = max(FEWEST, math.ceil(len(ranked) / 2))
        kept = max(half, close)
        left -= self.reserve(alive)
        rounds = self.rounds - number if number else min(self.rounds, ALL_HALVES)
        if left < rounds * self._cost_with_own(ranked[:kept]):
            kept = half
        while kept > FEWEST and left < self._cost_with_own(ranked[:kept]):
            kept = max(FEWEST, kept // 2)
        return [one for one in alive if one in ranked[:kept] or one == self.own]

    def has_time(self, settings: Sequence[ScheduleOptions], left: float) -> bool:
        """Return whether a round and the time kept for the confirmation fit into `left` seconds."""
        return self.cost(settings) + self.reserve(settings) <= left

    def expected(self, alive: Sequence[ScheduleOptions], number: int, left: float) -> float:
        """Return the seconds of the rounds from `number` that fit, and of the confirmation."""
        spent = 0.0
        for each in range(number, self.rounds):
            kept = self.survivors(alive, each, left - spent)
            if not self.has_time(kept, left - spent):
                break
            alive, spent = kept, spent + self.cost(kept)
        return spent + self.confirmation(alive)

    def _cost_with_own(self, settings: Sequence[ScheduleOptions]) -> float:
        return self.cost({*settings, self.own})


def spread_out(
    settings: Sequence[ScheduleOptions], first: ScheduleOptions
) -> list[ScheduleOptions]:
    """Order the settings so that any first few of them are spread over all; `first` is first."""
    bits = len(settings).bit_length()
    places = sorted(range(len(settings)), key=lambda place: f"{place:0{bits}b}"[::-1])
    return [first, *(settings[place] for place in places if settings[place] != first)]
