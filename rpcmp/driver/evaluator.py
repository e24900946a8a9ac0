"""Evaluations of a run.

Whether one follows a step depends only on the step's number, never on faults or resumptions, so
every run of a config is evaluated after the same steps.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rpcmp.config.schema import Config
from rpcmp.driver.datasets import MiniBatches
from rpcmp.driver.evaluation import Evaluation, Metrics, mean
from rpcmp.driver.rounds import Batch
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import ConfigError, JobError, StageError, WorkerDiedError, WorkerHungError
from rpcmp.process.activity import Activity


class Evaluator:
    """Evaluates the stages on the `test` dataset.

    Args:
        config: the job.
        test: the dataset; None: there are no evaluations.
        group: the stages.
        metrics: the metrics that the driver computes.
        stop: aborts an evaluation if another thread sets it.
        activity: records what the driver does.
    """

    def __init__(
        self,
        config: Config,
        test: MiniBatches | None,
        group: StageGroup,
        metrics: Metrics,
        stop: threading.Event,
        activity: Activity,
    ) -> None:
        self._config = config
        self._test = test
        self._group = group
        self._metrics = metrics
        self._stop = stop
        self._activity = activity

    def is_due(self, step: int, epoch: int, ends_epoch: bool) -> bool:
        """Return whether an evaluation follows `step`; one always follows the run's last step."""
        if self._test is None:
            return False
        steps, epochs = self._config.evaluate_every_steps, self._config.evaluate_every_epochs
        if steps is not None and step % steps == 0:
            return True
        return ends_epoch and epochs > 0 and epoch % epochs == 0

    def rehearse(self) -> str:
        """Evaluate one mini-batch before the first step, so that an error does not cost an epoch.

        The last mini-batch is tried as well if it is smaller, since code may need several samples.

        Returns:
            A warning about a metric whose `compute` raised, which may work on the whole dataset;
            otherwise an empty string.

        Raises:
            ConfigError: the model, the loss or a metric's `update` raised, a metric did not return
                numbers, or a metric that the config watches is not among the results.
        """
        if self._test is None:
            return ""
        self._activity.start("evaluation", 0, 0)
        first = self._try("first", self._test.first())
        warning = self._try_results(first)
        if self._test.fewest < first.num_samples:
            self._activity.start("evaluation", 0, 1)
            self._try("last", next(self._test.epoch(1, len(self._test) - 1)))
        return warning

    def _try(self, which: str, batch: Batch) -> Evaluation:
        try:
            self._metrics.reset()
            return self._group.evaluate(batch, 0, self._metrics)
        except (WorkerDiedError, WorkerHungError):
            raise
        except JobError as error:
            where = f"\n{error.traceback.rstrip()}" if isinstance(error, StageError) else ""
            raise ConfigError(
                f"an evaluation fails, tried on the {which} mini-batch of data.test before the "
                f"first step: {error}{where}"
            ) from error

    def _try_results(self, part: Evaluation) -> str:
        """Return a warning if a metric's `compute` raised; it may need more samples."""
        try:
            self._values([part])
        except JobError as error:
            reason = str(error).partition("\n")[0]
            return (
                f"{reason}; tried on one mini-batch of data.test before the first step. If it "
                "fails on the whole of data.test as well, the first evaluation ends the run"
            )
        return ""

    def run(self, step: int, epoch: int) -> dict[str, float] | None:
        """Return the loss and all metrics of the whole dataset, by name; None if stopped.

        Raises:
            StageError: the user's code raised at a stage.
            JobError: a metric of the driver raised.
            ConfigError: a metric that the config watches is not among the results.
        """
        if self._test is None:
            return None
        parts: list[Evaluation] = []
        self._metrics.reset()
        for index, batch in enumerate(self._test.epoch(epoch)):
            if self._stop.is_set():
                return None
            self._activity.start("evaluation", step, index)
            parts.append(self._group.evaluate(batch, step, self._metrics))
        return self._values(parts)

    def _values(self, parts: Sequence[Evaluation]) -> dict[str, float]:
        total = mean(parts)
        values = {"loss": total.loss, **total.metrics, **self._metrics.compute()}
        for key, metric in self._config.watched.items():
            if metric not in values:
                raise ConfigError(
                    f"{key} = {metric!r}: an evaluation gives {', '.join(values)}; name one of them"
                )
        return values
