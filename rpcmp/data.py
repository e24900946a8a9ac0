"""Mini-batches for the driver: the same bits for every number of loader processes.

An epoch's order is drawn from (seed, epoch). Whoever loads a mini-batch first seeds its own process
from (seed, epoch, index of the mini-batch), so random transforms do not depend on which process
loads it nor on what was loaded before: an epoch can be taken up in its middle.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from rpcmp import factory, seeds
from rpcmp.errors import ConfigError
from rpcmp.sections import DataConfig, Factory

# One mini-batch: the epoch, its index there, and the indices of its samples.
_Key = tuple[int, int, list[int]]


class Batches:
    """The mini-batches of one dataset, epoch after epoch.

    Args:
        dataset: map-style, of (input, target) pairs of tensors, or of tuples and dicts of them.
        data: batch size, shuffling, loader processes.
        seed: the config's; an epoch's order is drawn from (seed, epoch).
        training: shuffle and drop an incomplete last mini-batch where the config says so.
    """

    def __init__(self, dataset: Dataset[Any], data: DataConfig, seed: int, training: bool) -> None:
        self._order = _Order(_sized(dataset), data, seed, training)
        self._empty: DataLoader[Any] = DataLoader([])  # type: ignore[arg-type]
        self._loader: DataLoader[Any] = DataLoader(
            _SeededSamples(dataset, seed),
            sampler=self._order,
            batch_size=None,  # an item is a whole mini-batch: only so is it known which one
            collate_fn=default_collate,
            num_workers=data.num_workers,
            # fork() would copy the threads and sockets of torch RPC into the loader.
            multiprocessing_context="spawn" if data.num_workers else None,
            persistent_workers=data.num_workers > 0,
            # Of its own: a loader draws from it, even where nothing uses what it draws.
            generator=torch.Generator().manual_seed(seeds.derive(seed, "loader")),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """End the loader processes; they would otherwise notice only seconds later."""
        if self._loader.num_workers:
            self._loader = self._empty
            gc.collect()

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of each mini-batch of `epoch`, counted from 1.

        Starts with the one whose index is `first`; those before are not loaded. Random transforms
        are seeded if they draw from the default generators of torch, Python or numpy.

        Raises:
            ConfigError: the dataset's items are no pairs.
        """
        self._order.epoch, self._order.first = epoch, first
        batches = iter(self._loader)
        for _ in range(first, len(self._loader)):
            batch = next(batches)  # a dataset's own StopIteration must not end the epoch in silence
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise ConfigError("the dataset's items must be (input, target) pairs")
            yield batch[0], batch[1]


class _Order(Sampler[_Key]):
    """The mini-batches of `epoch`, from the one with index `first` on."""

    def __init__(self, dataset: Sized, data: DataConfig, seed: int, training: bool) -> None:
        self.epoch = 1
        self.first = 0
        self._seed = seed
        self._generator = torch.Generator()
        self._samples = BatchSampler(
            RandomSampler(dataset, generator=self._generator)
            if data.shuffle and training
            else SequentialSampler(dataset),
            data.batch_size,
            drop_last=data.drop_last and training,
        )

    def __len__(self) -> int:
        """Of the whole epoch."""
        return len(self._samples)

    def __iter__(self) -> Iterator[_Key]:
        self._generator.manual_seed(seeds.derive(self._seed, "epoch", self.epoch))
        keys = zip(itertools.repeat(self.epoch), itertools.count(), self._samples, strict=False)
        return itertools.islice(keys, self.first, None)


class _SeededSamples(Dataset[Any]):
    """The samples of a whole mini-batch at once, loaded under a seed of its own."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: _Key) -> Any:
        epoch, index, samples = key
        seeds.seed_all(self._seed, "batch", epoch, index)
        # torch's own loaders ask a dataset for many samples at once where it offers that.
        if load_samples := getattr(self._dataset, "__getitems__", None):
            return load_samples(samples)
        return [self._dataset[sample] for sample in samples]


def load(source: Factory, what: str, data: DataConfig, seed: int, training: bool) -> Batches:
    """The mini-batches of the dataset that `source` makes.

    Raises:
        ConfigError: it fails, is not map-style, or has too few samples for one mini-batch.
    """
    seeds.seed_all(seed, "dataset", what)
    dataset = factory.create(source, what)
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map_style or isinstance(dataset, IterableDataset):  # which has a __getitem__, too
        raise ConfigError(f"{what} = {source.callable!r} is not a map-style dataset")
    least = data.batch_size if data.drop_last and training else 1
    if len(dataset) < least:
        raise ConfigError(f"{what}: {len(dataset)} samples make no mini-batch")
    return Batches(dataset, data, seed, training)


def _sized(dataset: Dataset[Any]) -> Sized:
    if not isinstance(dataset, Sized):
        raise ConfigError("the dataset has no length")
    return dataset
