"""Choose the settings that a sweep measures, and those that stay from round to round. Pure.

    round 1   all        round 2   the better half        ...        again: the best, and yours

Successive halving (Jamieson and Talwalkar, AISTATS 2016) spends the time on settings that can win.
Settings within TIED of the best are dropped only if the budget is too small for them. The same rule
decides and predicts, so the time left is predicted for what will really be measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from pydantic import ValidationError

from rpcmp.config.schema import Config, ScheduleOptions
from rpcmp.errors import ConfigError
from rpcmp.pipelining import cost_model, simulation
from rpcmp.pipelining.schedule import policy

SETTLE_STEPS = 1
"""Steps after a change before the clock counts: memory of other sizes, new threads."""

MOST_MICROBATCHES = 128
SCHEDULES = ("1f1b", "zero-bubble")
"""Defaults of a sweep."""

TIED = 1.05
"""A setting may still win if its step takes less than the best one's times this."""

ROUGHLY_TIED = 2.0
"""The same after the warm-up, which is a single step of each."""

FEWEST = 3
"""Least number of settings that stay in the sweep, besides the config's own."""

ALL_HALVES = 2
"""Rounds of all settings that take as long as one of all, of a half, of a quarter, and so on."""


class Axes(NamedTuple):
    """Values to sweep; None: the default.

    Attributes:
        num_microbatches: by default powers of two, as long as each micro-batch has two samples,
            the least for batch normalization.
        schedules: names of policies.
        max_in_flight: numbers, and None for the schedule's own. By default None, and for
            zero-bubble also the largest useful number: twice the longest path through the graph,
            times the micro-batches of a message.
        microbatches_per_message: by default the config's.
    """

    num_microbatches: Sequence[int] | None = None
    schedules: Sequence[str] | None = None
    max_in_flight: Sequence[int | None] | None = None
    microbatches_per_message: Sequence[int] | None = None


class Grid(NamedTuple):
    """The settings to measure: the config's own, and all of them with it.

    Attributes:
        left_out: lines about settings that are not worth measuring, one for all numbers of
            micro-batches with the same other options and the same reason.
    """

    own: ScheduleOptions
    settings: list[ScheduleOptions]
    left_out: list[str]


def grid(config: Config, axes: Axes) -> Grid:
    """Combine the values of all axes, and add the config's own setting."""
    batch_size = config.require_data("tuning").batch_size
    own = ScheduleOptions.of(config)
    settings: dict[Hashable, ScheduleOptions] = {_effect(config, own): own}
    left_out: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for setting in dict.fromkeys(_product(config, axes, batch_size)):
        if setting == own:
            continue
        reason = _why_useless(setting, batch_size)
        if not reason:
            same = settings.setdefault(_effect(config, setting), setting)
            reason = "" if same is setting else f"the same as {same.without_count}"
        if reason:
            left_out[setting.without_count, reason].append(setting.num_microbatches)
    lines = [
        f"left out: num_microbatches {', '.join(map(str, numbers))}, {way}: {reason}"
        for (way, reason), numbers in left_out.items()
    ]
    return Grid(own, sorted(settings.values(), key=_sort_key), lines)


def _product(config: Config, axes: Axes, batch_size: int) -> Iterator[ScheduleOptions]:
    most = min(MOST_MICROBATCHES, max(1, batch_size // 2))
    powers_of_two = [1 << exponent for exponent in range(most.bit_length())]
    numbers = powers_of_two if axes.num_microbatches is None else axes.num_microbatches
    messages = axes.microbatches_per_message or [config.microbatches_per_message]
    replicas = {worker.stage: worker.num_replicas for worker in config.workers}
    longest = max(simulation.depths(config.graph(), replicas).values())
    for schedule, per_message in product(axes.schedules or SCHEDULES, messages):
        policy(schedule)
        in_flight = axes.max_in_flight
        if in_flight is None:
            in_flight = [None, 2 * longest * per_message] if schedule == "zero-bubble" else [None]
        for max_in_flight, number in product(in_flight, numbers):
            yield _setting(
                num_microbatches=number,
                schedule=schedule,
                max_in_flight=max_in_flight,
                microbatches_per_message=per_message,
            )


def _setting(**values: Any) -> ScheduleOptions:
    try:
        return ScheduleOptions.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"{first['loc'][0]}: {first['msg']} (got {first['input']!r})") from error


def _why_useless(setting: ScheduleOptions, batch_size: int) -> str:
    if setting.num_microbatches > batch_size:
        return f"a mini-batch has {batch_size} samples"
    if setting.schedule == "gpipe" and setting.max_in_flight is not None:
        return "gpipe always holds all micro-batches"
    at_once = min(setting.microbatches_per_message, setting.num_microbatches)
    if setting.max_in_flight is not None and setting.max_in_flight < at_once:
        return f"a message has {at_once} micro-batches"
    return ""


def _effect(config: Config, setting: ScheduleOptions) -> Hashable:
    """Return a key that is equal for settings under which every stage does the same."""
    changed = setting.on(config)
    count = changed.num_full_microbatches
    cut = changed.bundles(count)
    bundles = len(cut)
    stages = [
        (
            min(each.open, bundles),
            min(each.held, bundles),
            each.splits,
            min(each.deferred, bundles - 1),  # after the last backward nothing is deferred
        )
        for each in cost_model.limits(changed).values()
    ]
    return count, setting.schedule, cut, tuple(stages)


def _sort_key(setting: ScheduleOptions) -> tuple[str, int, int, int]:
    way = setting.schedule, setting.microbatches_per_message, setting.max_in_flight or 0
    return *way, setting.num_microbatches


@dataclass(frozen=True)
class Plan:
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
