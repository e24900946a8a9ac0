"""The train steps of a sink: order of rounds and results, failures, losses that are not finite."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from rpcmp.errors import JobError, NonFiniteLossError, from_wire, to_wire
from rpcmp.rpc.messages import Bundle, StageOutputs
from rpcmp.rpc.transport import Raised
from rpcmp.worker.train_step import TrainStepRunner
from tests.support.processes import poll_for
from tests.support.rounds import header


class Sink:
    """A stand-in for a sink's requests and transport; the test answers each bundle.

    Attributes:
        asked: the answers that the runner waits for, by round and bundle.
        differentiated: the losses of each distributed backward.
        contexts: autograd contexts that are open.
    """

    def __init__(self) -> None:
        self.asked: dict[tuple[int, int], Future[Any]] = {}
        self.differentiated: list[list[float]] = []
        self.contexts = 0
        self._lock = threading.Lock()

    def ask(self, bundle: Bundle, port: int) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            self.asked[bundle.round.number, bundle.number] = answer
        return answer

    @contextlib.contextmanager
    def autograd_context(self) -> Iterator[int]:
        with self._lock:
            self.contexts += 1
        try:
            yield 1
        finally:
            with self._lock:
                self.contexts -= 1

    def backward(self, context_id: int, roots: Sequence[Tensor]) -> None:
        assert context_id == 1
        with self._lock:
            self.differentiated.append([root.item() for root in roots])

    def runner(self, in_flight: int, is_scaled: bool = False) -> TrainStepRunner:
        return TrainStepRunner(cast(Any, self), in_flight, cast(Any, self), is_scaled)

    def answer(self, round_number: int, bundle: int, *losses: float) -> None:
        """Answer a bundle with the losses of its micro-batches, once it is requested."""
        outputs = [StageOutputs(torch.tensor(loss)) for loss in losses]
        self._requested(round_number, bundle).set_result(outputs)

    def fail(self, round_number: int, bundle: int) -> None:
        raised = Raised(to_wire(JobError("the worker is lost")))
        self._requested(round_number, bundle).set_result(raised)

    def _requested(self, round_number: int, bundle: int) -> Future[Any]:
        key = round_number, bundle
        poll_for(lambda: key in self.asked, "a request")
        return self.asked[key]


def bundles(round_number: int, count: int = 2) -> list[Bundle]:
    """Return a round's bundles, of two micro-batches each."""
    a_round = header(round_number, 2 * count, per_message=2, in_turns=True)
    return [Bundle(a_round, number) for number in range(count)]


def test_losses_come_in_the_order_of_micro_batches() -> None:
    sink = Sink()
    answer = sink.runner(2).train(bundles(1), 0)
    sink.answer(1, 1, 3.0, 4.0)
    assert not answer.done()
    sink.answer(1, 0, 1.0, 2.0)
    assert [trained.loss for trained in answer.wait()] == [1.0, 2.0, 3.0, 4.0]
    assert sorted(sink.differentiated) == [[1.0, 2.0], [3.0, 4.0]]
    assert sink.contexts == 0


def test_a_round_that_overtakes_the_one_before_waits_for_it() -> None:
    sink = Sink()
    runner = sink.runner(1)
    later = runner.train(bundles(2, 1), 1)
    assert not sink.asked
    first = runner.train(bundles(1, 1), 0)
    sink.answer(1, 0, 1.0, 2.0)
    assert [trained.loss for trained in first.wait()] == [1.0, 2.0]
    sink.answer(2, 0, 3.0, 4.0)
    assert [trained.loss for trained in later.wait()] == [3.0, 4.0]


def test_the_failure_detection_is_the_answer_at_once() -> None:
    sink = Sink()
    answer = sink.runner(2).train(bundles(1), 0)
    sink.fail(1, 1)
    raised = answer.wait()
    assert str(from_wire(raised.error)) == "the worker is lost"
    sink.fail(1, 0)  # the driver's abort
    poll_for(lambda: not sink.contexts, "the contexts' end")
    assert sink.differentiated == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_an_error_unless_losses_are_scaled(loss: float) -> None:
    sink = Sink()
    answer = sink.runner(1).train(bundles(1, 1), 0)
    sink.answer(1, 0, 1.0, loss)
    error = from_wire(answer.wait().error)
    assert isinstance(error, NonFiniteLossError)
    assert (error.step, error.microbatch) == (1, 1)
    assert sink.differentiated == []

    answer = sink.runner(1, is_scaled=True).train(bundles(2, 1), 0)
    sink.answer(2, 0, 1.0, loss)
    assert str([trained.loss for trained in answer.wait()]) == str([1.0, loss])
    assert len(sink.differentiated) == 1
