"""Mini-batches that a stage loads itself, ahead of the rounds that need them.

driver announces 5, 6, 7      ──prefetch──> loaded in the background, see `loader_pool`
a forward needs a slice of 5  ──get───────> its own copy, once 5 is there
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.futures import Future

from rpcmp.config.topology import SOURCES, Reference
from rpcmp.data.loader_pool import LoaderPool, Parts
from rpcmp.errors import JobError, RpcmpError, StageError, to_wire
from rpcmp.pipelining import microbatches
from rpcmp.pipelining.cost_model import STEPS_AHEAD
from rpcmp.rpc import transport
from rpcmp.rpc.messages import BatchIndices, Bundle, DatasetInfo, RoundHeader, StageOutputs
from rpcmp.rpc.transport import NOBODY, Raised

TARGET = Reference(SOURCES[1])
"""The targets as the sink reads them for its loss."""


@dataclass
class _MiniBatch:
    """A mini-batch that is loaded, or will be.

    Attributes:
        parts: what the stage reads of it, or why it could not be loaded.
        round: the round that uses it; 0 if none does yet.
    """

    parts: Future[Parts | RpcmpError] = field(default_factory=Future)
    round: int = 0


class StageDataLoader:
    """The mini-batches that a stage loads, until the end of their round. Thread-safe.

    Attributes:
        holding: sizes of the datasets; set by `wait`.
    """

    def __init__(self, loaders: LoaderPool) -> None:
        self.holding: DatasetInfo | None = None
        self._loaders = loaders
        self._lock = threading.Lock()
        self._mini_batches: dict[int, _MiniBatch] = {}
        self._overtaking: dict[int, Callable[[], None]] = {}
        self._next = 1
        self._aborted_round = 0

    def __len__(self) -> int:
        return len(self._mini_batches)

    def wait(self) -> None:
        """Return when all datasets are built."""
        self.holding = self._loaders.holding()

    def order(self, epoch: int) -> Future[Any]:
        """Return the indices of an epoch's samples, or a Raised."""
        answer: Future[Any] = Future()

        def done(order: Tensor | RpcmpError) -> None:
            answer.set_result(Raised(to_wire(order)) if isinstance(order, RpcmpError) else order)

        self._loaders.order(epoch, done)
        return answer

    def prefetch(self, drawn: Sequence[BatchIndices]) -> Future[Any]:
        """Load mini-batches; return a future of a stream's position after the last of them.

        For a dataset with indices it is ready at once.
        """
        for batch in drawn:
            with self._lock:
                # No round needs what has no samples: a stream that is read again.
                mini_batch = self._mini_batch(batch.batch_id) if batch.samples else _MiniBatch()
                load = functools.partial(self._loaders.load, batch, mini_batch.parts.set_result)
                self._in_order(batch.batch_id, load)
        answer: Future[Any] = Future()
        if self.holding is None or drawn[-1].dataset not in self.holding.streams:
            answer.set_result("")
            return answer

        def loaded(parts: list[Parts | RpcmpError]) -> None:
            (last,) = parts
            if isinstance(last, RpcmpError):
                answer.set_result(Raised(to_wire(last)))
            else:
                answer.set_result(last.position)

        transport.when_all([(NOBODY, mini_batch.parts)], loaded)
        return answer

    def _in_order(self, number: int, load: Callable[[], None]) -> None:
        """Load in the order of the numbers, although announcements overtake each other."""
        self._overtaking[number] = load
        while (load_next := self._overtaking.pop(self._next, None)) is not None:
            load_next()
            self._next += 1

    def get(self, bundle: Bundle, reference: Reference) -> Future[Any]:
        """Return StageOutputs per micro-batch of a bundle, or a Raised; copies at every call.

        The mini-batch may be announced later, since messages overtake each other.
        """
        answer: Future[Any] = Future()
        transport.when_all(
            [(NOBODY, self._needed(bundle.round).parts)],
            lambda parts: answer.set_result(self._slices(parts[0], bundle, reference)),
        )
        return answer

    def skip(self, header: RoundHeader) -> None:
        """Record a round whose bundles are all for other replicas."""
        self._needed(header)

    def forget(self, last: int) -> None:
        """Drop all mini-batches after the rounds up to `last` were aborted.

        What is needed later is announced again. Requests that the abort has overtaken fail.
        """
        with self._lock:
            self._aborted_round = max(last, self._aborted_round)
            self._mini_batches.clear()

    def _slices(self, parts: Parts | RpcmpError, bundle: Bundle, reference: Reference) -> Any:
        try:
            if isinstance(parts, RpcmpError):
                raise parts
            count = bundle.round.num_microbatches
            if parts.weights and reference == TARGET and len(parts.weights) != count:
                weights = self._loaders.weigh(parts.trees[TARGET], bundle.round)
                parts = parts._replace(weights=weights)
            return _slices(parts, bundle, reference)
        except StageError as error:  # raised in a process that does not know the step
            fields = {**error.fields, "step": bundle.round.step}
            return Raised(to_wire(StageError(**fields)))
        except RpcmpError as error:
            return Raised(to_wire(error))

    def _needed(self, header: RoundHeader) -> _MiniBatch:
        with self._lock:
            if header.number <= self._aborted_round:  # it would never be loaded
                aborted = _MiniBatch()
                aborted.parts.set_result(JobError(f"step {header.step} was aborted"))
                return aborted
            mini_batch = self._mini_batch(header.batch_id)
            mini_batch.round = header.number
            self._drop_before(header.number)
        return mini_batch

    def _mini_batch(self, number: int) -> _MiniBatch:
        return self._mini_batches.setdefault(number, _MiniBatch())

    def _drop_before(self, current: int) -> None:
        """Drop rounds that are over: a round starts only after the one STEPS_AHEAD before it."""
        done = range(1, current - STEPS_AHEAD + 1)
        for number in [n for n, each in self._mini_batches.items() if each.round in done]:
            del self._mini_batches[number]


def _slices(parts: Parts, bundle: Bundle, reference: Reference) -> list[StageOutputs]:
    whole, count = parts.trees[reference], bundle.round.num_microbatches
    metas = bundle.microbatches
    slices = [StageOutputs(microbatches.cut(whole, count, meta.number)) for meta in metas]
    if reference != TARGET or not parts.weights:
        return slices
    weights = [parts.weights[meta.number] for meta in metas]
    return [one._replace(weight=weight) for one, weight in zip(slices, weights, strict=True)]
