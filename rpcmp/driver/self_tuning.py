"""Find the fastest schedule options while a run trains.

    first     a block of steps under the options that the run starts with: the config's own, or what
              is predicted to be the fastest where hosts were measured before
    search    a simulation with the times measured there ranks the others, and the most promising
              one is tried: it and the best so far have turns, a block of steps each, until it is
              clear which is faster, or some turns are over
    then      the best is kept, until steps take longer or shorter than they did: another search

No option changes a bit (see rpcmp.pipelining.schedule), so trying costs time alone: of some blocks
that are slower, and of a pipeline that drains before each change. What is predicted to be slower by
more than predictions err is not tried, nor what would not pay for its trial, and for those that
have failed, in the steps that are left, nor what needs memory that is not there. After a fault,
options that were just being tried are not tried again, and the search begins later each time: what
it tries may be why.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Sequence
from typing import Any

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.driver.progress import TrainingProgress
from rpcmp.driver.stage_group import StageGroup
from rpcmp.driver.trial_memory import TrialMemory
from rpcmp.observability.events import Event, ScheduleEvent, StepEvent
from rpcmp.pipelining.calibration import MeasuredSteps, summarize
from rpcmp.pipelining.option_predictor import OptionPredictor
from rpcmp.pipelining.setting_grid import FASTER, SETTLE_STEPS
from rpcmp.pipelining.simulation import SharedCores

WARM_STEPS = 2
"""First steps of a group, which touch memory and code for the first time."""

BLOCK_SECONDS = 0.15
FEWEST_STEPS = 3
MOST_STEPS = 8
"""Of a block: as many steps as BLOCK_SECONDS have, within these limits."""

NOISE = 0.1
"""How much the times of two blocks differ for other reasons, as a rule."""

FEWEST_TURNS, MOST_TURNS, STEPS_PER_TURN = 2, 4, 100
"""Blocks that options need in a trial to be called faster, and that they have at most, if it is not
clear earlier: one for so many steps that are left."""

UNSURE, MOST_UNSURE = 1.05, 1.25
"""What a step may be predicted to take, in times of the best so far, to be tried where a trial
costs nothing: predictions are off by as much, or by what the trial of faster ones has shown, within
these limits. After a fault it is FASTER."""

TRIAL_STEPS = 6.0
"""What a trial may cost, in steps' worth of time, and as much again for each that has failed: by so
much in the rest of the run the prediction must be below that limit."""

MOST_TRIED = 6
"""Options that a search tries."""

CHANGED = 1.25
"""How much longer or shorter steps must take, for a while, before there is another search."""

FIRST_PATIENCE = 3
"""That while, in blocks; it doubles with each search."""

MOST_WAITING = 0.5
"""The share of a step in which the driver waits for samples, above which nothing is tried: what
takes so long is not the schedule."""

MOST_DELAYS = 12
"""How often the first search may be delayed to twice as late."""


class SelfTuning:
    """The options of one group's steps.

    Args:
        config: the job.
        options: those that it may change to, besides the config's own.
        before: the progress before the group's first step.
        total: number of steps of the run.
        report: called with what a search has found.
        restarts: how many groups of the run were lost before this one.

    Attributes:
        current: the options of the next step.
    """

    def __init__(
        self,
        config: Config,
        group: StageGroup,
        options: Sequence[ScheduleOptions],
        before: TrainingProgress,
        total: int,
        report: Callable[[Event], None],
        restarts: int = 0,
    ) -> None:
        self._config, self._group, self._report = config, group, report
        self._total, self._step = total, before.step
        self._samples = 0
        self._steps: list[StepEvent] = []
        self._counts_after = before.step + WARM_STEPS
        self._measured: dict[ScheduleOptions, float] = {}
        fastest, self._avoided = before.options[:1], before.options[1:]
        everything = [config.options, *options]
        known = (one for one in everything if [one.model_dump()] == fastest)
        self._best = self.current = next(known, config.options)
        self._options = [one for one in everything if one.model_dump() not in self._avoided]
        self._on_trial: ScheduleOptions | None = None
        self._has_block, self._is_closed = before.step > 0, False
        self._may_differ = bool(before.options and options)
        self._restarts = restarts
        self._shared_cores: list[SharedCores] = []
        self._memory = TrialMemory(group, self._under(config.options), self._under(self.current))
        self._course = self._run()
        self._wanted = next(self._course)

    def start(self) -> None:
        """Let the group start with the fastest options that are known, and say which these are."""
        if len(self._options) > 1:
            self._shared_cores = self._group.workers.shared_cores()
        if self.current != self._config.options:
            self._group.reschedule(self.current.on(self._config))
        if self._may_differ:
            self._report_best({})

    @property
    def known(self) -> list[dict[str, Any]]:
        """What the next group of the run has to know; see `TrainingProgress.options`."""
        best, on_trial = self._best, [self.current, self._on_trial]
        if self._is_closed:
            on_trial = []
        elif not self._has_block:  # nor has any group before: they are but predicted
            best = self._config.options
        known = [best.model_dump()]
        others = (one.model_dump() for one in on_trial if one is not None)
        for options in (*others, *self._avoided):
            if options not in known:
                known.append(options)
        return known

    @property
    def is_changing(self) -> bool:
        """Whether the next step needs other options; `change` once the pipeline has drained."""
        return self._wanted != self.current

    def change(self, next_step: int) -> None:
        """Change the group's options before step `next_step`."""
        self.current = self._wanted
        self._memory.use(self._under(self.current))
        self._group.reschedule(self.current.on(self._config))
        self.has_drained(next_step - 1)

    def has_drained(self, step: int) -> None:
        """Leave out the steps after step `step`, after which the pipeline was empty."""
        self._counts_after = max(self._counts_after, step + SETTLE_STEPS)

    def add(self, event: StepEvent) -> None:
        """Add a step, which may end a block of them, and a search."""
        self._step = event.step
        samples = round(event.samples_per_s * event.step_s)
        if self.is_changing or event.step <= self._counts_after or samples < self._samples:
            return
        if samples > self._samples:
            self._samples = samples
            self._steps.clear()
        self._steps.append(event)
        if self._is_block():
            self._has_block = True
            block = summarize(self._config, self._steps, self._shared_cores)
            self._steps.clear()
            self._wanted = self._course.send(block)

    def close(self) -> None:
        """End in good order, with an empty pipeline: what was on trial may be tried again."""
        self._is_closed = True
        self._report_search()

    def _report_search(self) -> None:
        """Report what the search has found until now, if it has tried anything."""
        measured, self._measured = self._measured, {}
        if len(measured) > 1:
            words = {options.without_count: seconds for options, seconds in measured.items()}
            self._report_best(words)

    def _report_best(self, measured: dict[str, float]) -> None:
        keys = self._best.model_dump(exclude={"num_microbatches"})
        chosen = self._best.without_count
        self._report(ScheduleEvent(step=self._step, chosen=chosen, measured=measured, **keys))

    def _is_block(self) -> bool:
        count = len(self._steps)
        is_long = sum(event.step_s for event in self._steps) >= BLOCK_SECONDS
        return count >= MOST_STEPS or (count >= FEWEST_STEPS and is_long)

    def _run(self) -> Generator[ScheduleOptions, MeasuredSteps, None]:
        patience = FIRST_PATIENCE
        for _ in range(2 ** min(self._restarts, MOST_DELAYS)):
            block = yield self._best
        while True:
            yield from self._search(block)
            self._report_search()
            block = yield from self._watch(patience)
            patience *= 2

    def _search(self, block: MeasuredSteps) -> Generator[ScheduleOptions, MeasuredSteps, None]:
        measured = self._measured = {self._best: block.step_s}
        predict = OptionPredictor(self._under, self._best, block)
        failed, unsure = 0, UNSURE
        while len(measured) <= MOST_TRIED:
            untried = [one for one in self._options if one not in measured]
            candidate = self._most_promising(untried, predict, block, failed, unsure)
            if candidate is None:
                return
            self._on_trial, expected = candidate, predict(candidate) / predict(self._best)
            ratio, block, other = yield from self._trial(candidate, block)
            self._on_trial = None
            if ratio >= FASTER:  # it may have been unlucky, as it had few blocks
                failed += 1
                predict.learn(candidate, other, max(expected, ratio - NOISE), is_best=False)
            else:
                predict.learn(candidate, other, ratio, is_best=True)
                unsure = min(MOST_UNSURE, max(unsure, ratio / expected, expected / ratio))
                self._best, block = candidate, other

    def _trial(
        self, candidate: ScheduleOptions, block: MeasuredSteps
    ) -> Generator[ScheduleOptions, MeasuredSteps, tuple[float, MeasuredSteps, MeasuredSteps]]:
        """Let options and the best so far have turns, until it is clear which are faster.

        Args:
            block: the last steps under the best so far.

        Returns:
            What a step takes in times of the best so far; the last steps under these, and under
            `candidate`.
        """
        most = max(FEWEST_TURNS, min(MOST_TURNS, (self._total - self._step) // STEPS_PER_TURN))
        ratios = list[float]()
        while True:
            other = yield candidate
            ratios.append(other.step_s / block.step_s)
            ratio, count = statistics.mean(ratios), len(ratios)
            self._measured |= {self._best: block.step_s, candidate: ratio * block.step_s}
            is_clear = abs(ratio - FASTER) > NOISE / math.sqrt(count)
            may_be_faster = ratio < FASTER and count < FEWEST_TURNS
            if count == most or (is_clear and not may_be_faster):
                return ratio, block, other
            block = yield self._best

    def _most_promising(
        self,
        untried: Sequence[ScheduleOptions],
        predict: Callable[[ScheduleOptions], float],
        block: MeasuredSteps,
        failed: int,
        unsure: float,
    ) -> ScheduleOptions | None:
        """Return the fastest options by prediction; None if trying them is not worth it."""
        left = self._total - self._step
        if not untried or left <= 0 or block.data_share > MOST_WAITING:
            return None
        most = FASTER if self._restarts else unsure
        limit = (most - (1 + failed) * TRIAL_STEPS / left) * predict(self._best)
        ranked = sorted((one for one in untried if predict(one) < limit), key=predict)
        if ranked:
            self._memory.measure()
        return next((one for one in ranked if self._memory.fits(self._under(one))), None)

    def _watch(self, patience: int) -> Generator[ScheduleOptions, MeasuredSteps, MeasuredSteps]:
        """Wait until steps take another time than after the last search; return the last block."""
        usual = yield self._best
        changed = 0
        while True:
            block = yield self._best
            is_usual = usual.step_s / CHANGED <= block.step_s <= usual.step_s * CHANGED
            changed = 0 if is_usual else changed + 1
            if changed == patience:
                return block

    def _under(self, options: ScheduleOptions) -> Config:
        """Return the job under these options, with the micro-batches of its full mini-batches."""
        count = self._group.num_full_microbatches
        return options.on(self._config).model_copy(update={"num_microbatches": count})
