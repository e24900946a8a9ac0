"""The mini-batches of a run, one after the other, and where in it each of them is.

What a run tells of a step: by the driver when it has ended, by the stages a step later.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.driver.datasets import Datasets, total_steps
from rpcmp.driver.loss_scaler import ScalerState
from rpcmp.driver.rounds import Batch
from rpcmp.process.activity import Activity
from rpcmp.process.channel import Message
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


def of_driver(step: Step, loss: float, seconds: float) -> Message:
    """All but what the stages have to say of it.

    Args:
        step: which.
        loss: the mini-batch's.
        seconds: since the end of the step before.
    """
    return {
        "event": "step",
        "step": step.number,
        "epoch": step.epoch,
        "loss": loss,
        "samples_per_s": step.batch.num_samples / seconds,
        "step_s": seconds,
        "data_share": step.data_seconds / seconds,
        "busy": {},
        "busy_seconds": {},
        "learning_rate": None,
        "learning_rates": {},
    }


def of_scaling(before: ScalerState, after: ScalerState) -> Message:
    """The part about a loss that was scaled.

    Args:
        before, after: the scaler's state, before and after the step.
    """
    return {
        "loss_scale": before.scale,
        "is_skipped": after.skipped > before.skipped,
        "skipped_steps": after.skipped,
    }


def of_stages(
    event: Message, workers: Sequence[Member], stages: Mapping[str, StepReport]
) -> Message:
    """`event` with what the stages say.

    Args:
        event: from `of_driver`.
        workers: in the order in which they are named.
        stages: what they have reported, by the workers' labels; not by all of them.
    """
    told = {worker.label: stages[worker.label] for worker in workers if worker.label in stages}
    rates = {label: of.learning_rate for label, of in told.items()}
    groups = {label: of.learning_rates for label, of in told.items() if len(of.learning_rates) > 1}
    return {
        **event,
        **({"group_learning_rates": groups} if groups else {}),
        "busy_seconds": {label: dict(of.busy_seconds) for label, of in told.items()},
        "busy": {
            label: sum(of.busy_seconds.values()) / event["step_s"] for label, of in told.items()
        },
        "learning_rates": rates,
        "learning_rate": next((rate for rate in rates.values() if rate is not None), None),
    }
