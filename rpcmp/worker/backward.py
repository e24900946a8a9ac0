"""A stage's backwards, whole or split: from its readers' gradients to its inputs' gradients.

    engine thread     gradients ──> run ── submit B ──┐      waits  ┌──> gradients, upstream
    compute thread                                    └─ B ─────────┘        W
                                             the schedule's turn       and again its turn

A thread of the distributed autograd engine waits in `run` until the schedule has let the compute
thread do the work. If the schedule splits backwards, weight gradients are actions of their own.

The sink knows the gradient of its loss, which is one. So its backward is queued as soon as the loss
is on the host, instead of after a round trip of the loss, and `run` finds the result there.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future as Waiting
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from rpcmp.errors import RpcmpError, StageError, from_wire, to_wire
from rpcmp.pipelining.schedule import Action
from rpcmp.rpc.messages import Bundle, MicrobatchMeta
from rpcmp.rpc.shared_memory import SharedTensor
from rpcmp.rpc.transport import Raised
from rpcmp.worker import boundary
from rpcmp.worker.boundary import Gradients, LocalTape
from rpcmp.worker.copies import Copies
from rpcmp.worker.executor import ComputeThread, Task
from rpcmp.worker.failure import stage_failure
from rpcmp.worker.recompute import Replay
from rpcmp.worker.weight_grad import WeightGradients

ArrivingGradients = Callable[[], list[Tensor | None]]
"""Returns the gradient of each tensor that a stage produced, on its device."""


def stage_error(
    stage: str, phase: str, meta: MicrobatchMeta, error: BaseException, received: str = ""
) -> StageError:
    return stage_failure(stage, phase, error, meta.round.step, meta.number, received)


class Failures:
    """Failures at a stage that the driver has not collected yet. Thread-safe.

    Attributes:
        broken: the failure after which this stage cannot go on, because no caller waited for what
            failed and other stages may have stepped; None while it can.
    """

    def __init__(self) -> None:
        self.broken: RpcmpError | None = None
        self._lock = threading.Lock()
        self._failures: list[tuple[int, Raised]] = []

    def add(self, round_number: int, error: RpcmpError) -> Raised:
        """Record a failure; return it as an answer."""
        raised = Raised(to_wire(error))
        with self._lock:
            self._failures.append((round_number, raised))
        return raised

    def first(self, round_number: int) -> RpcmpError | None:
        """Return the round's first failure, or else the one that broke the stage before."""
        with self._lock:
            errors = [raised.error for number, raised in self._failures if number == round_number]
        return from_wire(errors[0]) if errors else self.broken

    def take(self, first: int, last: int) -> list[Raised]:
        """Return the failures of the rounds from `first` to `last`, and forget all."""
        with self._lock:
            failures, self._failures = self._failures, []
        return [raised for number, raised in failures if first <= number <= last]


@dataclass
class SavedForward:
    """What a stage saves of one micro-batch for its backward.

    Attributes:
        weights: its deferred weight gradients.
        dtypes: of the tensors that the stage produced.
        read: for each port, the positions of the tensors that it reads.
        has_token: for each port, whether its answer had a token.
        shared: these tensors of each port whose reader gets them in shared memory.
    """

    meta: MicrobatchMeta
    tape: LocalTape | Replay
    weights: WeightGradients
    dtypes: list[torch.dtype] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)
    has_token: list[bool] = field(default_factory=list)
    shared: dict[int, list[SharedTensor]] = field(default_factory=dict)

    def num_sent(self, port: int) -> int:
        """Return how many tensors torch RPC carries to the reader of a port."""
        return (0 if port in self.shared else len(self.read[port])) + self.has_token[port]


class BackwardResult(NamedTuple):
    """The result of a bundle's backward.

    Attributes:
        gradients: of all inputs, micro-batch by micro-batch.
        none: inputs without gradients: the micro-batch, the input, its tensors.
    """

    gradients: list[Tensor | None]
    none: list[tuple[MicrobatchMeta, int, list[int]]]


@dataclass
class SavedBundle:
    """What a stage saves of a bundle for its backward."""

    bundle: Bundle
    forwards: list[SavedForward]
    result: Waiting[BackwardResult] | None = None


class Backwards:
    """The backwards of one stage.

    Distributed autograd delivers zeros for gradients that do not exist. None and zeros differ:
    weight decay and momentum act on zeros. A reader rarely ignores some of what it reads, so it
    reports that in a call of its own.

    Args:
        stage: the worker's label, for errors.
        mark_at_producer: marks tensors of an input for which this stage has no gradient: of a
            micro-batch, a bundle, the index of the input, its tensors. Blocks.
        failures: collects failures in a backward, which distributed autograd cannot return, and in
            weight gradients, for which no caller waits any more.
        copies: between the stage's device and the host.
    """

    def __init__(
        self,
        stage: str,
        compute: ComputeThread,
        mark_at_producer: Callable[[MicrobatchMeta, int, int, list[int]], None],
        failures: Failures,
        copies: Copies,
    ) -> None:
        self.copies = copies
        self._stage = stage
        self._compute = compute
        self._mark_at_producer = mark_at_producer
        self._failures = failures
        self._none_gradients: dict[tuple[int, int], dict[int, Sequence[int]]] = {}
        self._lock = threading.Lock()

    @property
    def splits(self) -> bool:
        return self._compute.limits.splits

    def mark_none_gradients(
        self, round_number: int, microbatch: int, port: int, tensors: Sequence[int]
    ) -> None:
        """Record that a port's reader has no gradients for some tensors of its answer."""
        with self._lock:
            self._none_gradients.setdefault((round_number, microbatch), {})[port] = tensors

    def forget_marks(self) -> None:
        with self._lock:
            self._none_gradients.clear()

    def run(self, saved: SavedBundle, gradients: Gradients) -> list[Tensor | None]:
        """Return the gradients of the inputs; blocks until the schedule has let it run."""
        waiting = saved.result or self.start(saved, gradients)  # stage.py [9]
        result = waiting.result()
        for meta, index, tensors in result.none:
            self._mark_at_producer(meta, saved.bundle.number, index, tensors)
        return result.gradients

    def start(self, saved: SavedBundle, gradients: Gradients) -> Waiting[BackwardResult]:
        """Queue the backward of a bundle, given the gradients of its outputs."""
        waiting: Waiting[BackwardResult] = Waiting()
        saved.result = waiting
        result = BackwardResult([], [])
        pairs = zip(saved.forwards, _by_microbatch(saved, gradients), strict=True)
        arriving = iter([self._arriving(*pair) for pair in pairs])

        def differentiate(forward: SavedForward) -> None:
            if not waiting.done():  # no earlier micro-batch of the bundle has failed
                self._differentiate(forward, next(arriving), result, waiting)
            if forward is saved.forwards[-1]:
                if not waiting.done():
                    fail = functools.partial(self._fail, forward.meta, waiting)
                    self.copies.when_made(lambda: waiting.set_result(result), fail)
                if self.splits:
                    self._submit(Action.WEIGHT, saved, self._accumulate)

        def cancel() -> None:
            for forward in saved.forwards:
                forward.tape.free()
            waiting.set_exception(RuntimeError(f"stage {self._stage!r}: the step was aborted"))

        self._submit(Action.BACKWARD, saved, differentiate, cancel)
        return waiting

    def _submit(
        self,
        action: Action,
        saved: SavedBundle,
        run: Callable[[SavedForward], None],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        parts = [functools.partial(run, forward) for forward in saved.forwards]
        task = Task(parts, saved.forwards[0].meta.number, cancel)
        self._compute.submit(saved.bundle.round.number, action, saved.bundle.number, task)

    def _differentiate(
        self,
        forward: SavedForward,
        arriving: ArrivingGradients,
        result: BackwardResult,
        waiting: Waiting[BackwardResult],
    ) -> None:
        meta = forward.meta
        try:
            summed = arriving()
            with forward.weights.defer() if self.splits else contextlib.nullcontext():
                of_inputs, none = forward.tape.backward(summed)  # stage.py [10]
        except BaseException as error:
            self._fail(meta, waiting, error)
        else:
            result.gradients.extend(of_inputs)
            result.none.extend((meta, index, tensors) for index, tensors in none.items())

    def _fail(
        self, meta: MicrobatchMeta, waiting: Waiting[BackwardResult], error: BaseException
    ) -> None:
        self._failures.add(meta.round.number, stage_error(self._stage, "backward", meta, error))
        waiting.set_exception(RuntimeError(f"backward failed at stage {self._stage!r}"))

    def _accumulate(self, forward: SavedForward) -> None:
        meta = forward.meta
        try:
            forward.weights.accumulate()  # stage.py [11]
        except BaseException as error:
            broken = stage_error(self._stage, "backward", meta, error)
            self._failures.add(meta.round.number, broken)
            self._failures.broken = broken

    def _arriving(self, forward: SavedForward, gradients: Gradients) -> ArrivingGradients:
        """Start to copy the readers' gradients to the device, and what else the backward needs."""
        remaining = iter(gradients)
        with self._lock:
            key = forward.meta.round.number, forward.meta.number
            marks = self._none_gradients.pop(key, {})
        found: list[tuple[int, Tensor]] = []
        for port, positions in enumerate(forward.read):
            none = marks.get(port, ())
            arrived = (
                [tensor.take_gradient() for tensor in forward.shared.pop(port)]
                if port in forward.shared
                else [next(remaining) for _ in positions]
            )
            for index, (position, gradient) in enumerate(zip(positions, arrived, strict=True)):
                if gradient is not None and index not in none:
                    found.append((position, gradient))
            if forward.has_token[port]:
                next(remaining)
        forward.tape.prepare()
        arriving = self.copies.to_device([gradient for _, gradient in found])
        return lambda: _sum_by_position(forward.dtypes, [each for each, _ in found], arriving())


def _sum_by_position(
    dtypes: Sequence[torch.dtype], positions: Sequence[int], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """Sum the readers' gradients of each tensor that the stage produced, in one order."""
    contributions: list[list[Tensor | None]] = [[] for _ in dtypes]
    for position, gradient in zip(positions, gradients, strict=True):
        contributions[position].append(gradient.to(dtypes[position]))
    return [boundary.sum_gradients(each) for each in contributions]


def _by_microbatch(saved: SavedBundle, gradients: Gradients) -> Iterator[Gradients]:
    remaining = iter(gradients)
    regrouped: list[list[Tensor | None]] = [[] for _ in saved.forwards]
    for port in range(len(saved.forwards[0].read)):
        for forward, own in zip(saved.forwards, regrouped, strict=True):
            own += itertools.islice(remaining, forward.num_sent(port))
    return iter(regrouped)
