"""Mini-batches for the driver: seeded shuffling, the same for every number of loader processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from rpcmp import factory, seeds
from rpcmp.config import DataConfig, Factory
from rpcmp.errors import ConfigError


class Batches:
    """The mini-batches of one dataset, epoch after epoch.

    Args:
        dataset: map-style, of (input, target) pairs of tensors, or of tuples and dicts of them.
        data: batch size, shuffling, loader processes.
        seed: the config's; an epoch's order is drawn from (seed, epoch).
        training: shuffle and drop an incomplete last mini-batch where the config says so.
    """

    def __init__(self, dataset: Dataset[Any], data: DataConfig, seed: int, training: bool) -> None:
        self._seed = seed
        self._order = torch.Generator()
        shuffle = data.shuffle and training
        self._empty: DataLoader[Any] = DataLoader([])  # type: ignore[arg-type]
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=data.batch_size,
            sampler=(
                RandomSampler(_sized(dataset), generator=self._order)
                if shuffle
                else SequentialSampler(_sized(dataset))
            ),
            drop_last=data.drop_last and training,
            num_workers=data.num_workers,
            # fork() would copy the threads and sockets of torch RPC into the loader.
            multiprocessing_context="spawn" if data.num_workers else None,
            persistent_workers=data.num_workers > 0,
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def close(self) -> None:
        """End the loader processes; they would otherwise notice only seconds later."""
        if self._loader.num_workers:
            self._loader = self._empty
            gc.collect()

    def epoch(self, epoch: int) -> Iterator[tuple[Any, Any]]:
        """(inputs, targets) of each mini-batch of `epoch`, counted from 1.

        Random transforms in the dataset are seeded as well: by mini-batch here, by loader process
        where there are any.

        Raises:
            ConfigError: the dataset's items are no pairs.
        """
        self._order.manual_seed(seeds.derive(self._seed, "epoch", epoch))
        if self._loader.generator is not None:
            self._loader.generator.manual_seed(seeds.derive(self._seed, "loader", epoch))
        batches = iter(self._loader)
        for index in range(len(self._loader)):
            seeds.seed_all(self._seed, "batch", epoch, index)
            batch = next(batches)
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise ConfigError("the dataset's items must be (input, target) pairs")
            yield batch[0], batch[1]


def load(source: Factory, what: str, data: DataConfig, seed: int, training: bool) -> Batches:
    """The mini-batches of the dataset that `source` makes.

    Raises:
        ConfigError: it fails, is not map-style, or has too few samples for one mini-batch.
    """
    seeds.seed_all(seed, "dataset", what)
    dataset = factory.create(source, what)
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"{what} = {source.callable!r} is not a map-style dataset")
    least = data.batch_size if data.drop_last and training else 1
    if len(dataset) < least:
        raise ConfigError(f"{what}: {len(dataset)} samples make no mini-batch")
    return Batches(dataset, data, seed, training)


def _sized(dataset: Dataset[Any]) -> Sized:
    if not isinstance(dataset, Sized):
        raise ConfigError("the dataset has no length")
    return dataset
