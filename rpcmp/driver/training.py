"""The training loop: epochs, steps, evaluations, and what is told about them.

The next step is begun before this one has ended: its data is loaded and its first forwards run
while the stages further back still finish. What the stages have to say of a step comes with the
next one's first answer, so a step is reported then.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from rpcmp import data, factory
from rpcmp.config import Config, DataConfig
from rpcmp.data import Batches
from rpcmp.driver.evaluation import Evaluation, mean
from rpcmp.driver.group import Group, Round
from rpcmp.driver.tracer import Tracer
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.inflight import STEPS_AHEAD
from rpcmp.microbatch import num_samples
from rpcmp.process.channel import Message
from rpcmp.work import End, StepReport

Report = Callable[[Message], None]


@dataclass(frozen=True)
class Datasets:
    """What a job trains and evaluates on."""

    train: Batches
    test: Batches | None

    @classmethod
    def load(cls, config: Config) -> Datasets:
        """The datasets of `[data]`.

        Raises:
            ConfigError: there is no `[data]`, or a dataset cannot be used.
        """
        section = config.data
        if section is None:
            raise ConfigError("the config has no [data] section, which training from it needs")
        train = data.load(section.train, "data.train", section, config.seed, training=True)
        return cls(train, cls._load_test(section, config.seed))

    def close(self) -> None:
        """End the processes that load samples, where there are any."""
        for batches in (self.train, self.test):
            if batches is not None:
                batches.close()

    @staticmethod
    def _load_test(section: DataConfig, seed: int) -> Batches | None:
        if section.test is None:
            return None
        return data.load(section.test, "data.test", section, seed, training=False)


@dataclass(frozen=True)
class _Step:
    """One mini-batch and where in the run it is; all counted from 1."""

    number: int
    epoch: int
    ends_epoch: bool
    inputs: Any
    targets: Any
    data_seconds: float


class Segment(NamedTuple):
    """Consecutive steps of a run.

    Attributes:
        seconds: of the wall clock.
        cpu_seconds: of the driver process.
        losses: of each step.
    """

    seconds: float
    cpu_seconds: float
    losses: list[float]


class Training:
    """One run of a config.

    Args:
        config: the job.
        datasets: its data.
        group: the stages.
        report: told of every event.
        stop: set by somebody else, ends the run after the steps that are under way.
        tracer: told of every step.
    """

    def __init__(
        self,
        config: Config,
        datasets: Datasets,
        group: Group,
        report: Report,
        stop: threading.Event,
        tracer: Tracer | None = None,
    ) -> None:
        self._config = config
        self._datasets = datasets
        self._group = group
        self._report = report
        self.step = 0
        self.loss = float("nan")
        self.metrics: dict[str, float] = {}
        self._stop = stop
        self._tracer = tracer
        self._under_way: deque[tuple[_Step, Round]] = deque()
        self._untold: tuple[_Step, float, float] | None = None
        self._ended = 0.0
        self._epoch = 1
        self._losses: list[float] = []
        self._segment: list[float] = []
        self._endless = self._mini_batches()

    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        if self._config.steps is not None:
            return self._config.steps
        return (self._config.epochs or 1) * len(self._datasets.train)

    def run(self, evaluate: bool) -> None:
        """Train to the end, or to the end of the step in which it is told to stop.

        Args:
            evaluate: evaluate after epochs and at the end, and write the report.
        """
        self._train(self._mini_batches(), evaluate)
        if evaluate and not self._stop.is_set():
            self._evaluate(self._epoch)
            self._write_report()

    def segment(self, steps: int) -> Segment:
        """Train the next `steps` steps, and wait until all stages have done them.

        Their mini-batches are loaded before the clock starts.
        """
        loaded = list(itertools.islice(self._endless, steps))
        started, cpu = time.perf_counter(), time.process_time()
        self._segment = []
        self._train(loaded, evaluate=False)
        return Segment(time.perf_counter() - started, time.process_time() - cpu, self._segment)

    def _train(self, steps: Iterable[_Step], evaluate: bool) -> None:
        self._ended = time.perf_counter()
        for step in steps:
            self._under_way.append((step, self._start(step)))
            if len(self._under_way) == STEPS_AHEAD:
                self._finish(*self._under_way.popleft())
            if self._must_drain(step, evaluate):
                self._drain()
                self._end_epoch(step, evaluate)
            if self._stop.is_set():
                break
        self._drain()

    def _must_drain(self, step: _Step, evaluate: bool) -> bool:
        """Whether something happens after this step for which all stages must have done it."""
        steps_scheduler = self._config.steps_scheduler("epoch")
        return step.ends_epoch and (steps_scheduler or self._is_evaluation_due(step, evaluate))

    def _is_evaluation_due(self, step: _Step, evaluate: bool) -> bool:
        every = self._config.evaluate_every
        if not evaluate or self._datasets.test is None or every == 0:
            return False
        return step.epoch % every == 0 and step.number != self.total_steps()

    def _drain(self) -> None:
        """Wait until all stages have done all steps, and report them."""
        while self._under_way:
            self._finish(*self._under_way.popleft())
        self._tell(self._group.settle())

    def _mini_batches(self) -> Iterator[_Step]:
        total = self.total_steps()
        per_epoch = len(self._datasets.train)
        number = 0
        for epoch in range(1, 2 + (total - 1) // per_epoch):
            asked = time.perf_counter()
            for inputs, targets in self._datasets.train.epoch(epoch):
                number += 1
                ends_epoch = number % per_epoch == 0
                seconds = time.perf_counter() - asked
                yield _Step(number, epoch, ends_epoch, inputs, targets, seconds)
                if number == total:
                    return
                asked = time.perf_counter()

    def _start(self, step: _Step) -> Round:
        end = End.HOLD if self._config.holds_steps else End.STEP
        return self._group.start_step(step.inputs, step.targets, step.number, end)

    def _finish(self, step: _Step, started: Round) -> None:
        """Wait for a step; reports the one before, of which the stages have now spoken."""
        trained = self._group.finish_step(started)
        self._tell(trained.reports)
        if self._config.holds_steps:
            reports = self._group.end_step(trained.loss)
        now = time.perf_counter()
        self.step, self.loss = step.number, trained.loss
        self._untold = (step, trained.loss, now - self._ended)
        self._ended = now
        if self._config.holds_steps:
            self._tell(reports)
        self._losses = [*(self._losses if step.epoch == self._epoch else []), trained.loss]
        self._epoch = step.epoch
        self._segment.append(trained.loss)
        if self._tracer is not None:
            self._tracer.after_step(step.number)

    def _tell(self, stages: dict[str, StepReport]) -> None:
        """Report the last step that has ended, with what the stages say of it."""
        if self._untold is None:
            return
        step, loss, seconds = self._untold
        self._untold = None
        rates = [stage.learning_rate for stage in stages.values()]
        self._report(
            {
                "event": "step",
                "step": step.number,
                "epoch": step.epoch,
                "loss": loss,
                "samples_per_s": num_samples(step.inputs) / seconds,
                "step_s": seconds,
                "data_share": step.data_seconds / seconds,
                "busy": {
                    name: sum(stages[name].busy_seconds.values()) / seconds
                    for name in self._config.stage_names
                    if name in stages
                },
                "learning_rate": next((rate for rate in rates if rate is not None), None),
            }
        )

    def _end_epoch(self, step: _Step, evaluate: bool) -> None:
        if self._config.scheduler_interval == "epoch":
            self._group.optimizer.step_scheduler(sum(self._losses) / len(self._losses))
        if self._is_evaluation_due(step, evaluate) and not self._stop.is_set():
            self._evaluate(step.epoch)

    def _evaluate(self, epoch: int) -> None:
        if self._datasets.test is None:
            return
        parts: list[Evaluation] = []
        for inputs, targets in self._datasets.test.epoch(epoch):
            if self._stop.is_set():
                return
            parts.append(self._group.evaluate(inputs, targets, self.step))
        total = mean(parts)
        self.metrics = {"loss": total.loss, **total.metrics}
        self._report({"event": "eval", "step": self.step, "epoch": epoch, **self.metrics})

    def _write_report(self) -> None:
        if self._config.report is None or self._stop.is_set():
            return
        write = factory.resolve(self._config.report.callable, "report")
        kwargs = self._config.report.kwargs
        try:
            text = str(write(lambda inputs: self._group.predict(inputs, self.step), **kwargs))
        except Exception as error:
            raise FactoryError(f"report failed: {factory.explain(error)}") from error
        self._report({"event": "report", "text": text})
