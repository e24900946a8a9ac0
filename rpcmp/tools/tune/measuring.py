"""The settings as they are measured: on one group, which changes from one to the other.

A group for each setting would take seconds to start, memory for all of them at once, and more than
one job at a time from every stage server. So the same processes take a new setting between two
steps. Training just goes on meanwhile; nobody looks at the parameters.

What a sweep has measured, and what can be told from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, Protocol

from rpcmp.config.schema import Config, ScheduleOptions
from rpcmp.errors import ConfigError
from rpcmp.job.segments import Segments
from rpcmp.tools.bench.statistics import Estimate, is_conclusive, paired_ratio

SETTLE_STEPS = 1
"""After a change, before the clock counts: other sizes of memory, threads that are new."""


class Measurement(NamedTuple):
    """Seconds of a step.

    Attributes:
        step: from begin to end.
        busiest_stage: in which the busiest stage computes: what the step takes without a bubble.
    """

    step: float
    busiest_stage: float


class Runner(Protocol):
    """Trains under any of the settings."""

    async def run(self, setting: ScheduleOptions, steps: int) -> Measurement:
        """Train `steps` steps under `setting`; returns their mean."""


class GroupRunner:
    """Trains them by the way of `rpcmp drive`.

    Args:
        config: the job.
        settings: all that are to be measured.
        connect: addresses of running stage servers; see rpcmp.job.server_pool.ServerPool.
    """

    def __init__(
        self,
        config: Config,
        settings: Sequence[ScheduleOptions],
        connect: Sequence[str] | None = None,
    ) -> None:
        self._segments = Segments(plain(config), connect, settings)

    async def start(self) -> None:
        """Bring the group to life; see Segments."""
        await self._segments.start()

    async def run(self, setting: ScheduleOptions, steps: int) -> Measurement:
        """See Runner."""
        self._segments.change_to(setting)
        await self._segments.run(SETTLE_STEPS)
        done = await self._segments.run(steps)
        return Measurement(done.seconds, max(done.busy_seconds.values()))

    async def close(self) -> None:
        """End whatever runs and free every server."""
        await self._segments.close()


def plain(config: Config) -> Config:
    """The job with train steps only, on mini-batches of one size.

    Clipping stays, since the stages wait for it; a learning-rate scheduler goes, since it may end
    after the steps that it was made for.

    Raises:
        ConfigError: there is no `[data]`, or the replicas' shares are not known.
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
    """What was measured of one setting.

    Attributes:
        setting: which one.
        warm_up: one rough measure, which counts until there is a round; empty: not measured.
        measured: in the order of the rounds.
    """

    setting: ScheduleOptions
    warm_up: list[Measurement] = field(default_factory=list)
    measured: list[Measurement] = field(default_factory=list)

    @property
    def counted(self) -> list[Measurement]:
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
    def recommended(self) -> ScheduleOptions:
        """What the config should say."""
        return self.best.setting if self.is_faster else self.own.setting

    def against_best(self, one: SettingTimes) -> Estimate:
        """How much slower than the best a setting is, in the rounds that both have."""
        both = common_rounds([one, self.best])
        return paired_ratio(one.seconds_of(both), self.best.seconds_of(both))


def common_rounds(series: Sequence[SettingTimes]) -> int:
    """How many rounds all of them have."""
    return min(len(one.measured) for one in series)


def is_less(ratio: Estimate) -> bool:
    """Whether the ratio is known to lie below one."""
    return ratio.high < 1 and is_conclusive(ratio)


def is_more(ratio: Estimate) -> bool:
    """Whether the ratio is known to lie above one."""
    return ratio.low > 1 and is_conclusive(ratio)
