"""The mini-batches that a job trains and evaluates on, and the steps of a run that use them.

Samples are loaded by this process or at the stages.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from rpcmp.config.schema import Config
from rpcmp.data.batches import SampleOrder, load_batches, require_enough
from rpcmp.data.index_batches import AHEAD, IndexBatches, RemoteSampler
from rpcmp.driver.rounds import Batch
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import ConfigError
from rpcmp.process.activity import Activity
from rpcmp.rpc.messages import DatasetInfo


class MiniBatches(Protocol):
    """The mini-batches of one dataset; `len` is the number per epoch."""

    def __len__(self) -> int: ...

    @property
    def fewest(self) -> int:
        """Samples of the smallest mini-batch, the last of an epoch."""

    def first(self) -> Batch:
        """Return the first mini-batch of the first epoch, for a trial."""

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the mini-batches of `epoch`, counted from 1, starting at the index `first`."""

    def close(self) -> None:
        """Stop the processes that load samples, if there are any."""


@dataclass(frozen=True)
class Datasets:
    """The mini-batches of a job."""

    train: MiniBatches
    test: MiniBatches | None

    @classmethod
    def load(cls, config: Config) -> Datasets:
        """Load the datasets of `[data]` in this process.

        Raises:
            ConfigError: `[data]` is missing, or a dataset cannot be used.
        """
        section, seed = config.require_data("training"), config.seed
        train = load_batches(section.train, "data.train", section, seed, training=True)
        if section.test is None:
            return cls(train, None)
        return cls(train, load_batches(section.test, "data.test", section, seed, training=False))

    @classmethod
    def at_stages(cls, config: Config, group: StageGroup) -> Datasets:
        """Describe the datasets that the stages have built.

        Raises:
            ConfigError: `[data]` is missing, a dataset is too small, or hosts have different ones.
        """
        section, seed = config.require_data("training"), config.seed
        sizes = _common_sizes(group.dataset_infos())
        num_ahead = AHEAD * section.num_loaders
        announces = group.prefetch, num_ahead, itertools.count(1)
        orders = {}
        for name, samples in sizes.items():
            training = name == "train"
            require_enough(samples, f"data.{name}", section, training)
            sampler = RemoteSampler(group.epoch_order) if training and section.sampler else None
            orders[name] = SampleOrder(range(samples), section, seed, training, sampler)
        total = total_steps(config, len(orders["train"]))
        train = IndexBatches("train", orders["train"], *announces, total)
        test = IndexBatches("test", orders["test"], *announces) if "test" in orders else None
        return cls(train, test)

    def close(self) -> None:
        for batches in (self.train, self.test):
            if batches is not None:
                batches.close()


def total_steps(config: Config, per_epoch: int) -> int:
    """Return the number of optimizer steps of the whole run."""
    return config.steps if config.steps is not None else (config.epochs or 1) * per_epoch


def fewest_samples(config: Config, train: MiniBatches) -> int:
    """Return the size of the smallest mini-batch that the run trains with.

    A run that is shorter than an epoch does not reach the last one, which may be smaller.
    """
    if total_steps(config, len(train)) >= len(train):
        return train.fewest
    return config.require_data("training").batch_size


def _common_sizes(holdings: Mapping[str, DatasetInfo]) -> dict[str, int]:
    """Return the number of samples of each dataset, which must be the same at all stages."""
    (first, here), *others = holdings.items()
    for other, there in others:
        for name, samples in here.sizes.items():
            if there.sizes[name] != samples:
                raise ConfigError(
                    f"data.{name} has {samples} samples for stage {first!r} on {here.host} and "
                    f"{there.sizes[name]} for stage {other!r} on {there.host}: all hosts need the "
                    "same data"
                )
    return here.sizes


@dataclass(frozen=True)
class Step:
    """An optimizer step of the run.

    Attributes:
        number: number of the step, from 1.
        epoch: number of its epoch, from 1.
        ends_epoch: whether it is the last step of the epoch.
        batch: its mini-batch.
        data_seconds: seconds that the driver waited for the mini-batch.
    """

    number: int
    epoch: int
    ends_epoch: bool
    batch: Batch
    data_seconds: float


class StepStream:
    """The steps of a run; `activity` records when their mini-batches are loaded."""

    def __init__(self, config: Config, datasets: Datasets, activity: Activity) -> None:
        self._config = config
        self._data = datasets.train
        self._activity = activity

    @property
    def total(self) -> int:
        return total_steps(self._config, len(self._data))

    def ends_epoch(self, batch: int) -> bool:
        """Return whether mini-batch `batch` of an epoch, counted from 1, is its last."""
        return batch == len(self._data)

    def after(self, number: int) -> Iterator[Step]:
        """Yield the steps after step `number`, to the end of the run."""
        total, per_epoch = self.total, len(self._data)
        while number < total:
            epoch, first = 1 + number // per_epoch, number % per_epoch
            started = self._start_loading(number + 1)
            for batch in self._data.epoch(epoch, first):
                number += 1
                seconds = time.perf_counter() - started
                yield Step(number, epoch, number % per_epoch == 0, batch, seconds)
                if number == total:
                    return
                started = self._start_loading(number + 1)

    def _start_loading(self, step: int) -> float:
        self._activity.start("data", step)
        return time.perf_counter()
