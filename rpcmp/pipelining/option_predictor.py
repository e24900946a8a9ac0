"""Predict steps under other schedule options, from steps under those that were tried. Pure."""

from __future__ import annotations

from collections.abc import Callable

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.pipelining.calibration import Calibration, MeasuredSteps


class OptionPredictor:
    """Predicts the seconds of a step under options from steps under others.

    If steps under the same schedule were measured, from these: what it costs to split backwards, no
    other schedule's steps tell. Else from steps under the best. Results are remembered: with many
    stages and micro-batches a simulation takes tenths of a second.

    Args:
        under: returns the job under given options.
        best: the options of `block`.
    """

    def __init__(
        self,
        under: Callable[[ScheduleOptions], Config],
        best: ScheduleOptions,
        block: MeasuredSteps,
    ) -> None:
        self._under, self._best = under, best
        self._known = {best.schedule: (best, block, block.step_s)}
        self._fitted: dict[ScheduleOptions, Calibration] = {}
        self._seconds: dict[tuple[ScheduleOptions, ScheduleOptions], float] = {}

    def learn(
        self, options: ScheduleOptions, block: MeasuredSteps, ratio: float, is_best: bool
    ) -> None:
        """Learn from steps under options, which took `ratio` times as long as the best so far."""
        seconds = ratio * self(self._best)
        if is_best or options.schedule != self._best.schedule:
            self._known[options.schedule] = options, block, seconds
        if is_best:
            self._best = options

    def __call__(self, options: ScheduleOptions) -> float:
        of_best = self._known[self._best.schedule]
        measured, block, seconds = self._known.get(options.schedule, of_best)
        if measured not in self._fitted:
            self._fitted[measured] = Calibration.fit(self._under(measured), block)
        ratio = self._simulated(measured, options) / self._simulated(measured, measured)
        return seconds * ratio

    def _simulated(self, measured: ScheduleOptions, options: ScheduleOptions) -> float:
        key = measured, options
        if key not in self._seconds:
            self._seconds[key] = self._fitted[measured].step_seconds(self._under(options))
        return self._seconds[key]
