"""The training loop: epochs, steps, evaluations, and what is told about them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from rpcmp import data, factory
from rpcmp.config import Config, DataConfig
from rpcmp.data import Batches
from rpcmp.driver.evaluation import Evaluation, mean
from rpcmp.driver.group import Group
from rpcmp.errors import ConfigError, FactoryError
from rpcmp.microbatch import num_samples
from rpcmp.process.channel import Message

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
class _Position:
    """Where in the run a mini-batch is; all counted from 1."""

    step: int
    epoch: int
    ends_epoch: bool


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
        started = time.perf_counter()
        losses: list[float] = []
        for position, inputs, targets in self._mini_batches():
            fetched = time.perf_counter()
            losses.append(self._train_step(position, inputs, targets, started, fetched))
            if position.ends_epoch:
                self._end_epoch(position.epoch, losses, evaluate)
                losses = []
            if self._stop.is_set():
                return
            started = time.perf_counter()
        if evaluate:
            self._evaluate(position.epoch)
            self._write_report()

    def _mini_batches(self) -> Iterator[tuple[_Position, Any, Any]]:
        total = self.total_steps()
        per_epoch = len(self._datasets.train)
        for epoch in range(1, 2 + (total - 1) // per_epoch):
            for inputs, targets in self._datasets.train.epoch(epoch):
                step = self.step + 1
                yield _Position(step, epoch, step % per_epoch == 0), inputs, targets
                if step == total:
                    return

    def _train_step(
        self, position: _Position, inputs: Any, targets: Any, started: float, fetched: float
    ) -> float:
        """One optimizer step; `started` and `fetched` are when its data was asked for and came."""
        optimizer = self._group.optimizer
        self.loss = self._group.forward_backward(inputs, targets, position.step)
        if self._config.max_grad_norm is not None:
            optimizer.clip_grad_norm_(self._config.max_grad_norm)
        stages = optimizer.step()
        if self._config.scheduler_interval == "step":
            optimizer.step_scheduler(self.loss)
        self.step = position.step
        seconds = time.perf_counter() - started
        rates = [stage.learning_rate for stage in stages.values()]
        self._report(
            {
                "event": "step",
                "step": position.step,
                "epoch": position.epoch,
                "loss": self.loss,
                "samples_per_s": num_samples(inputs) / seconds,
                "step_s": seconds,
                "data_share": (fetched - started) / seconds,
                "busy": {name: stage.busy_seconds / seconds for name, stage in stages.items()},
                "learning_rate": next((rate for rate in rates if rate is not None), None),
            }
        )
        return self.loss

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
