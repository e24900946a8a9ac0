"""The backwards of a stage on its compute thread: whole, split, summed, failed and aborted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpcmp.errors import StageError, from_wire
from rpcmp.pipelining.schedule import Action, InFlightLimits
from rpcmp.rpc.messages import Bundle, MicrobatchMeta, StageOutputs
from rpcmp.worker.backward import Backwards, Failures, SavedBundle, SavedForward
from rpcmp.worker.boundary import LocalTape
from rpcmp.worker.copies import Copies
from rpcmp.worker.executor import Task
from rpcmp.worker.weight_grad import WeightGradients, splittable
from tests.support.gradients import lists
from tests.support.rounds import compute_thread, header

SECONDS = 30.0  # a test that hangs fails after this time
CPU = Copies(torch.device("cpu"))
ROUND = header(1, step=7)
(META,) = ROUND.microbatches([0])

product = splittable(torch.mul)


class Stage:
    """The backwards of a stage with one micro-batch, whose forward is done.

    Attributes:
        failures: errors of its backwards and weight gradients.
        reported: inputs without gradients, as reported to their producers.
        ended: set when the round is complete.
    """

    def __init__(
        self, splits: bool = False, missing: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.failures = Failures()
        self.reported: list[tuple[int, list[int]]] = []
        self.ended = threading.Event()
        schedule, limits = "zero-bubble" if splits else "1f1b", InFlightLimits(1, 1, splits)
        self.compute = compute_thread(schedule, limits, lambda _: self.ended.set())
        self.compute.start_round(ROUND)
        self.backwards = Backwards("s", self.compute, self._mark_at_producer, self.failures, CPU)
        for port, tensors in (missing or {}).items():
            self.backwards.mark_none_gradients(1, 0, port, tensors)
        self._pool = ThreadPoolExecutor(1)

    def _mark_at_producer(
        self, meta: MicrobatchMeta, bundle: int, index: int, tensors: list[int]
    ) -> None:
        self.reported.append((index, tensors))

    def forward(
        self, weights: WeightGradients, function: Callable[..., Any], *received: Tensor
    ) -> SavedBundle:
        """Run `function`, each of whose outputs has a reader of its own."""
        tape = LocalTape([StageOutputs(value) for value in received], CPU)
        with weights.watch():
            produced = tape.leave(function(*tape.inputs))
        read = [[position] for position in range(len(produced))]
        done = threading.Event()
        self.compute.submit(1, Action.FORWARD, 0, Task([done.set], 0))
        assert done.wait(SECONDS)
        return memory_of(tape, weights, read, produced)

    def run(self, memory: SavedBundle, *gradients: Tensor | None) -> Future[list[Tensor | None]]:
        """Run the backward on a thread, as the distributed autograd engine does."""
        return self._pool.submit(self.backwards.run, memory, gradients)


def memory_of(
    tape: LocalTape, weights: WeightGradients, read: list[list[int]], produced: list[Tensor]
) -> SavedBundle:
    dtypes = [tensor.dtype for tensor in produced]
    kept = SavedForward(META, tape, weights, dtypes, read, [False] * len(read))
    return SavedBundle(Bundle(ROUND, 0), [kept])


def plain() -> WeightGradients:
    """Return the weight gradients of a micro-batch that is not split."""
    return WeightGradients(frozenset())


def test_a_backward_returns_the_gradients_of_the_inputs() -> None:
    stage = Stage()
    x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    memory = stage.forward(plain(), lambda x, y: 2 * x + 3 * y, x, y)
    found = stage.run(memory, torch.tensor([10.0])).result(SECONDS)
    assert lists(found) == [[20], [30]]
    assert stage.ended.wait(SECONDS)
    assert stage.reported == []


@pytest.mark.parametrize(
    ("missing", "expected", "reported"),
    [({}, [[6]], []), ({0: [0]}, [[5]], []), ({0: [0], 1: [0]}, [None], [(0, [0])])],
)
def test_none_gradients_are_left_out_of_the_sum_and_reported_to_producers(
    missing: dict[int, list[int]], expected: list[Any], reported: list[tuple[int, list[int]]]
) -> None:
    stage = Stage(missing=missing)
    memory = stage.forward(plain(), lambda x: [x * 1, x * 5], torch.ones(1, requires_grad=True))
    ones = torch.ones(1), torch.ones(1)  # distributed autograd fills in missing ones
    assert lists(stage.run(memory, *ones).result(SECONDS)) == expected
    assert stage.reported == reported


def test_an_output_with_several_readers_gets_the_sum_of_their_gradients() -> None:
    stage = Stage()
    memory = stage.forward(plain(), lambda x: [x * 2, x * 3], torch.ones(1, requires_grad=True))
    memory.forwards[0].read[:] = [[0, 1], [0]]
    memory.forwards[0].has_token[:] = [False, False]
    gradients = (torch.tensor([value]) for value in (1.0, 10.0, 100.0))
    assert lists(stage.run(memory, *gradients).result(SECONDS)) == [[2 * 101 + 30]]


def bundle(*functions: Callable[[Tensor], Any]) -> SavedBundle:
    """Return a bundle with two readers: one reads all outputs, the other reads one output."""
    kept = []
    for microbatch, function in enumerate(functions):
        tape = LocalTape([StageOutputs(torch.ones(1, requires_grad=True))], CPU)
        dtypes = [tensor.dtype for tensor in tape.leave(function(*tape.inputs))]
        read = [list(range(len(dtypes))), [0]]
        meta = META._replace(number=microbatch)
        kept.append(SavedForward(meta, tape, plain(), dtypes, read, [False, False]))
    return SavedBundle(Bundle(ROUND, 0), kept)


def test_gradients_arrive_per_reader_and_are_sent_per_micro_batch() -> None:
    stage = Stage(missing={1: [0]})
    memory = bundle(lambda x: [2 * x, 3 * x], lambda x: [5 * x])
    gradients = (torch.tensor([value]) for value in (1.0, 10.0, 100.0, 0.0, 0.0))
    stage.compute.submit(1, Action.FORWARD, 0, Task([], 0))
    assert lists(stage.run(memory, *gradients).result(SECONDS)) == [[2 + 30], [500]]
    assert stage.ended.wait(SECONDS)


def test_after_a_failure_the_rest_of_a_bundle_is_not_differentiated() -> None:
    stage = Stage()
    ran: list[int] = []

    def noting(number: int) -> Callable[[Tensor], Any]:
        def function(x: Tensor) -> list[Tensor]:
            y = planted(x) if number == 1 else x * 1
            y.register_hook(lambda _: ran.append(number))
            return [y]

        return function

    memory = bundle(*map(noting, range(3)))
    stage.compute.submit(1, Action.FORWARD, 0, Task([], 0))
    with pytest.raises(RuntimeError, match="backward failed at stage 's'"):
        stage.run(memory, *(torch.ones(1) for _ in range(6))).result(SECONDS)
    assert stage.ended.wait(SECONDS)
    assert ran == [0, 1]
    (raised,) = stage.failures.take(1, 1)
    assert "in backward of micro-batch 1 at step 7" in str(from_wire(raised.error))


def test_a_split_backward_answers_before_its_weight_gradient_which_ends_the_round() -> None:
    stage = Stage(splits=True)
    weight = nn.Parameter(torch.full((1,), 3.0))
    weights = WeightGradients(frozenset([weight]))
    memory = stage.forward(
        weights, lambda x: product(x, weight), torch.full((1,), 2.0).requires_grad_()
    )
    assert lists(stage.run(memory, torch.ones(1)).result(SECONDS)) == [[3]]
    assert stage.ended.wait(SECONDS)
    assert lists([weight.grad]) == [[2]]
    assert weight.grad is not None
    assert not weight.grad.requires_grad


class Planted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("planted")


planted: Callable[[Tensor], Tensor] = Planted.apply


@splittable
def product_that_fails(value: Tensor, weight: Tensor) -> Tensor:
    """Return a product whose backward fails if the weight needs a gradient."""
    return value * planted(weight)


MESSAGE = "stage 's' failed in backward of micro-batch 0 at step 7: ValueError: planted"


@pytest.mark.parametrize("splits", [False, True])
def test_a_failed_backward_is_recorded_and_its_round_ends(splits: bool) -> None:
    stage = Stage(splits)
    received = torch.ones(1, requires_grad=True)
    memory = stage.forward(plain(), lambda x: planted(x), received)
    with pytest.raises(RuntimeError, match="backward failed at stage 's'"):
        stage.run(memory, torch.ones(1)).result(SECONDS)
    assert stage.ended.wait(SECONDS)
    (raised,) = stage.failures.take(1, 1)
    assert isinstance(error := from_wire(raised.error), StageError)
    assert str(error) == MESSAGE
    assert "Traceback" in error.traceback
    assert stage.failures.broken is None


def test_a_failed_weight_gradient_breaks_the_stage() -> None:
    stage = Stage(splits=True)
    weight = nn.Parameter(torch.full((1,), 3.0))
    weights = WeightGradients(frozenset([weight]))
    received = torch.ones(1, requires_grad=True)
    memory = stage.forward(weights, lambda x: product_that_fails(x, weight), received)
    assert lists(stage.run(memory, torch.ones(1)).result(SECONDS)) == [[3]]
    assert stage.ended.wait(SECONDS)
    assert str(stage.failures.broken) == MESSAGE


def test_an_abort_frees_waiting_threads_and_all_activations() -> None:
    stage = Stage()
    memory = stage.forward(plain(), lambda x: x * 2, torch.ones(1, requires_grad=True))
    stage.compute.abort(1, 1)
    with pytest.raises(RuntimeError, match="stage 's': the step was aborted"):
        stage.run(memory, torch.ones(1)).result(SECONDS)
    (kept,) = memory.forwards
    assert isinstance(kept.tape, LocalTape)
    assert kept.tape.inputs == []
    assert not stage.failures.take(1, 1)
