"""The mini-batches that a job trains and evaluates on.

Samples are loaded by this process, or at the stages. Then the driver draws only their indices, and
announces AHEAD mini-batches per loader process before they are needed:

    draw 5, 6, 7 ──announce──> every stage that reads the batch: loads them in the background
    step 5       ──────────── "the mini-batch with number 5" ───────> takes slices of what is there
    draw 8       ──announce──> ...
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from rpcmp.config.schema import Config
from rpcmp.data.batches import require_enough
from rpcmp.data.loading import EvaluationBatches, TrainBatches, evaluation_batches, training_batches
from rpcmp.data.sample_order import Key, SampleOrder
from rpcmp.driver.remote_stream import Announce, Answers, RemoteStream, by_label, require_same
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import ConfigError
from rpcmp.rpc.messages import BatchIndices, DatasetInfo

AHEAD = 2
"""Mini-batches per loader process that are loaded before they are needed."""


class RemoteSampler:
    """The order of the config's own sampler, which runs where the samples are.

    Args:
        ask: returns the indices of an epoch's samples, int64; epochs are counted from 0.
    """

    def __init__(self, ask: Callable[[int], torch.Tensor]) -> None:
        self._ask = ask
        self._indices: list[int] = ask(0).tolist()

    def __len__(self) -> int:
        return len(self._indices)

    def set_epoch(self, epoch: int) -> None:
        self._indices = self._ask(epoch).tolist()

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)


class IndexBatches:
    """The mini-batches of one dataset, equal to what `rpcmp.data.batches.Batches` yields.

    Args:
        dataset: "train" or "test".
        announce: announces mini-batches to the stages; a stream's are compared.
        num_ahead: how many are announced before they are needed.
        numbers: yields the number of each mini-batch that is drawn, of all datasets.
        is_stream: whether stages read it in order, so that their samples have to be compared.
        total: number of mini-batches in all epochs, so that an epoch's first ones are loaded while
            the one before ends; 0: epochs do not follow on each other.
    """

    def __init__(
        self,
        dataset: str,
        order: SampleOrder,
        announce: Announce,
        num_ahead: int,
        numbers: Iterator[int],
        total: int = 0,
        is_stream: bool = False,
    ) -> None:
        self._dataset = dataset
        self._is_stream = is_stream
        self._answers: dict[int, Answers] = {}
        self._order = order
        self._announce = announce
        self._num_ahead = num_ahead
        self._numbers = numbers
        self._total = total
        self._announced: deque[BatchIndices] = deque()
        self._coming: Iterator[BatchIndices] = iter(())

    def __len__(self) -> int:
        return len(self._order)

    @property
    def fewest(self) -> int:
        return self._order.fewest

    def close(self) -> None:
        pass  # the stages load

    def first(self) -> BatchIndices:
        """Return the first mini-batch of the first epoch, and load no other."""
        self._announced.clear()
        (drawn,) = itertools.islice(self._draw(1, 0), 1)
        self._send([drawn])
        return drawn

    def epoch(self, epoch: int, first: int = 0) -> Iterator[BatchIndices]:
        """Yield the mini-batches of `epoch`, counted from 1, from the one with index `first`."""
        if not self._announced or self._announced[0].position != (epoch, first):
            self._announced.clear()
            self._coming = self._draw(epoch, first)
        for _ in range(first, len(self)):
            self._announce_next()
            batch = self._announced.popleft()
            yield batch
            self._require_same(batch)

    def _require_same(self, batch: BatchIndices) -> None:
        """Check that all stages have read the same mini-batch, if it is a stream's."""
        answers = self._answers.pop(batch.batch_id, [])
        if digests := by_label(answers):
            what = f"data.{self._dataset} yields other samples in mini-batch {batch.batch + 1}"
            require_same(digests, what)

    def _send(self, drawn: Sequence[BatchIndices]) -> None:
        if not self._is_stream:
            self._announce(drawn)
            return
        self._answers |= {batch.batch_id: self._announce([batch]) for batch in drawn}

    def _announce_next(self) -> None:
        """Announce the mini-batch that is needed now and some after it, unless done before."""
        missing = 1 + self._num_ahead - len(self._announced)
        if drawn := list(itertools.islice(self._coming, missing)):
            self._send(drawn)
            self._announced.extend(drawn)

    def _draw(self, epoch: int, first: int) -> Iterator[BatchIndices]:
        last = max(epoch * len(self), self._total)
        left = range(first + (epoch - 1) * len(self), last)
        for _, key in zip(left, self._keys(epoch, first), strict=False):
            yield BatchIndices(next(self._numbers), self._dataset, *key)

    def _keys(self, epoch: int, first: int) -> Iterator[Key]:
        while True:
            self._order.start_epoch(epoch, first)
            yield from self._order
            epoch, first = epoch + 1, 0


TrainData: TypeAlias = TrainBatches | IndexBatches | RemoteStream
EvaluationData: TypeAlias = EvaluationBatches | IndexBatches
"""The mini-batches of one dataset, loaded here or at the stages."""


@dataclass(frozen=True)
class Datasets:
    """The mini-batches of a job."""

    train: TrainData
    test: EvaluationData | None

    @classmethod
    def load(cls, config: Config) -> Datasets:
        """Load the datasets of `[data]` in this process."""
        return cls(training_batches(config), evaluation_batches(config))

    @classmethod
    def at_stages(cls, config: Config, group: StageGroup) -> Datasets:
        """Describe the datasets that the stages have built, which must be equal on all hosts."""
        section, seed = config.require_data("training"), config.seed
        num_ahead = AHEAD * section.num_loaders
        announces = group.prefetch, num_ahead, itertools.count(1)
        orders = {}
        infos = group.dataset_infos()
        streams = {name for info in infos.values() for name in info.streams}
        for name, samples in _common_sizes(infos).items():
            if name == "train" and name in streams:
                continue
            training = name == "train"
            require_enough(samples, f"data.{name}", section, training)
            sampler = RemoteSampler(group.epoch_order) if training and section.sampler else None
            orders[name] = SampleOrder(range(samples), section, seed, training, sampler)
        train: TrainData
        if "train" in streams:
            train = RemoteStream(config, *announces)
        else:
            total = total_steps(config, len(orders["train"]))
            train = IndexBatches("train", orders["train"], *announces, total)
        test = None
        if "test" in orders:
            is_stream = "test" in streams
            test = IndexBatches("test", orders["test"], *announces, is_stream=is_stream)
        return cls(train, test)

    def close(self) -> None:
        for batches in (self.train, self.test):
            if batches is not None:
                batches.close()


def total_steps(config: Config, per_epoch: int) -> int:
    """Return the number of optimizer steps of the whole run."""
    return config.steps if config.steps is not None else (config.epochs or 1) * per_epoch


def fewest_samples(config: Config, train: TrainData) -> int:
    """Return the size of the smallest mini-batch that the run trains with.

    A run that is shorter than an epoch does not reach the last one, which may be smaller.
    """
    if total_steps(config, len(train)) >= len(train):
        return train.fewest
    return config.require_data("training").batch_size


def _common_sizes(infos: Mapping[str, DatasetInfo]) -> dict[str, int]:
    """Return the number of samples of each dataset, which must be the same at all stages."""
    (first, expected), *others = infos.items()
    for other, info in others:
        for name, samples in expected.sizes.items():
            if info.sizes[name] != samples:
                raise ConfigError(
                    f"data.{name} has {samples} samples for stage {first!r} on {expected.host} and "
                    f"{info.sizes[name]} for stage {other!r} on {info.host}: all hosts need the "
                    "same data"
                )
    return expected.sizes
