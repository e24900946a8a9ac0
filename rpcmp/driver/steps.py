"""The mini-batches of a run, one after the other, and where in it each of them is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from rpcmp.config import Config
from rpcmp.driver.datasets import Datasets, total_steps
from rpcmp.driver.rounds import Batch
from rpcmp.process.activity import Activity


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


class Steps:
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
        self._activity.begin("data", number + 1)
        return time.perf_counter()
