"""A stage's backwards, whole or split: from its readers' gradients to those of what it received.

    engine thread     gradients ──> run ── submit B ──┐      waits  ┌──> gradients, upstream
    compute thread                                    └─ B ─────────┘        W
                                             the schedule's turn       and again its turn

A thread of the distributed autograd engine waits in `run` until the schedule has let the compute
thread do the work. Where the schedule splits, weight gradients follow as an action of their own.

The stage that computes the loss knows its gradient, which is one. So its backward follows the
forward at once, instead of when somebody has had the loss and asked for it, and `run` finds the
result there.

What the user's code raised at a stage: as an error for everybody to see, and remembered.

Which gradients do not exist, though distributed autograd brings zeros for them.

None and zeros differ: weight decay and momentum act on the latter. It seldom happens that a reader
does not use what it reads, so it says so by a call of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future as Waiting
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rpcmp.errors import RpcmpError, StageError, from_wire, one_line, to_wire
from rpcmp.pipelining.schedule import Action
from rpcmp.rpc.messages import Bundle, MicrobatchMeta
from rpcmp.rpc.transport import Raised
from rpcmp.worker import boundary
from rpcmp.worker.boundary import Differentiated, Gradients
from rpcmp.worker.executor import ComputeThread, Task
from rpcmp.worker.weight_grad import WeightGradients


def failure(
    stage: str, phase: str, work: MicrobatchMeta, error: BaseException, received: str = ""
) -> StageError:
    """The error of `stage` in its `phase` of a micro-batch, with what it had `received`."""
    return StageError(
        stage=stage,
        phase=phase,
        cause=one_line(error),
        traceback="".join(traceback.format_exception(error)),
        step=work.step,
        microbatch=work.microbatch,
        received=received,
    )


class Failures:
    """What has failed at a stage and the driver has not collected yet. Thread-safe.

    Attributes:
        broken: the failure after which this stage cannot go on, since nobody waited for what failed
            and other stages may have stepped; None while it can.
    """

    def __init__(self) -> None:
        self.broken: RpcmpError | None = None
        self._lock = threading.Lock()
        self._found: list[tuple[int, Raised]] = []

    def note(self, work: MicrobatchMeta, error: RpcmpError) -> Raised:
        """Remember a failure; returns it as an answer for whoever asked."""
        raised = Raised(to_wire(error))
        with self._lock:
            self._found.append((work.round, raised))
        return raised

    def note_broken(self, work: MicrobatchMeta, error: StageError) -> None:
        """Remember a failure in what nobody waits for any more."""
        self.note(work, error)
        self.broken = error

    def first(self, round_number: int) -> RpcmpError | None:
        """What failed first in a round, or before it so that nothing can go on."""
        with self._lock:
            found = [raised.error for number, raised in self._found if number == round_number]
        return from_wire(found[0]) if found else self.broken

    def take(self, first: int, last: int) -> list[Raised]:
        """What failed in the rounds from `first` to `last`; all others are forgotten, too."""
        with self._lock:
            found, self._found = self._found, []
        return [raised for number, raised in found if first <= number <= last]


class NoneGradients:
    """What the readers of a stage have said of its micro-batches. Thread-safe.

    Args:
        tell: tells the producer of an input of a bundle's micro-batch; blocks until it knows.

    Attributes:
        tell: as given.
    """

    def __init__(self, tell: Callable[[Bundle, MicrobatchMeta, int, list[int]], None]) -> None:
        self.tell = tell
        self._lock = threading.Lock()
        self._noted: dict[tuple[int, int], dict[int, Sequence[int]]] = {}

    def note(self, work: MicrobatchMeta, port: int, which: Sequence[int]) -> None:
        """Hear from the reader at a port that it has no gradients for some of its tensors."""
        with self._lock:
            self._noted.setdefault((work.round, work.microbatch), {})[port] = which

    def take(self, work: MicrobatchMeta) -> Mapping[int, Sequence[int]]:
        """What has been said of a micro-batch, by port; nothing is known of it afterwards."""
        with self._lock:
            return self._noted.pop((work.round, work.microbatch), {})

    def clear(self) -> None:
        """Forget micro-batches that were given up."""
        with self._lock:
            self._noted.clear()


class Tape(Protocol):
    """The activations of one micro-batch, or what they can be computed from."""

    def backward(self, gradients: Gradients) -> Differentiated:
        """See LocalTape."""

    def free(self) -> None:
        """Let go of it all."""


@dataclass
class SavedForward:
    """What a stage keeps of one micro-batch until its backward.

    Attributes:
        tape: its activations.
        weights: where weight gradients wait.
        dtypes: of the tensors that the stage produced.
        read: for each port, which of these it reads.
        has_token: for each port, whether its answer had a token.
    """

    work: MicrobatchMeta
    tape: Tape
    weights: WeightGradients
    dtypes: list[torch.dtype] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)
    has_token: list[bool] = field(default_factory=list)


class BackwardResult(NamedTuple):
    """What the backward of a bundle gives.

    Attributes:
        gradients: of all that was received, micro-batch by micro-batch.
        missing: which of them do not exist: the micro-batch, the input, its tensors.
    """

    gradients: list[Tensor | None]
    missing: list[tuple[MicrobatchMeta, int, list[int]]]


@dataclass
class SavedBundle:
    """What a stage keeps of a bundle until its backward.

    Attributes:
        kept: of its micro-batches, in order.
        done: the backward's result, once that has been submitted.
    """

    bundle: Bundle
    kept: list[SavedForward]
    done: Waiting[BackwardResult] | None = None


class Backwards:
    """The backwards of one stage.

    Args:
        stage: its name, for errors.
        compute: its compute thread.
        splits: whether weight gradients are actions of their own.
        missing: what is known of gradients that do not exist.
        failures: told of failures in a backward, which cannot be returned to anybody, and of those
            in weight gradients, for which nobody waits any more.

    Attributes:
        splits: as given; may change between two rounds.
    """

    def __init__(
        self,
        stage: str,
        compute: ComputeThread,
        splits: bool,
        missing: NoneGradients,
        failures: Failures,
    ) -> None:
        self._stage = stage
        self._compute = compute
        self.splits = splits
        self._missing = missing
        self._failures = failures

    def run(self, memory: SavedBundle, gradients: Gradients) -> list[Tensor | None]:
        """The gradients of what was received; blocks until the schedule has let it run."""
        done = memory.done or self.start(memory, gradients)
        result = done.result()
        for work, index, which in result.missing:
            self._missing.tell(memory.bundle, work, index, which)
        return result.gradients

    def start(self, memory: SavedBundle, gradients: Gradients) -> Waiting[BackwardResult]:
        """Queue the backward of a bundle, whose outputs have these gradients."""
        done: Waiting[BackwardResult] = Waiting()
        memory.done = done
        result = BackwardResult([], [])
        given = _by_microbatch(memory, gradients)

        def differentiate(kept: SavedForward) -> None:
            if not done.done():  # no earlier micro-batch of the bundle has failed
                self._differentiate(kept, next(given), result, done)
            if kept is memory.kept[-1]:
                self._end(memory, result, done)

        def cancel() -> None:
            for kept in memory.kept:
                kept.tape.free()
            done.set_exception(RuntimeError(f"stage {self._stage!r}: the step was aborted"))

        self._submit(Action.BACKWARD, memory, differentiate, cancel)
        return done

    def _submit(
        self,
        action: Action,
        memory: SavedBundle,
        run: Callable[[SavedForward], None],
        cancel: Callable[[], None] = lambda: None,
    ) -> None:
        parts = [functools.partial(run, kept) for kept in memory.kept]
        task = Task(parts, memory.kept[0].work.microbatch, cancel)
        self._compute.submit(memory.bundle.round, action, memory.bundle.number, task)

    def _differentiate(
        self,
        kept: SavedForward,
        given: Gradients,
        result: BackwardResult,
        done: Waiting[BackwardResult],
    ) -> None:
        try:
            summed = self._sum_by_position(kept, given)
            with kept.weights.defer() if self.splits else contextlib.nullcontext():
                gradients, missing = kept.tape.backward(summed)
        except BaseException as error:
            self._failures.note(kept.work, failure(self._stage, "backward", kept.work, error))
            done.set_exception(RuntimeError(f"backward failed at stage {self._stage!r}"))
        else:
            result.gradients.extend(gradients)
            result.missing.extend((kept.work, index, which) for index, which in missing.items())

    def _end(
        self, memory: SavedBundle, result: BackwardResult, done: Waiting[BackwardResult]
    ) -> None:
        if not done.done():
            done.set_result(result)
        if self.splits:
            self._submit(Action.WEIGHT, memory, self._accumulate)

    def _accumulate(self, kept: SavedForward) -> None:
        try:
            kept.weights.accumulate()
        except BaseException as error:
            broken = failure(self._stage, "backward", kept.work, error)
            self._failures.note_broken(kept.work, broken)

    def _sum_by_position(self, kept: SavedForward, given: Gradients) -> list[Tensor | None]:
        """The readers' gradients of each tensor that the stage produced, summed in one order."""
        contributions: list[list[Tensor | None]] = [[] for _ in kept.dtypes]
        left = iter(given)
        missing = self._missing.take(kept.work)
        for port, positions in enumerate(kept.read):
            without = missing.get(port, ())
            for place, position in enumerate(positions):
                grad = next(left)
                is_there = grad is not None and place not in without
                wide = grad.to(kept.dtypes[position]) if grad is not None and is_there else None
                contributions[position].append(wide)
            if kept.has_token[port]:
                next(left)
        return [boundary.sum_gradients(found) for found in contributions]


def _by_microbatch(memory: SavedBundle, gradients: Gradients) -> Iterator[Gradients]:
    """A bundle's gradients, which come port by port, for one micro-batch after the other."""
    left = iter(gradients)
    found: list[list[Tensor | None]] = [[] for _ in memory.kept]
    for port in range(len(memory.kept[0].read)):
        for kept, mine in zip(memory.kept, found, strict=True):
            mine += itertools.islice(left, len(kept.read[port]) + kept.has_token[port])
    return iter(found)
