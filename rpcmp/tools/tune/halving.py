"""Which settings go on, and how long that will take. Pure.

    round 1   all        round 2   the better half        ...        again: the best, and yours

Successive halving (Jamieson and Talwalkar, AISTATS 2016) spends the time on settings that can win;
what is as good as the best, within TIED, is only dropped if the budget is too small for it. The
same rule decides and foretells, so the time left is that of what will really be measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rpcmp.config.schema import ScheduleOptions
from rpcmp.tools.tune.measuring import SETTLE_STEPS

TIED = 1.05
"""A setting whose step takes less than so much of the best one's may still win."""

ROUGHLY_TIED = 2.0
"""The same after the warm-up, which is a single step of each."""

FEWEST = 3
"""Settings that are not dropped any more, besides the config's own."""

ALL_HALVES = 2
"""Rounds of all settings that take as long as one of all, of a half, of a quarter, and so on."""


@dataclass(frozen=True)
class Plan:
    """What a sweep has before it, at the speeds that it knows.

    Attributes:
        own: the config's setting, which is never dropped.
        rounds: of a setting that is not dropped, and of the confirmation.
        steps: of a round.
        budget: seconds of the whole sweep.
        step_s: seconds of a step of each setting.
    """

    own: ScheduleOptions
    rounds: int
    steps: int
    budget: float
    step_s: Mapping[ScheduleOptions, float]

    def cost(self, settings: Iterable[ScheduleOptions]) -> float:
        """Seconds of a round."""
        return (self.steps + SETTLE_STEPS) * sum(self.step_s[one] for one in settings)

    def confirmation(self, alive: Sequence[ScheduleOptions]) -> float:
        """Seconds in which the best is measured against the config's own once more."""
        best = min(alive, key=self.step_s.__getitem__)
        return 0.0 if best == self.own else self.rounds * self.cost([best, self.own])

    def reserve(self, alive: Sequence[ScheduleOptions]) -> float:
        """Seconds that are kept for the confirmation; 0 if that cannot be had anyway."""
        needed = self.confirmation(alive)
        return needed if needed <= self.budget / 2 else 0.0

    def survivors(
        self, alive: Sequence[ScheduleOptions], number: int, left: float
    ) -> list[ScheduleOptions]:
        """Return who takes part in round `number`: the better half, and the config's own.

        What is close to the best as well, if `left` seconds allow for it; fewer than the half, if
        they do not even allow for a round of that.
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
        """Whether a round of them, and what is kept for the confirmation, fits."""
        return self.cost(settings) + self.reserve(settings) <= left

    def expected(self, alive: Sequence[ScheduleOptions], number: int, left: float) -> float:
        """Seconds of the rounds from `number` on that fit, and of the confirmation."""
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
    """All of them in an order whose every beginning is spread over the whole, after `first`."""
    bits = len(settings).bit_length()
    places = sorted(range(len(settings)), key=lambda place: f"{place:0{bits}b}"[::-1])
    return [first, *(settings[place] for place in places if settings[place] != first)]
