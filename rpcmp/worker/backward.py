"""A stage's backwards, whole or split: from its readers' gradients to those of what it received.

    engine thread     gradients ──> run ── submit B ──┐      waits  ┌──> gradients, upstream
    compute thread                                    └─ B ─────────┘        W
                                             the schedule's turn       and again its turn

A thread of the distributed autograd engine waits in `run` until the schedule has let the compute
thread do the work. Where the schedule splits, weight gradients follow as an action of their own.

The stage that computes the loss knows its gradient, which is one. So its backward follows the
forward at once, instead of when somebody has had the loss and asked for it, and `run` finds the
result there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as Waiting
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from rpcmp.errors import StageError
from rpcmp.schedule import Action
from rpcmp.split import WeightGradients
from rpcmp.work import Work
from rpcmp.worker import boundary
from rpcmp.worker.boundary import Differentiated, Gradients
from rpcmp.worker.compute import ComputeThread
from rpcmp.worker.failure import failure
from rpcmp.worker.rounds import Task


class Tape(Protocol):
    """The activations of one micro-batch, or what they can be computed from."""

    def backward(self, gradients: Gradients) -> Differentiated:
        """See LocalTape."""

    def free(self) -> None:
        """Let go of it all."""


@dataclass
class Memory:
    """What a stage keeps of a micro-batch until its backward.

    Attributes:
        tape: its activations.
        weights: where weight gradients wait.
        dtypes: of the tensors that the stage produced.
        read: for each port, which of these it reads.
        has_token: for each port, whether its answer had a token.
        done: the backward's result, once that has been submitted.
    """

    work: Work
    tape: Tape
    weights: WeightGradients
    dtypes: list[torch.dtype] = field(default_factory=list)
    read: list[list[int]] = field(default_factory=list)
    has_token: list[bool] = field(default_factory=list)
    done: Waiting[Differentiated] | None = None


class Missing:
    """Which gradients do not exist, though distributed autograd brings zeros for them.

    None and zeros differ: weight decay and momentum act on the latter. It seldom happens that a
    reader does not use what it reads, so it says so by a call of its own.

    Attributes:
        take: what the readers of this stage have said of a micro-batch: by port, which tensors.
        tell: tells the producer of input `index`; blocks until it knows.
    """

    def __init__(
        self,
        take: Callable[[Work], Mapping[int, Sequence[int]]],
        tell: Callable[[Work, int, list[int]], None],
    ) -> None:
        self.take = take
        self.tell = tell


class Backwards:
    """The backwards of one stage.

    Args:
        stage: its name, for errors.
        compute: its compute thread.
        splits: whether weight gradients are actions of their own.
        missing: what is known of gradients that do not exist.
        on_failure: told of failures in a backward, which cannot be returned to anybody.
        on_broken: told of failures in weight gradients, for which nobody waits any more.

    Attributes:
        splits: as given; may change between two rounds.
    """

    def __init__(
        self,
        stage: str,
        compute: ComputeThread,
        splits: bool,
        missing: Missing,
        on_failure: Callable[[Work, StageError], object],
        on_broken: Callable[[Work, StageError], None],
    ) -> None:
        self._stage = stage
        self._compute = compute
        self.splits = splits
        self._missing = missing
        self._on_failure = on_failure
        self._on_broken = on_broken

    def run(self, memory: Memory, gradients: Gradients) -> list[Tensor | None]:
        """The gradients of what was received; blocks until the schedule has let it run."""
        done = memory.done or self.start(memory, gradients)
        found, missing = done.result()
        for index, which in missing.items():
            self._missing.tell(memory.work, index, which)
        return found

    def start(self, memory: Memory, gradients: Gradients) -> Waiting[Differentiated]:
        """Queue the backward of a micro-batch, whose outputs have these gradients."""
        done: Waiting[Differentiated] = Waiting()
        memory.done = done
        work = memory.work

        def cancel() -> None:
            memory.tape.free()
            done.set_exception(RuntimeError(f"stage {self._stage!r}: the step was aborted"))

        task = Task(lambda: self._differentiate(memory, gradients, done), cancel)
        self._compute.submit(work.round, Action.BACKWARD, work.microbatch, task)
        return done

    def _differentiate(
        self, memory: Memory, gradients: Gradients, done: Waiting[Differentiated]
    ) -> None:
        work = memory.work
        try:
            summed = self._sum_by_position(memory, gradients)
            with memory.weights.defer() if self.splits else contextlib.nullcontext():
                done.set_result(memory.tape.backward(summed))
        except BaseException as error:
            self._on_failure(work, failure(self._stage, "backward", work, error))
            done.set_exception(RuntimeError(f"backward failed at stage {self._stage!r}"))
        if self.splits:
            task = Task(lambda: self._accumulate(memory))
            self._compute.submit(work.round, Action.WEIGHT, work.microbatch, task)

    def _accumulate(self, memory: Memory) -> None:
        try:
            memory.weights.accumulate()
        except BaseException as error:
            work = memory.work
            self._on_broken(work, failure(self._stage, "backward", work, error))

    def _sum_by_position(self, memory: Memory, gradients: Gradients) -> list[Tensor | None]:
        """The readers' gradients of each tensor that the stage produced, summed in one order."""
        contributions: list[list[Tensor | None]] = [[] for _ in memory.dtypes]
        missing = self._missing.take(memory.work)
        left = iter(gradients)
        for port, positions in enumerate(memory.read):
            without = missing.get(port, ())
            for place, position in enumerate(positions):
                grad = next(left)
                is_there = grad is not None and place not in without
                wide = grad.to(memory.dtypes[position]) if grad is not None and is_there else None
                contributions[position].append(wide)
            if memory.has_token[port]:
                next(left)
        return [boundary.sum_gradients(found) for found in contributions]
