"""Train steps, conducted where the loss is.

    driver ──one call a step──> conductor, beside the stage that computes the loss
                                   │  for each bundle of micro-batches, a few at once:
                                   │    an autograd context, the losses, their distributed backward
           <──losses, reports──────┘

The driver could ask for each micro-batch itself, but then every one of them would make a journey
there and back, twice, to learn nothing new on it: with two stages a third of all messages. Like
this the driver's cost of a micro-batch is its slice of the batch.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Running
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.futures import Future

from rpcmp.errors import NonFiniteLossError
from rpcmp.rpc.messages import Bundle, MicrobatchMeta, StageOutputs, Trained
from rpcmp.rpc.transport import NOBODY, Raised, Transport, attempt, result


class TrainStepRunner:
    """Keeps bundles in flight, one thread and one autograd context each.

    Args:
        ask: the answer to one bundle of the stage that computes the loss, in this process.
        in_flight: how many may be under way at once.
        peers: the members of the group, across which it differentiates.
        is_scaled: whether gradients are those of a scaled loss: then it is them that decide whether
            a step is skipped, and a loss that is not finite is no error.
    """

    def __init__(
        self,
        ask: Callable[[Bundle], Future[Any]],
        in_flight: int,
        peers: Transport,
        is_scaled: bool = False,
    ) -> None:
        self._ask = ask
        self._peers = peers
        self._check = _unchecked if is_scaled else _finite
        self._threads = ThreadPoolExecutor(in_flight, "rpcmp-bundle")
        self._lock = threading.Lock()
        self._last = 0
        self._waiting: dict[int, tuple[Sequence[Bundle], Future[Any]]] = {}

    def train(self, bundles: Sequence[Bundle], after: int) -> Future[Any]:
        """Forward and backward of a round; answers with a Trained a micro-batch, in order.

        The first failure is the answer, a Raised, as soon as it happens: the driver then aborts the
        round, which frees the others.

        Args:
            bundles: the round's.
            after: the number of the training round before; 0 for the first. Calls may overtake each
                other, and a later round's micro-batches must not keep the threads from an earlier
                one's, for which they wait.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._waiting[after] = (bundles, answer)
            while (following := self._waiting.pop(self._last, None)) is not None:
                self._start(*following)
        return answer

    def _start(self, bundles: Sequence[Bundle], answer: Future[Any]) -> None:
        running = [self._threads.submit(self._attempt, bundle) for bundle in bundles]
        collected = _Collected(running, answer)
        for each in running:
            each.add_done_callback(collected.one_ended)
        self._last = bundles[0].round

    def _attempt(self, bundle: Bundle) -> Any:
        """A Trained for each micro-batch, or a Raised."""
        return attempt(lambda: self._train(bundle))

    def _train(self, bundle: Bundle) -> list[Trained]:
        with self._peers.autograd_context() as context_id:
            answer: list[StageOutputs] = result(self._ask(bundle), NOBODY)
            trained = [
                Trained(self._check(outputs.value.item(), work), outputs.reports or {})
                for work, outputs in zip(bundle.works, answer, strict=True)
            ]
            self._peers.backward(context_id, [outputs.value for outputs in answer])
        return trained


def _finite(loss: float, work: MicrobatchMeta) -> float:
    if not math.isfinite(loss):
        raise NonFiniteLossError(loss, work.step, work.microbatch)
    return loss


def _unchecked(loss: float, work: MicrobatchMeta) -> float:
    return loss


class _Collected:
    """Gives the answer once: all that came, or the first failure."""

    def __init__(self, running: Sequence[Running[Any]], answer: Future[Any]) -> None:
        self._running = running
        self._answer = answer
        self._lock = threading.Lock()
        self._left = len(running)

    def one_ended(self, ended: Running[Any]) -> None:
        is_raised = isinstance(ended.result(), Raised)
        with self._lock:
            if self._left <= 0:
                return
            self._left = 0 if is_raised else self._left - 1
            if self._left:
                return
        self._answer.set_result(
            ended.result()
            if is_raised
            else [trained for each in self._running for trained in each.result()]
        )
