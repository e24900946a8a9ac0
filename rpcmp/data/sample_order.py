"""Which samples the mini-batches of an epoch consist of.

An epoch's order equals torch's DistributedSampler after `set_epoch`, so a run here and one
under DistributedDataParallel see the same mini-batches. Or the config's own sampler decides it, and
draws under a seed of the epoch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sized
from typing import Any, Protocol, SupportsIndex, cast

import torch
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, Sampler

from rpcmp.config import importing
from rpcmp.config.job_sections import DataConfig
from rpcmp.errors import ConfigError
from rpcmp.pipelining import random_streams

Key = tuple[int, int, list[int]]
"""One mini-batch: the epoch, its index there, and the indices of its samples."""


class Epochs(Protocol):
    """The order of a dataset's samples in each epoch, counted from 0, as torch's samplers have."""

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None: ...

    def __iter__(self) -> Iterator[int]: ...


class SampleOrder(Sampler[Key]):
    """The mini-batches of each epoch, as the indices of their samples.

    Args:
        dataset: only its length is used.
        data, seed, training: see Batches.
        sampler: of the samples; None: as `data.shuffle` says.
    """

    def __init__(
        self,
        dataset: Sized,
        data: DataConfig,
        seed: int,
        training: bool,
        sampler: Epochs | None = None,
    ) -> None:
        self._epoch, self._first = 1, 0
        # Of all samples: the stages' replicas share a mini-batch, not the dataset.
        self._sampler: Epochs = sampler or DistributedSampler(
            cast(Dataset[Any], dataset), 1, 0, shuffle=data.shuffle and training, seed=seed
        )
        self._batch_size, self._drop_last = data.batch_size, data.drop_last and training
        self._samples = BatchSampler(
            cast(Sampler[int], self._sampler), self._batch_size, drop_last=self._drop_last
        )

    def start_epoch(self, epoch: int, first: int = 0) -> None:
        """Yield the mini-batches of `epoch` next, from the one with index `first`."""
        self._epoch, self._first = epoch, first

    @property
    def fewest(self) -> int:
        """Number of samples in the smallest mini-batch, the last of an epoch."""
        left = 0 if self._drop_last else len(self._sampler) % self._batch_size
        return left or self._batch_size

    def __len__(self) -> int:
        return len(self._samples)

    def __iter__(self) -> Iterator[Key]:
        self._sampler.set_epoch(self._epoch - 1)  # there they are counted from 0
        keys = zip(itertools.repeat(self._epoch), itertools.count(), self._samples, strict=False)
        return itertools.islice(keys, self._first, None)


class OwnSampler:
    """The config's own sampler of the training dataset; an epoch's order is always the same.

    Args:
        sampler: like torch's, has a length and yields indices of samples.
        samples: number of samples in the dataset.
    """

    def __init__(self, sampler: Any, samples: int, seed: int) -> None:
        self._sampler, self._num_samples, self._seed = sampler, samples, seed
        self._epoch = 0
        if self.indices() != self.indices():
            raise ConfigError(
                "data.sampler orders the same epoch differently when it is asked again: have it "
                "draw from the default generators of torch, Python or numpy, which are seeded for "
                "each epoch, or from an attribute `generator`"
            )

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices())

    def indices(self) -> list[int]:
        """Return an epoch's indices at once, since other code draws from the same generators."""
        random_streams.seed_all(self._seed, "sampler", self._epoch)
        if isinstance(generator := getattr(self._sampler, "generator", None), torch.Generator):
            generator.manual_seed(random_streams.derive_seed(self._seed, "sampler", self._epoch))
        indices = list(self._sampler)
        if len(indices) != len(self):
            text = (
                f"{len(indices)} samples in epoch {self._epoch + 1}, and its length is {len(self)}"
            )
            raise ConfigError(f"data.sampler yields {text}")
        return [self._checked(index) for index in indices]

    def _checked(self, index: Any) -> int:
        is_scalar = not isinstance(index, torch.Tensor) or index.dim() == 0
        if isinstance(index, SupportsIndex) and is_scalar:
            number = operator.index(index)
            if 0 <= number < self._num_samples:
                return number
        raise ConfigError(
            f"data.sampler yields {index!r}: it has to yield indices of samples, here from 0 to "
            f"{self._num_samples - 1}, one by one"
        )


def sampler_of(dataset: Dataset[Any], data: DataConfig, seed: int) -> OwnSampler | None:
    """Create the config's own sampler of the training dataset, if it has one."""
    if data.sampler is None:
        return None
    random_streams.seed_all(seed, "sampler")
    sampler = importing.create(data.sampler, "data.sampler", dataset)
    if not (hasattr(sampler, "__len__") and hasattr(sampler, "__iter__")):
        raise ConfigError(
            f"data.sampler = {data.sampler.callable!r} makes no sampler: it needs a length, and "
            "yields indices of samples"
        )
    return OwnSampler(sampler, len(require_sized(dataset)), seed)


def require_sized(dataset: Dataset[Any]) -> Sized:
    if not isinstance(dataset, Sized):
        raise ConfigError("the dataset has no length")
    return dataset
