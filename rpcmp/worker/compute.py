"""The one thread on which a stage computes.

RPC threads hand in forwards and backwards when everything that these need has arrived; the thread
asks the schedule which one to run. One thread, because it makes the order of sums fixed, because
glibc keeps a malloc arena and OpenMP a team for every thread that computes, and because then no
user code ever runs concurrently with itself.

When a round's last weight gradient is done its `finish` runs, which steps the optimizer, and the
next round's first forward follows at once: no stage waits for the driver between two steps.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from rpcmp.process.activity import Activity
from rpcmp.schedule import Action, Policy
from rpcmp.transport import attempt
from rpcmp.worker.recorder import Recorder
from rpcmp.worker.rounds import Round, Rounds, Task


class ComputeThread:
    """Runs a stage's actions one at a time, in the order that `policy` chooses.

    Args:
        policy: the schedule.
        activity: told what the thread does.

    Attributes:
        policy: as given; may change between two rounds.
        activity: as given.
        recorder: told of every action of a step.
        in_flight: micro-batches whose activations are kept for their backward; anybody may read it.
    """

    def __init__(self, policy: Policy, activity: Activity | None = None) -> None:
        self.policy = policy
        self.activity = activity or Activity()
        self._changed = threading.Condition()
        self._rounds = Rounds()
        self._calls: deque[Callable[[], None]] = deque()
        self.recorder = Recorder()
        self.in_flight = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="rpcmp-compute", daemon=True)
        self._thread.start()

    def begin(self, number: int, make: Callable[[], Round]) -> None:
        """Note that there is a round `number`; `make` makes it, the first time."""
        with self._changed:
            self._rounds.begin(number, make)
            self._changed.notify()

    def submit(self, round_number: int, action: Action, bundle: int, task: Task) -> None:
        """Queue an action that is ready; cancels it if its round was aborted."""
        with self._changed:
            found = self._rounds.get(round_number)
            if found is not None:
                found.ready[action, bundle] = task
                self._changed.notify()
        if found is None:
            task.cancel()

    def future(self, function: Callable[[], Any]) -> Future[Any]:
        """Run something that is no part of a round, such as reading the parameters.

        All that the round before has left to do without other stages is done first.

        Returns:
            A future with what it returns, or a Raised.
        """
        future: Future[Any] = Future()
        with self._changed:
            self._calls.append(lambda: future.set_result(attempt(function)))
            self._changed.notify()
        return future

    def release(self) -> None:
        """Let the next round begin, where the current one is held."""
        with self._changed:
            if self._rounds.current is not None:
                self._rounds.current.is_held = False
                self._changed.notify()

    def abort(self, first: int, last: int) -> None:
        """Cancel all that waits in the rounds from `first` to `last`, and all that still comes."""
        with self._changed:
            waiting = self._rounds.abort(first, last)
            self._changed.notify()
        for task in waiting:
            task.cancel()

    def close(self) -> None:
        """Let the thread end, after what it does now; for who does not end with it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _loop(self) -> None:
        while (run := self._wait()) is not None:
            try:
                run()
            except BaseException:  # tasks do not raise: a bug of ours, and nobody would be told
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            del run  # an idle thread must not keep a micro-batch alive

    def _wait(self) -> Callable[[], None] | None:
        """What is to be done next; None: nothing any more."""
        with self._changed:
            while not self._is_closed:
                if (run := self._next()) is not None:
                    return run
                self._changed.wait()
        return None

    def _next(self) -> Callable[[], None] | None:
        current = self._rounds.current
        if current is not None and current.is_complete and not current.is_held:
            self._rounds.complete()
            return current.finish
        if self._calls and (current is None or not current.needs_nobody or current.is_complete):
            return self._calls.popleft()
        if current is None:
            return None
        action = self.policy.choose(current.progress(), current.limits)
        return None if action is None else self._take(current, action)

    def _take(self, current: Round, action: Action) -> Callable[[], None]:
        is_first = not any(current.done.values())
        task = current.take(action)
        if action is Action.BACKWARD and not current.limits.splits:
            current.done[Action.WEIGHT] += 1
        frees = Action.WEIGHT if current.limits.splits else Action.BACKWARD

        def run() -> None:
            if is_first:
                self.in_flight = 0
                current.start()
            if current.training and action is Action.FORWARD:
                self.in_flight += len(task.parts)
            for microbatch, part in enumerate(task.parts, task.first):
                self.activity.begin(action.name.lower(), current.step, microbatch)
                started = time.perf_counter_ns()
                part()
                if current.training:  # an evaluation is no part of a step
                    self.recorder.add(action, current.step, microbatch, task.ready_ns, started)
            if action is frees:
                self.in_flight -= len(task.parts)
            self.activity.end()

        return run
