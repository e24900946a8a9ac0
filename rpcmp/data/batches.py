"""Mini-batches, and how they are loaded.

Before a process loads a mini-batch it seeds itself from (seed, epoch, index of the mini-batch). So
the bits are the same for every number of loader processes, wherever they are, and an epoch can be
resumed in its middle.
"""

from __future__ import annotations

import copy
import errno
import functools
import gc
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing.queues import Queue
from typing import Any, NamedTuple

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    default_collate,
)

from rpcmp.config import importing
from rpcmp.config.job_sections import DataConfig
from rpcmp.config.types import Factory
from rpcmp.data.sample_order import Key, SampleOrder, require_sized, sampler_of
from rpcmp.errors import ConfigError, JobError, one_line
from rpcmp.pipelining import microbatches, pytree, random_streams
from rpcmp.process.sandbox.confinement import is_confined


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
        is_cut: see Collate.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        data: DataConfig,
        seed: int,
        training: bool,
        is_cut: bool = True,
    ) -> None:
        sampler = sampler_of(dataset, data, seed) if training else None
        self._order = SampleOrder(require_sized(dataset), data, seed, training, sampler)
        collate = Collate(data.collate, is_cut)
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
            worker_init_fn=start_loader,
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
        batches = received(self._loader)
        for _ in range(first, len(self._loader)):
            # A dataset's own StopIteration must not end the epoch in silence.
            batch = next(batches)
            yield pair(pickle.loads(batch) if self._sends_bytes else batch)


class Collate:
    """Makes a mini-batch of samples; pickled for a loader process as the config's name for it.

    The config's own is tried on one sample fewer as well: what keeps its first size then is not cut
    along the samples, such as a sequence before the batch, or weights of classes.

    Args:
        source: the config's own function; None: torch's.
        is_cut: whether mini-batches are cut along their first dimension.
    """

    def __init__(self, source: Factory | None, is_cut: bool = True) -> None:
        self._source = source
        self._is_tried = source is None or not is_cut

    def __call__(self, samples: Any) -> Any:
        made = self._function(samples)
        if not self._is_tried and len(samples) > 1:
            self._is_tried = True
            self._try(made, samples)
        return made

    def _try(self, made: Any, samples: Any) -> None:
        assert self._source is not None
        try:
            with random_streams.kept():
                tried = copy.deepcopy(self._function)(samples[:-1])
        except Exception:  # it has changed the samples, needs as many, or cannot be copied
            return
        for (path, one), (_, other) in zip(*map(_leaves, (made, tried)), strict=False):
            is_moved = one.shape[1:] != other.shape[1:]  # the samples are another dimension
            if one.shape[:1] == other.shape[:1] and (is_moved or one.shape[0] == len(samples)):
                where = ".".join(map(str, path))
                raise ConfigError(
                    f"data.collate = {self._source.callable!r} returns a tensor {list(one.shape)} "
                    f"({where or 'its only one'}) whose first dimension does not count the "
                    "samples, along which micro-batches are cut: put the samples first, as in "
                    "batch_first = True, and leave out what belongs to no sample"
                )

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
        self._epoch = 0

    def __len__(self) -> int:
        return len(require_sized(self.dataset))

    def __getitem__(self, key: Key) -> Any:
        epoch, index, samples = key
        if epoch != self._epoch and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch - 1)  # as trainers of other libraries do, counted from 0
        self._epoch = epoch
        random_streams.seed_all(self._seed, "batch", epoch, index)
        # Like torch's own loaders, which load many samples at once if the dataset can.
        if load_samples := getattr(self.dataset, "__getitems__", None):
            return load_samples(samples)
        return [self.dataset[sample] for sample in samples]

    def load(self, key: Key) -> Loaded:
        """Load a mini-batch, with the same bits as Batches."""
        loaded = pair(self._collate(self[key]))
        if loaded.num_samples != len(key[2]):
            raise ConfigError(f"{len(key[2])} samples made a mini-batch of {loaded.num_samples}")
        return loaded


def _leaves(batch: Any) -> list[tuple[pytree.Path, torch.Tensor]]:
    pairs = pytree.leaves_with_path(pytree.plain(batch))
    return [pair for pair in pairs if isinstance(pair[1], torch.Tensor)]


def map_batches(
    dataset: Dataset[Any],
    what: str,
    data: DataConfig,
    seed: int,
    training: bool,
    is_cut: bool = True,
) -> Batches:
    """Return the mini-batches of a map-style dataset, which has to make one at least."""
    require_enough(len(require_sized(dataset)), what, data, training)
    return Batches(dataset, data, seed, training, is_cut)


def create_dataset(source: Factory, what: str, seed: int) -> Dataset[Any]:
    """Build a dataset: map-style, or a stream."""
    random_streams.seed_all(seed, "dataset", what)
    dataset: Dataset[Any] = importing.create(source, what)
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            f"{what} = {source.callable!r} is a DataLoader: return its dataset, and set "
            "data.batch_size and what else it was made with"
        )
    if not is_stream(dataset) and not _is_map_style(dataset):
        raise ConfigError(
            f"{what} = {source.callable!r} is {pytree.describe(dataset)}, and no dataset: that has "
            "`__getitem__` and `__len__`, or `__iter__`"
        )
    return dataset


def is_stream(dataset: Dataset[Any]) -> bool:
    if isinstance(dataset, IterableDataset):  # which has a __getitem__ too
        return True
    return not _is_map_style(dataset) and hasattr(dataset, "__iter__")


def _is_map_style(dataset: Dataset[Any]) -> bool:
    return hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")


def require_enough(samples: int, what: str, data: DataConfig, training: bool) -> None:
    if samples < (data.batch_size if data.drop_last and training else 1):
        raise ConfigError(f"{what}: {samples} samples make no mini-batch")


def received(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield what torch's loader yields; raises JobError if its processes cannot hand it over."""
    try:
        items = iter(loader)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        if "pickle" not in str(error):
            raise
        raise ConfigError(
            f"a dataset cannot be sent to data.num_workers processes ({one_line(error)}), which "
            "start afresh: make locks, queues and open files when they are first used, or set "
            "data.num_workers = 0"
        ) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise JobError(
            "there is no room in /dev/shm for what data.num_workers processes share: make some "
            "(containers have 64 MiB by default), or set data.num_workers = 0"
        ) from error
    for item in items:
        if isinstance(item, Unsent):
            raise JobError(f"a loader process cannot send a mini-batch: {item.reason}")
        yield item


class Unsent(NamedTuple):
    """What a loader process sends instead of a mini-batch that it cannot send."""

    reason: str


def start_loader(worker: int) -> None:
    """Prepare a loader process for what torch's own loop does not foresee."""
    threading.Thread(target=_end_with_parent, name="rpcmp-parent", daemon=True).start()
    _report_unsent()


def _end_with_parent() -> None:
    """End this process with its parent.

    torch looks every five seconds whether the parent is still the one that it had at first. If it
    was killed while this process was starting, which takes seconds, that is already another one.
    Not `die_with_parent`, which would end this process with the thread that has started it.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(0)


def _report_unsent() -> None:
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


def pair(batch: Any) -> Loaded:
    """Return the inputs and targets of a mini-batch, the same object unless it is a pair."""
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


def too_few_samples(samples: int, least: int, section: DataConfig, stage: str) -> ConfigError:
    """Return the error of a mini-batch of fewer samples than a micro-batch needs.

    Args:
        stage: a stage whose batch normalization needs more; empty: the config wants more.
    """
    which, remedy = "the last", "set data.drop_last = true, or change data.batch_size"
    if samples == section.batch_size:
        which, remedy = "each", "raise data.batch_size"
    reason, condition = "as data.min_microbatch says", ""
    if stage:
        reason = f"since stage {stage!r} trains batch normalization"
        condition = ", if its maps have more than one value per channel"
    return ConfigError(
        f"{which} mini-batch of an epoch has {samples} sample{'s' * (samples > 1)} "
        f"(data.batch_size = {section.batch_size}), and a micro-batch needs {least}, {reason}: "
        f"{remedy}, or set data.min_microbatch = {samples}{condition}"
    )
