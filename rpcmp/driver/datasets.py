"""What a job trains and evaluates on, loaded here or at the stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from rpcmp.config.schema import Config
from rpcmp.data.batches import load_batches, require_enough
from rpcmp.data.index_batches import AHEAD, Announcer, IndexBatches, SampledThere
from rpcmp.data.sample_order import SampleOrder
from rpcmp.driver.rounds import Batch
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import ConfigError
from rpcmp.rpc.messages import DatasetInfo


class MiniBatches(Protocol):
    """Those of one dataset, epoch after epoch."""

    def __len__(self) -> int:
        """Of one epoch."""

    @property
    def fewest(self) -> int:
        """Samples of the smallest mini-batch, the last of an epoch."""

    def first(self) -> Batch:
        """The first mini-batch of the first epoch, to try something out with."""

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Each mini-batch of `epoch`, counted from 1, from the one whose index is `first` on."""

    def close(self) -> None:
        """End the processes that load samples, where there are any."""


@dataclass(frozen=True)
class Datasets:
    """The mini-batches of a job, epoch after epoch."""

    train: MiniBatches
    test: MiniBatches | None

    @classmethod
    def load(cls, config: Config) -> Datasets:
        """The datasets of `[data]`, loaded by this process.

        Raises:
            ConfigError: there is no `[data]`, or a dataset cannot be used.
        """
        section, seed = config.require_data("training"), config.seed
        train = load_batches(section.train, "data.train", section, seed, training=True)
        if section.test is None:
            return cls(train, None)
        return cls(train, load_batches(section.test, "data.test", section, seed, training=False))

    @classmethod
    def at_stages(cls, config: Config, group: StageGroup) -> Datasets:
        """The datasets that the stages have built, from what these say of them.

        Raises:
            ConfigError: there is no `[data]`, a dataset is too small, or hosts have others.
        """
        section, seed = config.require_data("training"), config.seed
        sizes = _common_sizes(group.dataset_infos())
        num_ahead = AHEAD * section.num_loaders
        announcer = Announcer(group.prefetch, num_ahead, itertools.count(1))
        orders = {}
        for name, samples in sizes.items():
            training = name == "train"
            require_enough(samples, f"data.{name}", section, training)
            sampler = SampledThere(group.epoch_order) if training and section.sampler else None
            orders[name] = SampleOrder(range(samples), section, seed, training, sampler)
        total = total_steps(config, len(orders["train"]))
        train = IndexBatches("train", orders["train"], announcer, total)
        test = IndexBatches("test", orders["test"], announcer) if "test" in orders else None
        return cls(train, test)

    def close(self) -> None:
        """End the processes that load samples, where there are any."""
        for batches in (self.train, self.test):
            if batches is not None:
                batches.close()


def total_steps(config: Config, per_epoch: int) -> int:
    """Optimizer steps of the whole run."""
    return config.steps if config.steps is not None else (config.epochs or 1) * per_epoch


def fewest_samples(config: Config, train: MiniBatches) -> int:
    """Return the size of the smallest mini-batch that the run trains with.

    A run of fewer steps than an epoch has does not come to the last one, which may be smaller.
    """
    if total_steps(config, len(train)) >= len(train):
        return train.fewest
    return config.require_data("training").batch_size


def _common_sizes(holdings: Mapping[str, DatasetInfo]) -> dict[str, int]:
    """The samples of each dataset, which all stages have to agree on."""
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
