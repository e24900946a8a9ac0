"""Find the fastest schedule options while a run trains.

    first     a block of steps under the options that the run starts with
    search    a simulation with the times measured there ranks the others, and the most promising
              one is tried: a block of steps and, if they were faster, one of each of both again
    then      the best is kept, until steps take longer or shorter than they did: another search

No option changes a bit (see rpcmp.pipelining.schedule), so trying costs time alone: of some blocks
that are slower, and of a pipeline that drains before each change. What is predicted to be slower is
not tried, nor what would not pay for its trial in the steps that are left, nor what needs memory
that is not there.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple

from rpcmp.config.schedule_options import ScheduleOptions
from rpcmp.config.schema import Config
from rpcmp.driver.progress import TrainingProgress
from rpcmp.driver.stage_group import StageGroup
from rpcmp.observability.events import Event, ScheduleEvent, StepEvent
from rpcmp.pipelining import cost_model
from rpcmp.pipelining.simulation import ActionTimes
from rpcmp.worker.stage import Stage

WARM_STEPS = 2
"""First steps of a group, which touch memory and code for the first time."""

SETTLE_STEPS = 1
"""Steps after the pipeline has drained, or after a change, which are not typical."""

BLOCK_SECONDS = 0.15
FEWEST_STEPS = 3
MOST_STEPS = 8
"""Of a block: as many steps as BLOCK_SECONDS have, within these limits."""

FASTER = 0.97
"""What a step must take at most, in times of the best so far, to be called faster."""

PAYS_BACK = 10.0
"""Steps' worth of time that options must be predicted to save in the rest of the run: their trial
takes about as much."""

MOST_TRIED = 6
"""Options that a search tries."""

CHANGED = 1.25
"""How much longer or shorter steps must take, for a while, before there is another search."""

FIRST_PATIENCE = 3
"""That while, in blocks; it doubles with each search."""

MEMORY_SHARE = 0.25
"""The part of a device's free memory that other options may take in all."""

BISECTIONS = 10


class Memory(NamedTuple):
    """The memory of one worker.

    Attributes:
        place: equal for workers that share it.
        used: most bytes so far beyond those before the first step.
        free: bytes that nobody uses; None: unknown.
    """

    place: str
    used: int
    free: int | None


class Block(NamedTuple):
    """Consecutive steps under the same options.

    Attributes:
        step_s: their median, in seconds.
        busy: seconds per step in which the workers of a stage compute, all together, by kind of
            action; see `StepReport.busy_seconds`.
    """

    step_s: float
    busy: Mapping[str, Mapping[str, float]]


class SelfTuning:
    """The options of one group's steps.

    Args:
        config: the job.
        options: to choose from, see `setting_grid.options_to_try`; empty: only the config's.
        before: the progress before the group's first step.
        total: number of steps of the run.
        report: called with what a search has found.

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
    ) -> None:
        self._config, self._group, self._report = config, group, report
        self._options = options or [config.options]
        self._total, self._step = total, before.step
        self._stage_of = {worker.label: worker.stage for worker in config.workers}
        self._samples = 0
        self._steps: list[StepEvent] = []
        self._counts_after = before.step + WARM_STEPS
        self._measured: dict[ScheduleOptions, float] = {}
        known = (each for each in self._options if each.model_dump_json() == before.options)
        self._best = self.current = next(known, self._options[0])
        self._held = [cost_model.held(self._under(self.current))]
        if self.current != self._options[0]:
            group.reschedule(self.current.on(config))
        self._course = self._run()
        self._is_searching = False
        self._wanted = next(self._course)

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
            block = Block(statistics.median(e.step_s for e in self._steps), self._busy())
            self._steps.clear()
            self._wanted = self._course.send(block)
            if not self._is_searching:
                self.close()

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

    def _busy(self) -> dict[str, dict[str, float]]:
        busy: dict[str, defaultdict[str, float]] = {
            stage: defaultdict(float) for stage in self._config.stage_names
        }
        for event in self._steps:
            for label, kinds in event.busy_seconds.items():
                for kind, seconds in kinds.items():
                    busy[self._stage_of[label]][kind] += seconds / len(self._steps)
        return {stage: dict(kinds) for stage, kinds in busy.items()}

    def _run(self) -> Generator[ScheduleOptions, Block, None]:
        patience = FIRST_PATIENCE
        block = yield self._best
        while True:
            self._is_searching = True
            yield from self._search(block)
            self._is_searching = False
            block = yield from self._watch(patience)
            patience *= 2

    def _search(self, block: Block) -> Generator[ScheduleOptions, Block, None]:
        memory = self._memory() if len(self._options) > 1 else {}
        measured = self._measured = {self._best: block.step_s}
        while len(measured) <= MOST_TRIED:
            untried = [
                one for one in self._options if one not in measured and self._fits(one, memory)
            ]
            candidate = self._most_promising(untried, block)
            if candidate is None:
                return
            first = yield candidate
            measured[candidate] = first.step_s
            if first.step_s >= FASTER * block.step_s:
                continue
            block = yield self._best
            second = yield candidate
            if second.step_s < FASTER * block.step_s:
                self._best, block = candidate, second

    def _most_promising(
        self, untried: Sequence[ScheduleOptions], block: Block
    ) -> ScheduleOptions | None:
        """Return the fastest options by prediction; None if trying them is not worth it."""
        if not untried:
            return None
        predict = _predictor(self._under(self._best), block)
        by_seconds = {one: predict(self._under(one)) for one in untried}
        fastest = min(by_seconds, key=by_seconds.__getitem__)
        if by_seconds[fastest] >= FASTER * block.step_s:
            return None
        saved = 1.0 - by_seconds[fastest] / block.step_s
        return fastest if saved * (self._total - self._step) >= PAYS_BACK else None

    def _watch(self, patience: int) -> Generator[ScheduleOptions, Block, Block]:
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
            label: Memory(free[label][0], each["peak"] - each["idle"], free[label][1])
            for label, each in taken.items()
        }

    def _fits(self, options: ScheduleOptions, memory: Mapping[str, Memory]) -> bool:
        """Return whether every worker may hold as many micro-batches as the options let it.

        All that a worker has taken since its first step counts as their activations.
        """
        held = cost_model.held(self._under(options))
        more: defaultdict[str, float] = defaultdict(float)
        for label, own in memory.items():
            stage = self._stage_of[label]
            before = max(each[stage] for each in self._held)
            extra = own.used * max(0, held[stage] - before) / before
            limit = self._config.stage(self._config.stage_names.index(stage)).memory_bytes
            if extra and (own.free is None or (limit is not None and own.used + extra > limit)):
                return False
            more[own.place] += extra
        free = {own.place: own.free for own in memory.values() if own.free is not None}
        return all(extra <= MEMORY_SHARE * free.get(place, 0) for place, extra in more.items())


def _predictor(config: Config, block: Block) -> Callable[[Config], float]:
    """Return a function that predicts the seconds of a step under other options.

    What a message costs is what makes the simulation of the measured options take as long as they
    did. So it stands for all that stages do besides their actions, and for cores that they share.

    Args:
        config: the job under the options of `block`.
    """
    times = {name: _times(config, name, busy) for name, busy in block.busy.items()}
    updates = {name: busy.get("O", 0.0) for name, busy in block.busy.items()}

    def seconds(under: Config, message_s: float) -> float:
        return cost_model.step_seconds(under, times, updates, message_s)

    least, most = 0.0, block.step_s
    for _ in range(BISECTIONS):
        message_s = (least + most) / 2
        if seconds(config, message_s) < block.step_s:
            least = message_s
        else:
            most = message_s
    return lambda under: seconds(under, least)


def _times(config: Config, stage: str, busy: Mapping[str, float]) -> ActionTimes:
    """Return the measured times of one micro-batch, as if the replicas were one fast host."""
    replicas = config.stage(config.stage_names.index(stage)).num_replicas
    forward, backward, weight = (busy.get(kind, 0.0) for kind in "FBW")
    if not weight:  # both gradients were computed together; their products are of equal size
        backward, weight = backward / 2, backward / 2
    return ActionTimes(forward, backward, weight).scaled(
        1 / (config.num_microbatches * replicas * replicas)
    )
