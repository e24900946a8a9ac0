"""The mini-batches of a run, one after the other, and where in it each of them is.

The event of a step: the driver knows its part when the step has ended, the stages a step later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.driver.datasets import Datasets, total_steps
from rpcmp.driver.loss_scaler import ScalerState
from rpcmp.driver.rounds import Batch
from rpcmp.observability.events.definitions import StepEvent
from rpcmp.process.activity import Activity
from rpcmp.rpc.messages import StepReport


@dataclass(frozen=True)
class Step:
    """One mini-batch and where in the run it is; all counted from 1.

    Attributes:
        number: the optimizer step.
        epoch: in which it is.
        ends_epoch: whether that epoch has no other after it.
        batch: its samples.
        data_seconds: that the driver has waited for them.
    """

    number: int
    epoch: int
    ends_epoch: bool
    batch: Batch
    data_seconds: float


class StepStream:
    """All steps of a run.

    Args:
        config: the job.
        datasets: its data.
        activity: told when one is loaded.
    """

    def __init__(self, config: Config, datasets: Datasets, activity: Activity) -> None:
        self._config = config
        self._data = datasets.train
        self._activity = activity

    @property
    def total(self) -> int:
        """How many there are."""
        return total_steps(self._config, len(self._data))

    def ends_epoch(self, batch: int) -> bool:
        """Whether an epoch has no mini-batch after this one, counted from 1 in each epoch."""
        return batch == len(self._data)

    def after(self, number: int) -> Iterator[Step]:
        """Those that follow a step, to the end of the run."""
        total, per_epoch = self.total, len(self._data)
        while number < total:
            epoch, first = 1 + number // per_epoch, number % per_epoch
            asked = self._ask(number)
            for batch in self._data.epoch(epoch, first):
                number += 1
                seconds = time.perf_counter() - asked
                yield Step(number, epoch, number % per_epoch == 0, batch, seconds)
                if number == total:
                    return
                asked = self._ask(number)

    def _ask(self, number: int) -> float:
        self._activity.start("data", number + 1)
        return time.perf_counter()


def event_of_driver(
    step: Step, loss: float, seconds: float, scaling: tuple[ScalerState, ScalerState] | None
) -> StepEvent:
    """Return the event of a step, without what only the stages know.

    Args:
        step: the step.
        loss: mean loss of the mini-batch.
        seconds: since the end of the step before.
        scaling: the loss scaler's state before and after the step, with loss scaling.
    """
    event = StepEvent(
        step=step.number,
        epoch=step.epoch,
        loss=loss,
        samples_per_s=step.batch.num_samples / seconds,
        step_s=seconds,
        data_share=step.data_seconds / seconds,
        busy={},
        busy_seconds={},
        learning_rate=None,
        learning_rates={},
    )
    if scaling is None:
        return event
    before, after = scaling
    return replace(
        event,
        loss_scale=before.scale,
        is_skipped=after.skipped > before.skipped,
        skipped_steps=after.skipped,
    )


def with_stage_reports(
    event: StepEvent, workers: Sequence[Member], stages: Mapping[str, StepReport]
) -> StepEvent:
    """Return the event with what the stages have reported of the step.

    Args:
        event: from `event_of_driver`.
        workers: in the order in which they are named.
        stages: the reports, by the workers' labels; a lost worker's is missing.
    """
    reports = {worker.label: stages[worker.label] for worker in workers if worker.label in stages}
    rates = {label: report.learning_rate for label, report in reports.items()}
    groups = {
        label: report.learning_rates
        for label, report in reports.items()
        if len(report.learning_rates) > 1
    }
    busy_seconds = {label: dict(report.busy_seconds) for label, report in reports.items()}
    return replace(
        event,
        group_learning_rates=groups or None,
        busy_seconds=busy_seconds,
        busy={label: sum(of.values()) / event.step_s for label, of in busy_seconds.items()},
        learning_rates=rates,
        learning_rate=next((rate for rate in rates.values() if rate is not None), None),
    )
