"""What a sweep has measured, and what can be told from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from rpcmp.bench.statistics import Estimate, is_telling, paired_ratio
from rpcmp.config import Config
from rpcmp.setting import Setting
from rpcmp.tune.runner import Measured


@dataclass(frozen=True)
class Series:
    """What was measured of one setting.

    Attributes:
        setting: which one.
        warm_up: one rough measure, which counts until there is a round; empty: not measured.
        measured: in the order of the rounds.
    """

    setting: Setting
    warm_up: list[Measured] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)

    @property
    def counted(self) -> list[Measured]:
        """The rounds; the warm-up if there are none."""
        return self.measured or self.warm_up

    @property
    def seconds(self) -> list[float]:
        """Of a step, each time."""
        return [each.step for each in self.counted]

    @property
    def median_s(self) -> float:
        """Of a step."""
        return median(self.seconds)

    @property
    def busiest_stage_s(self) -> float:
        """In which the busiest stage computes in a step; the median."""
        return median(each.busiest_stage for each in self.counted)

    def seconds_of(self, rounds: int) -> list[float]:
        """Of a step in the first `rounds` rounds; in the warm-up if that is 0."""
        return [each.step for each in self.measured[:rounds] or self.warm_up]


@dataclass(frozen=True)
class Tuned:
    """What a sweep found.

    Attributes:
        config: the job.
        rounds, steps: of a setting that was not dropped, and of each round.
        series: of all settings that were measured.
        best: the fastest in the rounds that all settings have which were not dropped.
        own: the config's.
        confirmed: best / own, in rounds after the choice; None if they are the same, or there was
            no time.
        dropped: settings that were measured until they could not win any more.
        unmeasured: settings for which there was no time.
        left_out: settings that need not be measured, and why, a line each.
        is_cut_short: whether the user has stopped it.
    """

    config: Config
    rounds: int
    steps: int
    series: list[Series]
    best: Series
    own: Series
    confirmed: Estimate | None
    dropped: frozenset[Setting]
    unmeasured: list[Setting]
    left_out: list[str]
    is_cut_short: bool = False

    @property
    def basis(self) -> str:
        """What the figures come from."""
        if not self.rounds:
            return "one step each, in the warm-up alone"
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        return f"{self.rounds} interleaved round{'s' * (self.rounds > 1)} of {steps}"

    @property
    def is_faster(self) -> bool:
        """Whether the best setting is known to be faster than the config's own."""
        return self.confirmed is not None and is_less(self.confirmed)

    @property
    def recommended(self) -> Setting:
        """What the config should say."""
        return self.best.setting if self.is_faster else self.own.setting

    def against_best(self, one: Series) -> Estimate:
        """How much slower than the best a setting is, in the rounds that both have."""
        both = common_rounds([one, self.best])
        return paired_ratio(one.seconds_of(both), self.best.seconds_of(both))


def common_rounds(series: Sequence[Series]) -> int:
    """How many rounds all of them have."""
    return min(len(one.measured) for one in series)


def is_less(ratio: Estimate) -> bool:
    """Whether the ratio is known to lie below one."""
    return ratio.high < 1 and is_telling(ratio)


def is_more(ratio: Estimate) -> bool:
    """Whether the ratio is known to lie above one."""
    return ratio.low > 1 and is_telling(ratio)
