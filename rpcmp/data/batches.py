"""Mini-batches: which samples they consist of, and how they are loaded.

An epoch's order equals torch's DistributedSampler after `set_epoch`, so a run here and one
under DistributedDataParallel see the same mini-batches. Or the config's own sampler decides it, and
draws under a seed of the epoch.

Before a process loads a mini-batch it seeds itself from (seed, epoch, index of the mini-batch). So
the bits are the same for every number of loader processes, wherever they are, and an epoch can be
resumed in its middle.
"""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import operator
import pickle
from collections.abc import Callable, Iterator, Sized
from multiprocessing.queues import Queue
from typing import Any, NamedTuple, Protocol, SupportsIndex, cast

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

from rpcmp.config import importing
from rpcmp.config.job_sections import DataConfig
from rpcmp.config.types import Factory
from rpcmp.errors import ConfigError, JobError
from rpcmp.pipelining import microbatches, pytree, random_streams
from rpcmp.process.sandbox.confinement import is_confined

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


class Loaded(NamedTuple):
    """A mini-batch that has been loaded.

    Attributes:
        inputs, targets: trees of tensors (samples, ...); targets are None for a prediction.
    """

    inputs: Any
    targets: Any = None

    @property
    def num_samples(self) -> int:
        samples = microbatches.num_samples(self.inputs, "input")
        if self.targets is None:
            return samples
        if (targets := microbatches.num_samples(self.targets, "target")) != samples:
            raise ConfigError(f"{samples} inputs and {targets} targets do not make a mini-batch")
        return samples


class Batches:
    """The mini-batches of one dataset, epoch after epoch.

    Args:
        dataset: map-style, of (input, target) pairs of tensors, or of tuples and dicts of them.
        seed: the config's; an epoch's order is drawn from seed + epoch.
        training: shuffle or sample, and drop an incomplete last mini-batch, if the config says so.
    """

    def __init__(self, dataset: Dataset[Any], data: DataConfig, seed: int, training: bool) -> None:
        sampler = sampler_of(dataset, data, seed) if training else None
        self._order = SampleOrder(require_sized(dataset), data, seed, training, sampler)
        collate = Collate(data.collate)
        # torch's loaders hand memory over by Unix sockets, which a confined process may not use.
        self._sends_bytes = data.num_workers > 0 and is_confined()
        self._loader: DataLoader[Any] = DataLoader(
            Samples(dataset, seed),
            sampler=self._order,
            batch_size=None,  # an item is a whole mini-batch, so that its index is known
            collate_fn=functools.partial(_to_bytes, collate) if self._sends_bytes else collate,
            num_workers=data.num_workers,
            # fork() would copy the threads and sockets of torch RPC into the loader.
            multiprocessing_context="spawn" if data.num_workers else None,
            persistent_workers=data.num_workers > 0,
            worker_init_fn=_report_unsent,
            # Its own: a loader draws from it even if nothing uses what it draws.
            generator=torch.Generator().manual_seed(random_streams.derive_seed(seed, "loader")),
        )

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def fewest(self) -> int:
        return self._order.fewest

    def close(self) -> None:
        """Stop the loader processes, which would otherwise run on for seconds."""
        if self._loader.num_workers:
            self._loader = DataLoader([])  # type: ignore[arg-type]
            gc.collect()

    def first(self) -> Loaded:
        return next(self.epoch(1))

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Loaded]:
        """Yield the mini-batches of `epoch`, counted from 1.

        Starts with the one whose index is `first`; those before it are not loaded. Random
        transforms are seeded if they draw from the default generators of torch, Python or numpy.
        """
        self._order.start_epoch(epoch, first)
        try:
            batches = iter(self._loader)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise JobError(
                "there is no room in /dev/shm for what data.num_workers processes share: make some "
                "(containers have 64 MiB by default), or set data.num_workers = 0"
            ) from error
        for _ in range(first, len(self._loader)):
            # A dataset's own StopIteration must not end the epoch in silence.
            batch = next(batches)
            if isinstance(batch, Unsent):
                raise JobError(f"a loader process cannot send a mini-batch: {batch.reason}")
            yield _pair(pickle.loads(batch) if self._sends_bytes else batch)


class Collate:
    """Makes a mini-batch of samples; pickled for a loader process as the config's name for it.

    Args:
        source: the config's own function; None: torch's.
    """

    def __init__(self, source: Factory | None) -> None:
        self._source = source

    def __call__(self, samples: Any) -> Any:
        return self._function(samples)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        if self._source is None:
            return default_collate
        return importing.load_function(self._source, "data.collate")


class Samples(Dataset[Any]):
    """Dataset whose items are the samples of whole mini-batches, each loaded under its own seed."""

    def __init__(
        self, dataset: Dataset[Any], seed: int, collate: Callable[[Any], Any] = default_collate
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._collate = collate

    def __len__(self) -> int:
        return len(require_sized(self.dataset))

    def __getitem__(self, key: Key) -> Any:
        epoch, index, samples = key
        random_streams.seed_all(self._seed, "batch", epoch, index)
        # Like torch's own loaders, which load many samples at once if the dataset can.
        if load_samples := getattr(self.dataset, "__getitems__", None):
            return load_samples(samples)
        return [self.dataset[sample] for sample in samples]

    def load(self, key: Key) -> Loaded:
        """Load a mini-batch, with the same bits as Batches."""
        loaded = _pair(self._collate(self[key]))
        if loaded.num_samples != len(key[2]):
            raise ConfigError(f"{len(key[2])} samples made a mini-batch of {loaded.num_samples}")
        return loaded


def load_batches(
    source: Factory, what: str, data: DataConfig, seed: int, training: bool
) -> Batches:
    dataset = create_dataset(source, what, seed)
    require_enough(len(require_sized(dataset)), what, data, training)
    return Batches(dataset, data, seed, training)


def create_dataset(source: Factory, what: str, seed: int) -> Dataset[Any]:
    random_streams.seed_all(seed, "dataset", what)
    dataset: Dataset[Any] = importing.create(source, what)
    is_map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not is_map_style or isinstance(dataset, IterableDataset):  # which has a __getitem__ too
        raise ConfigError(f"{what} = {source.callable!r} is not a map-style dataset")
    return dataset


def require_enough(samples: int, what: str, data: DataConfig, training: bool) -> None:
    if samples < (data.batch_size if data.drop_last and training else 1):
        raise ConfigError(f"{what}: {samples} samples make no mini-batch")


class Unsent(NamedTuple):
    """What a loader process sends instead of a mini-batch that it cannot send."""

    reason: str


def _report_unsent(worker: int) -> None:
    """Report a mini-batch that cannot be pickled, or shared for lack of descriptors.

    multiprocessing prints the error and drops the mini-batch, and its parent waits for ever.
    """

    def report(results: Queue[Any], error: Exception, item: tuple[int, Any]) -> None:
        number, _ = item  # torch's: the mini-batch's number, the mini-batch
        results.put((number, Unsent(f"{type(error).__name__}: {error}")))

    setattr(Queue, "_on_queue_feeder_error", report)  # noqa: B010  # a hook of concurrent.futures


def _to_bytes(collate: Callable[[Any], Any], samples: Any) -> bytes:
    """Pickle a mini-batch for the parent process, which trusts this one."""
    return pickle.dumps(collate(samples))


def _pair(batch: Any) -> Loaded:
    """Return inputs and targets, which are the same object unless the mini-batch is a pair."""
    batch = pytree.plain(batch)  # a collate function may return any mapping
    if isinstance(batch, torch.Tensor | dict):
        # A model that reconstructs its input, or a loss that picks its targets from a dict.
        return Loaded(batch, batch)
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigError(
            f"a mini-batch is {pytree.describe(batch)}: the dataset's items must be "
            "(input, target) pairs, or dicts or tensors that are both; `data.collate` can make "
            "them so"
        )
    return Loaded(batch[0], batch[1])
