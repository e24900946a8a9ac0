"""One training step, run from the worker that computes the loss.

    driver ──one call per step──> TrainStepRunner, in the sink's process
                                     │  for each bundle, several at once, on a thread each:
                                     │    an autograd context, losses, a distributed backward
           <──losses, reports────────┘

If the driver asked for each micro-batch itself, every one of them would make two round trips more
and carry nothing new: with two stages a third of all messages. This way the driver's only cost per
micro-batch is its slice of the batch.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future as Running
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.futures import Future

from rpcmp.errors import NonFiniteLossError
from rpcmp.rpc.messages import Bundle, MicrobatchMeta, StageOutputs, Trained
from rpcmp.rpc.transport import Raised, Transport, attempt, result
from rpcmp.worker.requests import DRIVER_PORT, ForwardRequests


class TrainStepRunner:
    """Runs the train steps of a sink, or of one of its replicas.

    Args:
        in_flight: how many bundles may be in flight.
        is_scaled: whether the loss is scaled. Gradients then decide whether a step is skipped, and
            a loss that is not finite is not an error.
    """

    def __init__(
        self,
        requests: ForwardRequests,
        in_flight: int,
        transport: Transport,
        is_scaled: bool = False,
    ) -> None:
        self._requests = requests
        self._transport = transport
        self._is_scaled = is_scaled
        self._threads = ThreadPoolExecutor(in_flight, "rpcmp-bundle")
        self._lock = threading.Lock()
        self._last = 0
        self._waiting: dict[int, tuple[Sequence[Bundle], Future[Any]]] = {}

    def train(self, bundles: Sequence[Bundle], after: int) -> Future[Any]:
        """Run forward and backward of one round.

        Args:
            after: the training round before; 0 for the first. Calls may overtake each other, and
                micro-batches of a later round must not occupy the threads that an earlier round
                needs to complete.

        Returns:
            A future of one Trained per micro-batch, in order. The first failure ends it with a
            Raised: the driver then aborts the round, which frees the other threads.
        """
        answer: Future[Any] = Future()
        with self._lock:
            self._waiting[after] = (bundles, answer)
            while (following := self._waiting.pop(self._last, None)) is not None:
                self._start(*following)
        return answer

    def _start(self, bundles: Sequence[Bundle], answer: Future[Any]) -> None:
        running = [
            self._threads.submit(attempt, functools.partial(self._train, bundle))
            for bundle in bundles
        ]
        lock, missing = threading.Lock(), len(running)

        def collect(done: Running[Any]) -> None:
            nonlocal missing
            trained = done.result()
            with lock:
                missing -= 1
                if answer.done():
                    return
                if isinstance(trained, Raised):
                    answer.set_result(trained)
                elif not missing:
                    all_trained = (each.result() for each in running)
                    answer.set_result(list(itertools.chain.from_iterable(all_trained)))

        for each in running:
            each.add_done_callback(collect)
        self._last = bundles[0].round.number

    def _train(self, bundle: Bundle) -> list[Trained]:
        with self._transport.autograd_context() as context_id:  # stage.py [3]
            answer: list[StageOutputs] = result(self._requests.ask(bundle, DRIVER_PORT))
            trained = [
                Trained(self._checked(outputs.value.item(), meta), outputs.reports or {})
                for meta, outputs in zip(bundle.microbatches, answer, strict=True)
            ]
            # stage.py [9]
            self._transport.backward(context_id, [outputs.value for outputs in answer])
        return trained

    def _checked(self, loss: float, meta: MicrobatchMeta) -> float:
        if not self._is_scaled and not math.isfinite(loss):
            raise NonFiniteLossError(loss, meta.round.step, meta.number)
        return loss
