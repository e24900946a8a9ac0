"""Evaluations of a run: when they are due, the rehearsal before the first step, and their loop.

Whether an evaluation follows a step depends only on the step's number, never on faults or
resumptions, so every run of a config is evaluated after the same steps.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from rpcmp.config.schema import Config
from rpcmp.data.streams import StreamPass
from rpcmp.driver.datasets import EvaluationData
from rpcmp.driver.evaluation import Evaluation, Metrics, mean
from rpcmp.driver.rounds import Batch
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import ConfigError, JobError, StageError, WorkerDiedError, WorkerHungError
from rpcmp.process.activity import Activity


class Evaluator:
    """Evaluates the stages on the `test` dataset.

    Args:
        test: the dataset; None: there are no evaluations.
        stop: aborts an evaluation if another thread sets it.
    """

    def __init__(
        self,
        config: Config,
        test: EvaluationData | None,
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
        """
        if self._test is None:
            return ""
        self._activity.start("evaluation", 0, 0)
        first = self._try("first", self._test.first())
        warning = ""
        try:
            self._values([first])
        except JobError as error:
            reason = str(error).partition("\n")[0]
            warning = (
                f"{reason}; tried on one mini-batch of data.test before the first step. If it "
                "fails on the whole of data.test as well, the first evaluation ends the run"
            )
        if not isinstance(self._test, StreamPass) and self._test.fewest < first.num_samples:
            self._activity.start("evaluation", 0, 1)
            rest: Iterator[Batch] = self._test.epoch(1, len(self._test) - 1)
            self._try("last", next(rest))
        return warning

    def _try(self, which: str, batch: Batch) -> Evaluation:
        try:
            self._metrics.reset()
            return self._group.evaluate(batch, 0, self._metrics)
        except (WorkerDiedError, WorkerHungError):
            raise
        except JobError as error:
            text = f"\n{error.traceback.rstrip()}" if isinstance(error, StageError) else ""
            raise ConfigError(
                f"an evaluation fails, tried on the {which} mini-batch of data.test before the "
                f"first step: {error}{text}"
            ) from error

    def run(self, step: int, epoch: int) -> dict[str, float] | None:
        """Return the loss and all metrics of the whole dataset, by name; None if stopped."""
        if self._test is None:
            return None
        parts: list[Evaluation] = []
        self._metrics.reset()
        batches: Iterator[Batch] = self._test.epoch(epoch)
        for index, batch in enumerate(batches):
            if self._stop.is_set():
                return None
            self._activity.start("evaluation", step, index)
            parts.append(self._group.evaluate(batch, step, self._metrics))
        return self._values(parts)

    def _values(self, parts: Sequence[Evaluation]) -> dict[str, float]:
        total = mean(parts)
        if total.weight == 0:
            raise JobError(
                "data.test weighs nothing, so its loss is a mean over nothing: `loss_weight` gives "
                f"0 for each of its {total.num_samples} samples"
            )
        values = {"loss": total.loss, **total.metrics, **self._metrics.compute()}
        for key, metric in self._config.decisive_metrics.items():
            if metric not in values:
                raise ConfigError(
                    f"{key} = {metric!r}: an evaluation gives {', '.join(values)}; name one of them"
                )
        return values
