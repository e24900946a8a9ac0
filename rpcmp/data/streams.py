"""Streams: datasets that are read in order, without indices, such as torch's `IterableDataset`.

A stream has no length, and perhaps no end. A job trains on `steps` mini-batches of it, all of them
full: where a pass over the samples ends, the next begins, within a mini-batch if need be. Several
processes share a stream as those of torch's DataLoader do, so the samples of a mini-batch depend on
`data.num_workers`:

    mini-batch        0   1   2   3   4   5            num_workers = 3
    read by process   0   1   2   0   1   2            each reads its own samples of the stream

A dataset that calls torch's `get_worker_info` decides which samples are a process's own: those of
the packages `datasets` and `webdataset` divide their files. Of any other, a process of three takes
each third sample.
"""

from __future__ import annotations

import gc
import itertools
import pickle
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from rpcmp.config.schema import Config
from rpcmp.data import batches
from rpcmp.data.batches import Collate, Loaded, pair
from rpcmp.data.sample_order import Key
from rpcmp.data.stream_shares import Position, Share, ShareReader, digest_of
from rpcmp.errors import ConfigError
from rpcmp.pipelining import random_streams
from rpcmp.process.sandbox.confinement import is_confined

MAX_POSITIONS = 1024
"""Positions that are kept until somebody asks for a later one."""


class StreamBatches:
    """The mini-batches of a stream that a job trains on; all of a run are one epoch.

    Args:
        num_workers: processes that read; 0: this one does.
        start_method: of these processes.

    Raises:
        ConfigError: the config has settings that need a length or indices.
    """

    def __init__(self, config: Config, num_workers: int, start_method: str = "spawn") -> None:
        require_stream_settings(config)
        self._config = config
        self._batch_size = config.require_data("training").batch_size
        self._num_workers, self._start_method = num_workers, start_method
        self._num_shares = max(1, num_workers)
        self._sends_bytes = num_workers > 0 and is_confined()
        self._positions: dict[int, Position] = {}
        self._items: Iterator[tuple[Loaded | None, Position]] = iter(())
        self.seek("", lambda position: None)

    def __len__(self) -> int:
        return self._config.steps or 0

    @property
    def fewest(self) -> int:
        return self._batch_size

    def parse(self, text: str) -> Position:
        """Return the position in this stream that `text` has."""
        return Position.parse(text, self._batch_size, self._num_shares)

    def seek(self, text: str, skipped: Callable[[Position], None]) -> None:
        """Go on from the position of an earlier generation or run; "": from the beginning.

        Args:
            skipped: called with the position after each mini-batch that is read again.
        """
        self._start = self.parse(text)
        self._skipped = skipped
        self._next = -1  # index of the mini-batch that `_items` yields next

    def position_after(self, number: int) -> Position | None:
        """Return the position after the first `number` mini-batches, if it is not long ago."""
        for old in [index for index in self._positions if index < number]:
            del self._positions[old]
        return self._positions.get(number)

    def close(self) -> None:
        """Stop the processes that read."""
        self._items = iter(())
        if self._num_workers:
            gc.collect()

    def first(self) -> Loaded:
        return next(self.epoch(1))

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Loaded]:
        """Yield the mini-batches from the one with index `first`; there is but one epoch."""
        if first != self._next:
            self.begin()
        while self._next < len(self):
            loaded, position = self.read()
            if self._next <= first or loaded is None:
                self._skipped(position)
                continue
            if len(self._positions) >= MAX_POSITIONS:  # nobody asks
                self._positions.clear()
            self._positions[self._next] = position
            yield loaded

    def read(self) -> tuple[Loaded | None, Position]:
        """Read the next mini-batch; None for one that was read before."""
        self._next += 1
        return next(self._items)

    def begin(self) -> int:
        """Start to read; return the index of what is read first, at the first process's turn."""
        self.close()
        begin = self._start._replace(read=self._start.read - self._start.read % self._num_shares)
        if self._start.is_read_again:
            begin = self.parse("")
        self._items, self._next = self._read(begin), begin.read
        return begin.read

    def _read(self, position: Position) -> Iterator[tuple[Loaded | None, Position]]:
        loader: DataLoader[Any] = DataLoader(
            ShareReader(self._config, self._start, self._sends_bytes),
            batch_size=None,  # an item is a whole mini-batch
            collate_fn=_as_it_is,
            num_workers=self._num_workers,
            multiprocessing_context=self._start_method if self._num_workers else None,
            worker_init_fn=batches.start_loader,
            # Its own: a loader draws from it even if nothing uses what it draws.
            generator=torch.Generator().manual_seed(
                random_streams.derive_seed(self._config.seed, "loader")
            ),
        )
        for is_new, batch, share in batches.received(loader):
            position = position.after(None if share is None else Share(*share))
            if is_new:
                yield pair(pickle.loads(batch) if self._sends_bytes else batch), position
            else:
                yield None, position


class StreamPass:
    """A stream as an evaluation reads it: one pass from its beginning, in this process."""

    def __init__(self, dataset: Dataset[Any], config: Config) -> None:
        section = config.require_data("evaluating")
        if isinstance(dataset, GeneratorType):
            raise ConfigError(
                "data.test is a generator, which can be read only once: return an object whose "
                "`__iter__` begins anew"
            )
        self._dataset, self._seed, self._batch_size = dataset, config.seed, section.batch_size
        self._collate = Collate(section.collate, config.has_equal_parts)

    @property
    def fewest(self) -> int:
        return self._batch_size  # the last mini-batch may be smaller, which nobody knows yet

    def close(self) -> None:
        pass

    def first(self) -> Loaded:
        return next(self.epoch(1))

    def count(self) -> int:
        """Return the number of samples, by reading them all."""
        self._begin(1)
        return sum(1 for _ in iter(self._dataset))

    def epoch(self, epoch: int, first: int = 0) -> Iterator[Loaded]:
        """Yield the mini-batches from the one with index `first`; those before are only read."""
        self._begin(epoch)
        samples = iter(self._dataset)
        for index in itertools.count():
            random_streams.seed_all(self._seed, "batch", epoch, index)
            drawn = list(itertools.islice(samples, self._batch_size))
            if not drawn and not index:
                raise ConfigError("data.test yields no samples: each pass over it begins anew")
            if not drawn:
                return
            if index >= first:
                yield pair(self._collate(drawn))

    def _begin(self, epoch: int) -> None:
        """Seed what a pass draws at its begin, such as an order."""
        random_streams.seed_all(self._seed, "pass", epoch)


class StreamReader:
    """A stream that a stage's loader reads, mini-batch after mini-batch, to train on it.

    Attributes:
        position: after the mini-batch that was loaded last, as text.
    """

    def __init__(self, config: Config) -> None:
        num_workers = config.require_data("training").num_workers
        # The loader is a process beside the worker already; it has no threads.
        self._batches = StreamBatches(config, num_workers if num_workers > 1 else 0, "fork")
        self.position = ""
        self._next = self._batches.begin()
        self._failure: Exception | None = None

    def __len__(self) -> int:
        return 0  # nobody knows

    def seek(self, text: str) -> None:
        """Go on from a position."""
        self._batches.seek(text, lambda position: None)
        self._next = self._batches.begin()

    def load(self, key: Key) -> Loaded | None:
        """Return the mini-batch of a key; None for one that was read before. Called in order."""
        _, index, samples = key
        if self._failure is not None:
            raise self._failure
        try:
            for _ in range(self._next, index):  # others of the turn in which it goes on
                self._batches.read()
            loaded, position = self._batches.read()
            self._next = index + 1
        except Exception as error:
            self._failure = error  # what comes after it is not known
            raise
        if not samples:  # it is only read again
            loaded = None
        if loaded is not None and loaded.num_samples != len(samples):
            raise ConfigError(f"{len(samples)} samples made a mini-batch of {loaded.num_samples}")
        self.position = position.dump()
        return loaded


class PassReader:
    """A stream that a stage's loader reads for evaluations, each of which is one pass over it.

    Attributes:
        position: a digest of the mini-batch that was loaded last.
    """

    def __init__(self, dataset: Dataset[Any], config: Config) -> None:
        self._pass = StreamPass(dataset, config)
        self._samples = self._pass.count()
        self._epoch: int | None = None
        self._next = 0
        self._batches: Iterator[Loaded] = iter(())
        self.position = ""

    def __len__(self) -> int:
        return self._samples

    def load(self, key: Key) -> Loaded:
        epoch, index, samples = key
        if self._epoch != epoch or index < self._next:
            self._batches, self._epoch, self._next = self._pass.epoch(epoch), epoch, 0
        # Another process may have loaded some.
        loaded = next(itertools.islice(self._batches, index - self._next, None), None)
        self._next = index + 1
        self.position = "" if loaded is None else digest_of(loaded)
        if loaded is None or loaded.num_samples != len(samples):
            raise ConfigError(f"data.test does not yield its {self._samples} samples each time")
        return loaded


def require_stream_settings(config: Config) -> None:
    """Refuse settings that need a length or indices, since data.train is a stream."""
    stream = "data.train is a stream, which has no"
    if config.steps is None:
        raise ConfigError(f"{stream} length: say with `steps` how many mini-batches to train on")
    if config.require_data("training").sampler is not None:
        raise ConfigError(f"{stream} indices to sample: leave data.sampler out")
    if config.steps_scheduler("epoch"):
        raise ConfigError(f'{stream} epochs: set scheduler_interval = "step"')


def _as_it_is(item: Any) -> Any:
    return item
