"""Measure settings on one group of workers, and the results of a sweep.

A group per setting would take seconds to start, memory for all of them at once, and more than one
job at a time from every stage server. So the same processes take a new setting between two steps.
Training just goes on; the parameters do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

from rpcmp.config.schema import Config, ScheduleOptions
from rpcmp.errors import ConfigError
from rpcmp.job.segments import Segments
from rpcmp.tools.measurement import Estimate, is_conclusive, paired_ratio

SETTLE_STEPS = 1
"""Steps after a change before the clock counts: memory of other sizes, new threads."""


class Measurement(NamedTuple):
    """Seconds of a step.

    Attributes:
        step: from start to end.
        busiest_stage: in which the busiest stage computes: the step's time without a bubble.
    """

    step: float
    busiest_stage: float


class Runner(Protocol):
    async def run(self, setting: ScheduleOptions, steps: int) -> Measurement:
        """Train `steps` steps under `setting` and return their mean."""


class GroupRunner:
    """Runner that trains as `rpcmp drive` does.

    Args:
        connect: addresses of running stage servers; see rpcmp.job.server_pool.ServerPool.
    """

    def __init__(
        self,
        config: Config,
        settings: Sequence[ScheduleOptions],
        connect: Sequence[str] | None = None,
    ) -> None:
        self._segments = Segments(plain_training(config), connect, settings)

    async def start(self) -> None:
        await self._segments.start()

    async def run(self, setting: ScheduleOptions, steps: int) -> Measurement:
        self._segments.change_to(setting)
        await self._segments.run(SETTLE_STEPS)
        done = await self._segments.run(steps)
        return Measurement(done.seconds, max(done.busy_seconds.values()))

    async def close(self) -> None:
        await self._segments.close()


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
        """Median of the seconds in which the busiest stage computes."""
        return median(each.busiest_stage for each in self.counted)

    def seconds_of(self, rounds: int) -> list[float]:
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
        """Describe what the figures come from."""
        if not self.rounds:
            return "one step each, in the warm-up alone"
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        return f"{self.rounds} interleaved round{'s' * (self.rounds > 1)} of {steps}"

    @property
    def is_faster(self) -> bool:
        """Whether the best setting is known to be faster than the config's own."""
        return self.confirmed is not None and is_less(self.confirmed)

    @property
    def recommended(self) -> ScheduleOptions:
        """The setting that the config should have."""
        return self.best.setting if self.is_faster else self.own.setting

    def against_best(self, one: SettingTimes) -> Estimate:
        """Estimate how much slower than the best a setting is, in the rounds that both have."""
        both = common_rounds([one, self.best])
        return paired_ratio(one.seconds_of(both), self.best.seconds_of(both))


def common_rounds(series: Sequence[SettingTimes]) -> int:
    return min(len(one.measured) for one in series)


def is_less(ratio: Estimate) -> bool:
    return ratio.high < 1 and is_conclusive(ratio)


def is_more(ratio: Estimate) -> bool:
    return ratio.low > 1 and is_conclusive(ratio)
