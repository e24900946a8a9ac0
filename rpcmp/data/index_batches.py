"""Mini-batches as indices of samples, without tensors: for a driver whose stages load the samples.

    draw 5, 6, 7 ──announce──> every stage that reads the batch: loads them in the background
    step 5       ──────────── "the mini-batch with number 5" ───────> takes slices of what is there
    draw 8       ──announce──> ...

AHEAD mini-batches per loader process are announced before they are needed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from rpcmp.data.batches import Key, SampleOrder
from rpcmp.rpc.messages import BatchIndices

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
        announce: announces mini-batches to the stages.
        num_ahead: how many are announced before they are needed.
        numbers: yields the number of each mini-batch that is drawn, of all datasets.
        total: number of mini-batches in all epochs, so that an epoch's first ones are loaded while
            the one before ends; 0: epochs do not follow on each other.
    """

    def __init__(
        self,
        dataset: str,
        order: SampleOrder,
        announce: Callable[[Sequence[BatchIndices]], None],
        num_ahead: int,
        numbers: Iterator[int],
        total: int = 0,
    ) -> None:
        self._dataset = dataset
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
        self._announce([drawn])
        return drawn

    def epoch(self, epoch: int, first: int = 0) -> Iterator[BatchIndices]:
        """Yield the mini-batches of `epoch`, counted from 1, from the one with index `first`."""
        if not self._announced or self._announced[0].position != (epoch, first):
            self._announced.clear()
            self._coming = self._draw(epoch, first)
        for _ in range(first, len(self)):
            self._announce_next()
            yield self._announced.popleft()

    def _announce_next(self) -> None:
        """Announce the mini-batch that is needed now and some after it, unless done before."""
        missing = 1 + self._num_ahead - len(self._announced)
        if drawn := list(itertools.islice(self._coming, missing)):
            self._announce(drawn)
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
