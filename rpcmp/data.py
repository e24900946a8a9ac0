"""Mini-batches: the same bits for every number of loader processes, wherever they are loaded.

An epoch's order is that of torch's DistributedSampler after `set_epoch`, so a run here and one
under DistributedDataParallel see the same mini-batches. Whoever loads a mini-batch first seeds its
own process from (seed, epoch, index of the mini-batch), so random transforms do not depend on which
process loads it nor on what was loaded before: an epoch can be taken up in its middle.
"""

from __future__ import annotations

import gc
import itertools
import pickle
from collections.abc import Iterator, Sized
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    default_collate,
)

from rpcmp import factory, microbatch, seeds
from rpcmp.errors import ConfigError
from rpcmp.kinds import Factory
from rpcmp.process.confinement import is_confined
from rpcmp.sections import DataConfig

Key = tuple[int, int, list[int]]
"""One mini-batch: the epoch, its index there, and the indices of its samples."""


class Loaded(NamedTuple):
    """A mini-batch that has been loaded.

    Attributes:
        inputs, targets: trees of tensors whose first dimension counts the samples; no targets
            where something is to be predicted.
    """

    inputs: Any
    targets: Any = None

    @property
    def num_samples(self) -> int:
        """How many.

        Raises:
            ConfigError: inputs and targets differ in it, or are not made of tensors.
        """
        samples = microbatch.num_samples(self.inputs)
        if self.targets is not None and microbatch.num_samples(self.targets) != samples:
            raise ConfigError(
                f"{samples} inputs and {microbatch.num_samples(self.targets)} targets do not make "
                "a mini-batch"
            )
        return samples


class Batches:
    """The mini-batches of one dataset, epoch after epoch.

    Args:
        dataset: map-style, of (input, target) pairs of tensors, or of tuples and dicts of them.
        data: batch size, shuffling, loader processes.
        seed: the config's; an epoch's order is drawn from seed + epoch.
        training: shuffle and drop an incomplete last mini-batch where the config says so.
    """

    def __init__(self, dataset: Dataset[Any], data: DataConfig, seed: int, training: bool) -> None:
        self._order = Order(_sized(dataset), data, seed, training)
        # torch's loaders hand memory over by Unix sockets, which a confined process has not.
        self._sends_bytes = data.num_workers > 0 and is_confined()
        self._empty: DataLoader[Any] = DataLoader([])  # type: ignore[arg-type]
        self._loader: DataLoader[Any] = DataLoader(
            Samples(dataset, seed),
            sampler=self._order,
            batch_size=None,  # an item is a whole mini-batch: only so is it known which one
            collate_fn=_collated_to_bytes if self._sends_bytes else default_collate,
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

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Loaded]:
        """Each mini-batch of `epoch`, counted from 1.

        Starts with the one whose index is `first`; those before are not loaded. Random transforms
        are seeded if they draw from the default generators of torch, Python or numpy.

        Raises:
            ConfigError: the dataset's items are no pairs.
        """
        self._order.begin(epoch, first)
        batches = iter(self._loader)
        for _ in range(first, len(self._loader)):
            # A dataset's own StopIteration must not end the epoch in silence.
            batch = next(batches)
            yield _pair(pickle.loads(batch) if self._sends_bytes else batch)


class Order(Sampler[Key]):
    """The mini-batches of one epoch after the other, as the indices of their samples.

    Args:
        dataset: whose length counts.
        data, seed, training: see Batches.
    """

    def __init__(self, dataset: Sized, data: DataConfig, seed: int, training: bool) -> None:
        self._epoch, self._first = 1, 0
        # Of all samples: the stages' replicas share a mini-batch, not the dataset.
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            cast(Dataset[Any], dataset), 1, 0, shuffle=data.shuffle and training, seed=seed
        )
        self._samples = BatchSampler(
            self._sampler, data.batch_size, drop_last=data.drop_last and training
        )

    def begin(self, epoch: int, first: int = 0) -> None:
        """Go on with the mini-batches of `epoch` from the one with index `first` on."""
        self._epoch, self._first = epoch, first

    def __len__(self) -> int:
        """Of the whole epoch."""
        return len(self._samples)

    def __iter__(self) -> Iterator[Key]:
        self._sampler.set_epoch(self._epoch - 1)  # there they are counted from 0
        keys = zip(itertools.repeat(self._epoch), itertools.count(), self._samples, strict=False)
        return itertools.islice(keys, self._first, None)


class Samples(Dataset[Any]):
    """The samples of a whole mini-batch at once, loaded under a seed of its own.

    Args:
        dataset: see Batches.
        seed: the config's.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(_sized(self._dataset))

    def __getitem__(self, key: Key) -> Any:
        epoch, index, samples = key
        seeds.seed_all(self._seed, "batch", epoch, index)
        # torch's own loaders ask a dataset for many samples at once where it offers that.
        if load_samples := getattr(self._dataset, "__getitems__", None):
            return load_samples(samples)
        return [self._dataset[sample] for sample in samples]

    def load(self, key: Key) -> Loaded:
        """A mini-batch, with the bits that Batches gives it.

        Raises:
            ConfigError: the dataset's items are no pairs, or not made of tensors.
        """
        loaded = _pair(default_collate(self[key]))
        if loaded.num_samples != len(key[2]):
            raise ConfigError(f"{len(key[2])} samples made a mini-batch of {loaded.num_samples}")
        return loaded


def load(source: Factory, what: str, data: DataConfig, seed: int, training: bool) -> Batches:
    """The mini-batches of the dataset that `source` makes.

    Raises:
        ConfigError: it fails, is not map-style, or has too few samples for one mini-batch.
    """
    dataset = create(source, what, seed)
    require_enough(len(_sized(dataset)), what, data, training)
    return Batches(dataset, data, seed, training)


def create(source: Factory, what: str, seed: int) -> Dataset[Any]:
    """The dataset that `source` makes.

    Raises:
        ConfigError: it fails, or is not map-style.
    """
    seeds.seed_all(seed, "dataset", what)
    dataset: Dataset[Any] = factory.create(source, what)
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map_style or isinstance(dataset, IterableDataset):  # which has a __getitem__, too
        raise ConfigError(f"{what} = {source.callable!r} is not a map-style dataset")
    return dataset


def require_enough(samples: int, what: str, data: DataConfig, training: bool) -> None:
    """Refuse a dataset that is too small.

    Raises:
        ConfigError: it has too few samples for one mini-batch.
    """
    if samples < (data.batch_size if data.drop_last and training else 1):
        raise ConfigError(f"{what}: {samples} samples make no mini-batch")


def _collated_to_bytes(samples: Any) -> bytes:
    """A mini-batch as a pickle, which its parent reads: a process as trustworthy as this one."""
    return pickle.dumps(default_collate(samples))


def _pair(batch: Any) -> Loaded:
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigError("the dataset's items must be (input, target) pairs")
    return Loaded(batch[0], batch[1])


def _sized(dataset: Dataset[Any]) -> Sized:
    if not isinstance(dataset, Sized):
        raise ConfigError("the dataset has no length")
    return dataset
