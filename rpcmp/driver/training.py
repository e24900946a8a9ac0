"""The training loop: epochs, steps, evaluations, and what is told about them.

The next step is begun before this one has ended: its data is loaded and its first forwards run
while the stages that are further back still finish. What the stages have to say of a step comes with
the next one's first answer, so a step is reported then.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rpcmp import data, factory
from rpcmp.config import Config, DataConfig
from rpcmp.data import Batches
from rpcmp.driver.evaluation import Evaluation, mean
from rpcmp.driver.group import STEPS_AHEAD, Group, Round
from rpcmp.errors import ConfigError, FactoryError
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


class Training:
    """One run of a config.

    Args:
        config: the job.
        datasets: its data.
        group: the stages.
        report: told of every event.
        stop: set by somebody else, ends the run after its current step.
    """

    def __init__(
        self,
        config: Config,
        datasets: Datasets,
        group: Group,
        report: Report,
        stop: threading.Event,
    ) -> None:
        self._config = config
        self._datasets = datasets
        self._group = group
        self._report = report
        self.step = 0
        self.loss = float("nan")
        self.metrics: dict[str, float] = {}
        self._stop = stop
        self._untold: tuple[_Step, float, float] | None = None
        self._ended = 0.0

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
        losses: list[float] = []
        self._ended = time.perf_counter()
        under_way: deque[tuple[_Step, Round]] = deque()
        for step in self._mini_batches():
            under_way.append((step, self._start(step)))
            must_end = step.ends_epoch or step.number == self.total_steps() or self._stop.is_set()
            while under_way and (must_end or len(under_way) == STEPS_AHEAD):
                losses.append(self._finish(*under_way.popleft()))
            if must_end:
                self._settle()
            if step.ends_epoch:
                self._end_epoch(step.epoch, losses, evaluate)
                losses = []
            if self._stop.is_set():
                return
        if evaluate:
            self._evaluate(step.epoch)
            self._write_report()

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

    def _finish(self, step: _Step, started: Round) -> float:
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
        return trained.loss

    def _settle(self) -> None:
        """Wait until all stages have done all steps, and report the last one."""
        self._tell(self._group.settle())

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

    def _end_epoch(self, epoch: int, losses: list[float], evaluate: bool) -> None:
        if self._config.scheduler_interval == "epoch":
            self._group.optimizer.step_scheduler(sum(losses) / len(losses))
        every = self._config.evaluate_every
        last = self.step == self.total_steps()
        if evaluate and every and epoch % every == 0 and not last and not self._stop.is_set():
            self._evaluate(epoch)

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
