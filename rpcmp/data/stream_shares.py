"""What one process reads of a stream, and where it is in it; see `rpcmp.data.streams`.

A stream goes on from a position by the protocol of torchdata's StatefulDataLoader: the state of the
dataset is loaded, then it is asked for its iterator, then the state of that is loaded, each where
there is `state_dict` and `load_state_dict`. Without them it is read again from its beginning.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from torch.utils.data import IterableDataset, get_worker_info

from rpcmp.config import importing
from rpcmp.config.schema import Config
from rpcmp.data.batches import Collate, create_dataset
from rpcmp.errors import ConfigError, one_line
from rpcmp.pipelining import pytree, random_streams
from rpcmp.rpc.tensors import dump_message, load_message, tensor_line

MAX_POSITION = 48 * 1024
"""Characters of a position, which goes with the driver's record of each step."""

MOST_PASSES = 2**53
"""Over a stream, in a position."""

MAX_REST = 256
"""Characters of a Share without its state."""

COMPARED = 65536
"""Elements of a tensor that its digest is of, evenly spaced: it finds other samples, no attack."""

_ANOTHER = (
    "data.train yields other samples than before the run was interrupted, so it does not go on "
    "as it would have: let it draw from torch's, Python's or numpy's default generator, which are "
    "seeded for each mini-batch, or give it a state_dict"
)


class Share(NamedTuple):
    """Where one process is in its share of a stream.

    Attributes:
        passes: over the samples, so far.
        stride: it takes each sample with this distance; 1: the dataset itself divides the stream.
        state: of the dataset and its iterator, as text; empty: there is none that can be kept.
        digest: of the mini-batch that was read last.
        seconds: that reading has taken.
        note: what the user should know about it; empty: nothing.
    """

    passes: Annotated[int, Field(ge=0, le=MOST_PASSES)] = 0
    stride: PositiveInt = 1
    state: str = ""
    digest: str = ""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    note: str = ""


class Position(NamedTuple):
    """Where a stream is after some mini-batches.

    Attributes:
        read: number of mini-batches.
        batch_size: of each.
        shares: one for each process; None before its first mini-batch.
    """

    read: NonNegativeInt
    batch_size: PositiveInt
    shares: Annotated[list[Share | None], Field(min_length=1)]

    @classmethod
    def parse(cls, text: str, batch_size: int, num_shares: int) -> Self:
        """Return the position of which `text` is the `dump`; empty: the beginning.

        Raises:
            ConfigError: it is none, or the stream was divided otherwise.
        """
        if not text:
            return cls(0, batch_size, [None] * num_shares)
        try:
            position: Self = TypeAdapter(cls).validate_json(text[: MAX_POSITION + 1])
        except ValidationError as error:
            raise ConfigError(f"no position in the stream data.train: {one_line(error)}") from error
        read, size, shares = position
        if len(shares) != num_shares:
            raise ConfigError(
                f"data.train was read by {len(shares)} processes up to step {read}, and would be "
                f"by {num_shares}, which share a stream otherwise: leave data.num_workers as it was"
            )
        if strides := {s.stride for s in shares if s is not None} - {1, num_shares}:
            raise ConfigError(f"no position in the stream data.train: a stride of {max(strides)}")
        if size != batch_size and position.is_read_again:
            raise ConfigError(
                f"data.train was read in mini-batches of {size} up to step {read}, and has to be "
                f"read again: leave data.batch_size = {size}"
            )
        return position._replace(batch_size=batch_size)

    def dump(self) -> str:
        return json.dumps(self)

    @property
    def is_read_again(self) -> bool:
        """Whether what was read has to be read again, for lack of a state."""
        return any(share is not None and not share.state for share in self.shares)

    @property
    def seconds(self) -> float:
        """Seconds that reading has taken, by all processes at once."""
        return max((share.seconds for share in self.shares if share is not None), default=0.0)

    @property
    def last(self) -> Share:
        """Where the process is now that has read the last mini-batch."""
        return self.shares[(self.read - 1) % len(self.shares)] or Share()

    def after(self, share: Share | None) -> Self:
        """Return the position after one more mini-batch, which leaves its process at `share`."""
        shares = list(self.shares)
        shares[self.read % len(shares)] = share
        return self._replace(read=self.read + 1, shares=shares)


class ShareReader(IterableDataset[Any]):
    """Reads the mini-batches of one process's share of `data.train`, for torch's DataLoader.

    Yields (whether it is new, mini-batch, Share as a tuple). One that is not new only takes the
    place of a mini-batch before `start`.

    Args:
        start: of all processes.
        sends_bytes: whether a mini-batch is pickled here.
    """

    def __init__(self, config: Config, start: Position, sends_bytes: bool) -> None:
        self._config = config
        self._start = start
        self._sends_bytes = sends_bytes

    def __iter__(self) -> Iterator[tuple[bool, Any, tuple[Any, ...] | None]]:
        info, start = get_worker_info(), self._start
        own, num_shares = (0, 1) if info is None else (info.id, info.num_workers)
        before, again = start.shares[own], start.is_read_again
        samples = _ShareSamples(self._config, own, num_shares, None if again else before)
        # This process has the mini-batches with the indices own, own + num_shares, ...
        first = own if again else own + start.read - start.read % num_shares
        for index in itertools.count(first, num_shares):
            if index >= start.read:
                yield True, *self._mini_batch(samples, index)
            elif again:
                is_last = index + num_shares >= start.read
                yield False, None, self._read_again(samples, index, before if is_last else None)
            else:  # done before; the processes take turns from the first one on
                yield False, None, before

    def _mini_batch(self, samples: _ShareSamples, index: int) -> tuple[Any, tuple[Any, ...]]:
        with samples.clock:
            batch = samples.collate(samples.take(index))
        share = samples.share()._replace(digest=digest_of(batch))
        return pickle.dumps(batch) if self._sends_bytes else batch, tuple(share)

    def _read_again(
        self, samples: _ShareSamples, index: int, last: Share | None
    ) -> tuple[Any, ...]:
        """Read a mini-batch that was read before; compare it if it is the `last` one of these."""
        with samples.clock:
            drawn = samples.take(index)
            is_another = last is not None and digest_of(samples.collate(drawn)) != last.digest
        share = samples.share()
        return tuple(share._replace(note=_ANOTHER) if is_another else share)


class _ShareSamples:
    """The samples of one process's share of a stream, pass after pass, without an end.

    Args:
        own, num_shares: the process, and their number.
        start: where it goes on; None: at the beginning.
    """

    def __init__(self, config: Config, own: int, num_shares: int, start: Share | None) -> None:
        section = config.require_data("training")
        self.collate = Collate(section.collate, config.has_equal_parts)
        self._seed, self._batch_size = config.seed, section.batch_size
        self._own, self._num_shares, self._start = own, num_shares, start
        self._passes = 0 if start is None else start.passes
        self._stride = num_shares if start is None else start.stride
        self.clock = _Stopwatch(0.0 if start is None else start.seconds)
        importing.resolve(section.train.callable, "data.train")  # not under a watch, which is slow
        self._watch = _CallWatch(get_worker_info)
        with self._watch:
            self._dataset: Any = create_dataset(section.train, "data.train", config.seed)
        self._iterator: Any = None
        self._index = 0
        self._samples = self._endless()

    def take(self, index: int) -> list[Any]:
        """Return the samples of a mini-batch, whose random numbers are seeded by its index."""
        self._index = index
        self._seed_samples()
        return list(itertools.islice(self._samples, self._batch_size))

    def share(self) -> Share:
        """Return where this process is now."""
        state, note = self._state()
        return Share(self._passes, self._stride, state, "", self.clock.seconds, note)

    def _seed_samples(self) -> None:
        random_streams.seed_all(self._seed, "stream", self._index, self._passes)

    def _endless(self) -> Iterator[Any]:
        while True:
            begins, is_empty = self._start is None, True
            for sample in self._one_pass():
                is_empty = False
                yield sample
            if is_empty and begins:
                raise ConfigError(self._empty())
            self._passes += 1

    def _one_pass(self) -> Iterator[Any]:
        start, self._start = self._start, None
        dataset = self._dataset
        if start is None:
            random_streams.seed_all(self._seed, "pass", self._own, self._passes)
        # Else the iterator may draw the next sample at once, as torchdata's does: under its seed.
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(self._passes)
        of_dataset, of_iterator = (None, None) if start is None else _unpacked(start.state)
        _load(dataset, of_dataset)
        with self._watch:
            self._iterator = iter(dataset)
            _load(self._iterator, of_iterator)
            if start is None:
                self._seed_samples()
            first = list(itertools.islice(self._iterator, 1))
        samples = itertools.chain(first, self._iterator)
        skipped = self._stride - 1
        if start is None:
            self._stride = 1 if self._watch.is_called else self._num_shares
            skipped = self._own % self._stride
        return itertools.islice(samples, skipped, None, self._stride)

    def _state(self) -> tuple[str, str]:
        """Return the state of dataset and iterator as text, or why it cannot be kept."""
        both = [None if self._iterator is self._dataset else self._dataset, self._iterator]
        found = [each.state_dict() if _keeps_state(each) else None for each in both]
        if found == [None, None]:
            return "", ""
        try:
            text = base64.b64encode(dump_message(found)).decode()
        except TypeError as error:
            return "", f"data.train: its state_dict cannot be kept: {error}"
        if len(text) > (most := MAX_POSITION // self._num_shares - MAX_REST):
            return "", f"data.train: its state_dict of {len(text)} bytes is more than {most}"
        return text, ""

    def _empty(self) -> str:
        if self._passes:
            return (
                f"data.train yields nothing in pass {self._passes + 1} over it: it has to begin "
                "anew each time, or not to end before the run does"
            )
        if self._num_shares == 1:
            return "data.train yields no samples"
        return (
            f"data.train yields no samples for process {self._own + 1} of {self._num_shares}: "
            "data.num_workers may be as many as there are files (shards) in it"
        )


class _Stopwatch:
    """Adds up the seconds of `with` blocks."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._began


class _CallWatch:
    """Whether this thread has called a function of Python within a `with` block."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._code: CodeType = function.__code__
        self.is_called = False

    def __enter__(self) -> None:
        self._before = sys.getprofile()
        sys.setprofile(self._look)

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        self.is_called |= event == "call" and frame.f_code is self._code


def _keeps_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _load(target: Any, state: Any) -> None:
    if state is not None:
        target.load_state_dict(state)


def _unpacked(text: str) -> tuple[Any, Any]:
    of_dataset, of_iterator = load_message(base64.b64decode(text))
    return of_dataset, of_iterator


def digest_of(batch: Any) -> str:
    """Return a hash of the tensors of a mini-batch, the same on every host."""
    digest = hashlib.sha256()
    for tensor in pytree.tensors(pytree.plain(batch)):
        flat = tensor.reshape(-1)
        digest.update(
            tensor_line(str(tensor.shape), flat[:: 1 + flat.numel() // COMPARED]).encode()
        )
    return digest.hexdigest()[:16]
