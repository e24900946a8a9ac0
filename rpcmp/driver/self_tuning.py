"""Find the fastest schedule options while a run trains.

    first     a block of steps under the options that the run starts with
    search    a simulation with the times measured there ranks the others, and the most promising
              one is tried: a block of steps and, if they were faster, one of each of both again
    then      the best is kept, until steps take longer or shorter than they did: another search

No option changes a bit (see rpcmp.pipelining.schedule), so trying costs time alone: of some blocks
that are slower, and of a pipeline that drains before each change. What is predicted to be slower is
not tried, nor what would not pay for its trial in the steps that are left, nor what needs memory
that is not there. After a fault, options that were just being tried are not tried again, and the
search begins later each time: what it tries may be why.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.driver.progress import TrainingProgress
from rpcmp.driver.stage_group import StageGroup
from rpcmp.observability.events import Event, ScheduleEvent, StepEvent
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.calibration import Calibration, MeasuredSteps, summarize
from rpcmp.pipelining.setting_grid import SETTLE_STEPS
from rpcmp.worker.stage import Stage

WARM_STEPS = 2
"""First steps of a group, which touch memory and code for the first time."""

BLOCK_SECONDS = 0.15
FEWEST_STEPS = 3
MOST_STEPS = 8
"""Of a block: as many steps as BLOCK_SECONDS have, within these limits."""

FASTER = 0.97
"""What a step must take at most, in times of the best so far, to be called faster."""

PAYS_BACK = 10.0
"""Steps' worth of time that options must be predicted to save in the rest of the run: their trial
may cost as much."""

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

MEMORY_SHARE = 0.25
"""The part of a device's free memory that other options may take in all."""


class Memory(NamedTuple):
    """The memory of one worker.

    Attributes:
        place: equal for workers that share it.
        most: bytes of the worker so far, at its peak.
        used: those of them that it has taken since it was built.
        free: bytes that nobody uses; None: unknown.
    """

    place: str
    most: int
    used: int
    free: int | None


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
        self._workers = {worker.label: worker for worker in config.workers}
        self._free: dict[str, int] = {}  # the least so far, by place
        self._samples = 0
        self._steps: list[StepEvent] = []
        self._counts_after = before.step + WARM_STEPS
        self._measured: dict[ScheduleOptions, float] = {}
        fastest, in_trial = before.options[:1], before.options[1:]
        others = (one for one in options if one.model_dump() not in in_trial)
        self._options = [config.options, *others]
        known = (one for one in self._options if [one.model_dump()] == fastest)
        self._best = self.current = next(known, self._options[0])
        self._restarts = restarts
        self._held = [cost_model.held(self._under(self.current))]
        if self.current != config.options:
            group.reschedule(self.current.on(config))
        self._course = self._run()
        self._wanted = next(self._course)

    @property
    def known(self) -> list[dict[str, Any]]:
        """What the next group of the run has to know; see `TrainingProgress.options`."""
        in_trial = [self._wanted] if self._wanted != self._best else []
        return [options.model_dump() for options in (self._best, *in_trial)]

    @property
    def is_changing(self) -> bool:
        """Whether the next step needs other options; `change` once the pipeline has drained."""
        return self._wanted != self.current

    def change(self, next_step: int) -> None:
        """Change the group's options before step `next_step`."""
        self.current = self._wanted
        self._held.append(cost_model.held(self._under(self.current)))
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
            block = summarize(self._config, self._steps)
            self._steps.clear()
            self._wanted = self._course.send(block)

    def close(self) -> None:
        """Report what the search has found until now, if it has tried anything."""
        measured, self._measured = self._measured, {}
        if len(measured) > 1:
            words = {options.without_count: seconds for options, seconds in measured.items()}
            keys = self._best.model_dump(exclude={"num_microbatches"})
            chosen = self._best.without_count
            self._report(ScheduleEvent(step=self._step, chosen=chosen, measured=words, **keys))

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
            self.close()
            block = yield from self._watch(patience)
            patience *= 2

    def _search(self, block: MeasuredSteps) -> Generator[ScheduleOptions, MeasuredSteps, None]:
        measured = self._measured = {self._best: block.step_s}
        predict = _predictor(self._under, self._best, block)
        while len(measured) <= MOST_TRIED:
            untried = [one for one in self._options if one not in measured]
            candidate = self._most_promising(untried, predict, block)
            if candidate is None:
                return
            first = yield candidate
            measured[candidate] = first.step_s
            if first.step_s >= FASTER * block.step_s:
                continue
            block = yield self._best
            second = yield candidate
            measured |= {self._best: block.step_s, candidate: second.step_s}
            if second.step_s < FASTER * block.step_s:
                self._best, block = candidate, second
                predict = _predictor(self._under, self._best, block)

    def _most_promising(
        self,
        untried: Sequence[ScheduleOptions],
        predict: Callable[[ScheduleOptions], float],
        block: MeasuredSteps,
    ) -> ScheduleOptions | None:
        """Return the fastest options by prediction; None if trying them is not worth it."""
        left = self._total - self._step
        if not untried or left < PAYS_BACK or block.data_share > MOST_WAITING:
            return None
        limit = min(FASTER, 1.0 - PAYS_BACK / left) * block.step_s
        ranked = sorted((one for one in untried if predict(one) < limit), key=predict)
        memory = self._memory() if ranked else {}
        return next((one for one in ranked if self._fits(one, memory)), None)

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

    def _memory(self) -> dict[str, Memory]:
        """Return the memory of each worker, by label."""
        taken = self._group.workers.everywhere(Stage.memory)
        free = self._group.workers.everywhere(Stage.free_memory)
        return {
            label: Memory(place, taken[label]["peak"], taken[label]["peak"] - idle, bytes_left)
            for label, (place, bytes_left) in free.items()
            for idle in [taken[label]["idle"]]
        }

    def _fits(self, options: ScheduleOptions, memory: Mapping[str, Memory]) -> bool:
        """Return whether every worker may hold as many micro-batches as the options let it.

        All that a worker has taken since it was built counts as their activations.
        """
        held = cost_model.held(self._under(options))
        more: defaultdict[str, float] = defaultdict(float)  # than the group has started with
        for label, own in memory.items():
            stage = self._workers[label].stage
            before = max(each[stage] for each in self._held)
            per_microbatch = own.used / before
            limit = self._config.stage(self._workers[label].stage_index).memory_bytes
            extra = per_microbatch * max(0, held[stage] - before)
            if limit is not None and extra and own.most + extra > limit:
                return False
            more[own.place] += per_microbatch * max(0, held[stage] - self._held[0][stage])
        for own in memory.values():
            free = own.free or 0
            self._free[own.place] = min(self._free.get(own.place, free), free)
        return all(extra <= MEMORY_SHARE * self._free[place] for place, extra in more.items())


def _predictor(
    under: Callable[[ScheduleOptions], Config], best: ScheduleOptions, block: MeasuredSteps
) -> Callable[[ScheduleOptions], float]:
    """Return a function that predicts the seconds of a step.

    Its results are remembered: with many stages and micro-batches a simulation takes tenths of a
    second.

    Args:
        under: returns the job under given options.
        best: the options of `block`.
    """

    @functools.cache
    def calibration() -> Calibration:
        return Calibration.fit(under(best), block)

    @functools.cache
    def predict(options: ScheduleOptions) -> float:
        return calibration().step_seconds(under(options))

    return predict
