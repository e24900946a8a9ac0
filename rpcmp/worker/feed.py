"""What a stage reads of mini-batches that it loads itself.

driver: "you will be asked for 5, 6, 7" ──expect──> loaded in the background
a forward needs a slice of 5             ──get────> a copy of its own, once 5 is there
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.futures import Future

from rpcmp import microbatch, transport
from rpcmp.errors import JobError, RpcmpError, StageError, to_wire
from rpcmp.graph import Reference
from rpcmp.inflight import STEPS_AHEAD
from rpcmp.transport import NOBODY, Raised
from rpcmp.work import Bundle, Drawn, Holding, Outputs, Work
from rpcmp.worker.loaders import Loaders
from rpcmp.worker.loading import Parts


@dataclass
class _MiniBatch:
    """One that is loaded, or will be.

    Attributes:
        parts: what of it the stage reads, or why it could not be loaded.
        round: the round that works on it; 0: none so far.
    """

    parts: Future[Parts | RpcmpError] = field(default_factory=Future)
    round: int = 0


class Feed:
    """The mini-batches that a stage loads, from when they are announced to when they are done.

    Thread-safe.

    Args:
        loaders: which load them.

    Attributes:
        holding: what they have built; set by `wait`.
    """

    def __init__(self, loaders: Loaders) -> None:
        self.holding: Holding | None = None
        self._loaders = loaders
        self._lock = threading.Lock()
        self._mini_batches: dict[int, _MiniBatch] = {}
        self._aborted_round = 0

    def __len__(self) -> int:
        return len(self._mini_batches)

    def wait(self) -> None:
        """Return when all datasets are built.

        Raises:
            ConfigError: one cannot be built here.
        """
        self.holding = self._loaders.holding()

    def order(self, epoch: int) -> Future[Any]:
        """The indices of an epoch's samples, or a Raised."""
        answer: Future[Any] = Future()

        def done(found: Tensor | RpcmpError) -> None:
            answer.set_result(Raised(to_wire(found)) if isinstance(found, RpcmpError) else found)

        self._loaders.order(epoch, done)
        return answer

    def expect(self, drawn: Sequence[Drawn]) -> None:
        """Load these mini-batches, one after the other."""
        for each in drawn:
            with self._lock:
                mini_batch = self._mini_batch(each.number)
            self._loaders.load(each, mini_batch.parts.set_result)

    def get(self, bundle: Bundle, reference: Reference) -> Future[Any]:
        """Outputs, one for each micro-batch of a bundle, or a Raised; copies at every call.

        The mini-batch may be announced later: messages overtake each other.
        """
        mini_batch = self._needed(bundle)
        answer: Future[Any] = Future()

        def loaded(found: list[Any]) -> None:
            answer.set_result(_slices(found[0], bundle.works, reference))

        transport.when_all([(NOBODY, mini_batch.parts)], loaded)
        return answer

    def skip(self, bundle: Bundle) -> None:
        """Hear of a round whose bundles are all for other replicas."""
        self._needed(bundle)

    def forget(self, last: int) -> None:
        """Let go of all: the rounds up to `last` were aborted, and what comes is announced again.

        Whoever asks for them even so, since the abort has overtaken the question, gets an error.
        """
        with self._lock:
            self._aborted_round = max(last, self._aborted_round)
            self._mini_batches.clear()

    def _needed(self, bundle: Bundle) -> _MiniBatch:
        with self._lock:
            if bundle.round <= self._aborted_round:  # nobody would load it
                aborted = _MiniBatch()
                aborted.parts.set_result(JobError(f"step {bundle.step} was aborted"))
                return aborted
            mini_batch = self._mini_batch(bundle.works[0].drawn)
            mini_batch.round = bundle.round
            self._let_go_before(bundle.round)
        return mini_batch

    def _mini_batch(self, number: int) -> _MiniBatch:
        return self._mini_batches.setdefault(number, _MiniBatch())

    def _let_go_before(self, current: int) -> None:
        """No round begins before all is done that lies STEPS_AHEAD rounds before it."""
        done = range(1, current - STEPS_AHEAD + 1)
        for number in [n for n, each in self._mini_batches.items() if each.round in done]:
            del self._mini_batches[number]


def _slices(parts: Parts | RpcmpError, works: Sequence[Work], reference: Reference) -> Any:
    if isinstance(parts, StageError):  # which does not know the step
        parts = StageError(**{**parts.fields, "step": works[0].step})
    if isinstance(parts, RpcmpError):
        return Raised(to_wire(parts))
    whole = parts[reference]
    return [
        Outputs(microbatch.cut(whole, work.num_microbatches, work.microbatch)) for work in works
    ]
