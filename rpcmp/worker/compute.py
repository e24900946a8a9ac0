"""The one thread on which a stage computes.

RPC threads hand in forwards and backwards when everything that these need has arrived; the thread
asks the schedule which one to run. One thread, because it makes the order of sums fixed, because
glibc keeps a malloc arena and OpenMP a team for every thread that computes, and because then no
user code ever runs concurrently with itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

from rpcmp.schedule import Action, Policy, Progress
from rpcmp.transport import attempt


@dataclass
class Task:
    """Something to compute.

    Attributes:
        run: does it; must not raise.
        cancel: called instead of `run` when the round was aborted.
    """

    run: Callable[[], None]
    cancel: Callable[[], None] = lambda: None


@dataclass
class _Round:
    """One train step, evaluation or prediction, as far as it has come."""

    number: int = -1
    num_microbatches: int = 0
    limit: int = 0
    aborted: bool = False
    done: dict[Action, int] = field(default_factory=lambda: dict.fromkeys(Action, 0))
    ready: dict[tuple[Action, int], Task] = field(default_factory=dict)

    def is_ready(self, action: Action) -> bool:
        return (action, self.done[action]) in self.ready

    def progress(self) -> Progress:
        return Progress(
            self.num_microbatches,
            self.done[Action.FORWARD],
            self.done[Action.BACKWARD],
            self.is_ready(Action.FORWARD),
            self.is_ready(Action.BACKWARD),
        )


class ComputeThread:
    """Runs a stage's actions one at a time, in the order that `policy` chooses.

    Args:
        policy: the schedule.
        limit: micro-batches that may be open between forward and backward while training.
    """

    def __init__(self, policy: Policy, limit: int) -> None:
        self._policy = policy
        self._limit = limit
        self._changed = threading.Condition()
        self._round = _Round()
        self._calls: deque[Task] = deque()
        self._busy_seconds = 0.0
        self._thread = threading.Thread(target=self._loop, name="rpcmp-compute", daemon=True)
        self._thread.start()

    def begin(self, number: int, num_microbatches: int, training: bool) -> None:
        """Note that round `number` is the current one; rounds never overlap."""
        with self._changed:
            if number > self._round.number:
                limit = self._limit if training else num_microbatches
                self._busy_seconds = 0.0
                self._round = _Round(number, num_microbatches, limit)

    def submit(self, round_number: int, action: Action, microbatch: int, task: Task) -> None:
        """Queue an action that is ready; cancels it if its round was aborted."""
        with self._changed:
            current = self._round
            aborted = current.aborted or round_number != current.number
            if not aborted:
                current.ready[action, microbatch] = task
                self._changed.notify()
        if aborted:
            task.cancel()

    def future(self, function: Callable[[], Any]) -> Future[Any]:
        """Run something that is no part of a round, such as the optimizer step.

        Returns:
            A future with what it returns, or a Raised.
        """
        future: Future[Any] = Future()
        task = Task(run=lambda: future.set_result(attempt(function)))
        with self._changed:
            self._calls.append(task)
            self._changed.notify()
        return future

    def abort(self, round_number: int) -> None:
        """Cancel all that waits in rounds up to `round_number`, and all that still comes."""
        with self._changed:
            if self._round.number > round_number:
                return
            self._round.number = round_number
            self._round.aborted = True
            waiting = list(self._round.ready.values())
            self._round.ready.clear()
        for task in waiting:
            task.cancel()

    def take_busy_seconds(self) -> float:
        """Seconds spent in tasks since the round began, or since this was last asked."""
        with self._changed:
            busy, self._busy_seconds = self._busy_seconds, 0.0
        return busy

    def _loop(self) -> None:
        while True:
            with self._changed:
                while (task := self._next()) is None:
                    self._changed.wait()
            started = time.perf_counter()
            try:
                task.run()
            except BaseException:  # tasks do not raise: a bug of ours, and nobody would be told
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            del task  # an idle thread must not keep a micro-batch alive
            with self._changed:
                self._busy_seconds += time.perf_counter() - started

    def _next(self) -> Task | None:
        if self._calls:
            return self._calls.popleft()
        current = self._round
        action = self._policy.choose(current.progress(), current.limit)
        if action is None:
            return None
        microbatch = current.done[action]
        current.done[action] += 1
        return current.ready.pop((action, microbatch))
