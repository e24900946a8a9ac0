"""The one thread on which a stage computes.

RPC threads hand in forwards and backwards when everything that these need has arrived; the thread
asks the schedule which one to run. One thread, because it makes the order of sums fixed, because
glibc keeps a malloc arena and OpenMP a team for every thread that computes, and because then no
user code ever runs concurrently with itself.

When a round's last weight gradient is done its `finish` runs, which steps the optimizer, and the
next round's first forward follows at once: no stage waits for the driver between two steps.

What a compute thread did, and when: sums always, every action while somebody wants to know.

How far a stage has come in the rounds that it knows of. Not thread-safe by itself.

A round is one train step, evaluation or prediction. Rounds are numbered without gaps and every
stage takes part in all of them, so a stage works on them strictly in order; but what it will need
for the next one may arrive while the one before is still being computed.

What is counted here are bundles; see rpcmp.rpc.messages.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.futures import Future

from rpcmp.observability.trace.spans import Kind, Span
from rpcmp.pipelining.schedule import Action, InFlightLimits, Policy, RoundProgress
from rpcmp.process.activity import Activity
from rpcmp.rpc.transport import attempt

STEPS_KEPT = 24
"""Steps before the newest whose actions are kept while somebody follows the run."""

AT_ONCE = 10_000
"""Actions in one answer: `rpcmp.net.rpc_pickle` takes no message of any length."""


class Recorder:
    """Written by the compute thread alone; `take_busy` and `take_spans` run there as well.

    Attributes:
        traces: whether every action is kept.
        follows: whether those of the last steps are kept.
        total: nanoseconds by kind of action, since the process began; anybody may read it.
    """

    def __init__(self) -> None:
        self.traces = False
        self.total: dict[str, int] = dict.fromkeys(Kind, 0)
        self._busy: dict[str, int] = dict.fromkeys(Kind, 0)
        self._spans: list[Span] = []
        self.follows = False
        self._recent: deque[Span] = deque()

    def add(self, kind: str, step: int, microbatch: int, ready: int, start: int) -> None:
        """Note an action that has just ended; times are those of `time.perf_counter_ns`."""
        end = time.perf_counter_ns()
        self._busy[kind] += end - start
        self.total[kind] += end - start
        if self.traces or self.follows:
            self._keep(Span(Kind(kind), step, microbatch, min(ready, start), start, end))

    def _keep(self, span: Span) -> None:
        if self.traces:
            self._spans.append(span)
        if self.follows:
            self._recent.append(span)
            while self._recent[0].step < span.step - STEPS_KEPT:
                self._recent.popleft()

    def take_busy(self) -> dict[str, float]:
        """Seconds by kind of action since this was last asked."""
        busy, self._busy = self._busy, dict.fromkeys(Kind, 0)
        return {str(kind): nanoseconds / 1e9 for kind, nanoseconds in busy.items()}

    def take_spans(self) -> list[Span]:
        """The next actions after those of the last answer, in order; none unless `traces` is set.

        As many as AT_ONCE, if there are more; then there may be more to ask for.
        """
        spans, self._spans = self._spans[:AT_ONCE], self._spans[AT_ONCE:]
        return spans

    def recent(self, step: int, count: int) -> list[Span]:
        """The actions of the last `count` steps up to `step`, in order, as far as they are kept;
        none unless `follows` is set."""
        return [span for span in self._recent if step - count < span.step <= step]


@dataclass
class Task:
    """An action on a bundle of micro-batches.

    Attributes:
        parts: do it, one micro-batch each, in order; must not raise.
        first: the first micro-batch's index in the round.
        cancel: called instead when the round was aborted.
        ready_ns: when all that it needs had arrived; `time.perf_counter_ns`.
    """

    parts: Sequence[Callable[[], None]]
    first: int
    cancel: Callable[[], None] = lambda: None
    ready_ns: int = field(default_factory=time.perf_counter_ns)


@dataclass
class RoundState:
    """One round, as far as it has come.

    Attributes:
        step: the optimizer step that it is or follows.
        bundles: the numbers of those that this worker computes, in order.
        limits: what the stage may keep meanwhile.
        training: whether forwards are followed by backwards.
        start: runs before its first action, where it has any; must not raise.
        finish: runs after its last action, before the next round begins; must not raise.
        is_held: whether the next round may not begin before `release`.
    """

    step: int
    bundles: Sequence[int]
    limits: InFlightLimits
    training: bool
    start: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None
    is_held: bool = False
    done: dict[Action, int] = field(default_factory=lambda: dict.fromkeys(Action, 0))
    ready: dict[tuple[Action, int], Task] = field(default_factory=dict)

    def is_ready(self, action: Action) -> bool:
        """Whether the next action of that kind has all that it needs."""
        done = self.done[action]
        return done < len(self.bundles) and (action, self.bundles[done]) in self.ready

    def take(self, action: Action) -> Task:
        """The next action of that kind, which now counts as done."""
        bundle = self.bundles[self.done[action]]
        self.done[action] += 1
        return self.ready.pop((action, bundle))

    @property
    def needs_nobody(self) -> bool:
        """Whether all that is left can be done without the other stages."""
        last = Action.BACKWARD if self.training else Action.FORWARD
        return self.done[last] == len(self.bundles)

    @property
    def is_complete(self) -> bool:
        """Whether only `finish` is left."""
        last = Action.WEIGHT if self.training else Action.FORWARD
        return self.done[last] == len(self.bundles)

    def progress(self) -> RoundProgress:
        """What the schedule chooses by."""
        return RoundProgress(
            len(self.bundles),
            self.done[Action.FORWARD],
            self.done[Action.BACKWARD],
            self.done[Action.WEIGHT],
            self.is_ready(Action.FORWARD),
            self.is_ready(Action.BACKWARD),
        )


class RoundQueue:
    """The rounds that have begun and are not complete."""

    def __init__(self) -> None:
        self._current = 1
        self._rounds: dict[int, RoundState] = {}
        self._aborted: set[int] = set()

    @property
    def current(self) -> RoundState | None:
        """The round to work on; None until somebody has begun it."""
        return self._rounds.get(self._current)

    def begin(self, number: int, make: Callable[[], RoundState]) -> None:
        """Note that round `number` exists; `make` makes it the first time."""
        known = number < self._current or number in self._rounds or number in self._aborted
        if not known:
            self._rounds[number] = make()

    def get(self, number: int) -> RoundState | None:
        """Round `number`; None when it is over or was aborted."""
        return self._rounds.get(number)

    def complete(self) -> None:
        """Go on to the next round."""
        self._rounds.pop(self._current, None)
        self._current += 1
        self._skip_aborted()

    def abort(self, first: int, last: int) -> list[Task]:
        """Give up the rounds from `first` to `last`; returns what waited in them."""
        numbers = range(max(first, self._current), last + 1)
        self._aborted.update(numbers)
        found = [self._rounds.pop(number) for number in numbers if number in self._rounds]
        self._skip_aborted()
        return [task for given_up in found for task in given_up.ready.values()]

    def _skip_aborted(self) -> None:
        while self._current in self._aborted:
            self._aborted.discard(self._current)
            self._current += 1


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
        self._rounds = RoundQueue()
        self._calls: deque[Callable[[], None]] = deque()
        self.recorder = Recorder()
        self.in_flight = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="rpcmp-compute", daemon=True)
        self._thread.start()

    def begin(self, number: int, make: Callable[[], RoundState]) -> None:
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

    def _take(self, current: RoundState, action: Action) -> Callable[[], None]:
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
                self.activity.start(action.name.lower(), current.step, microbatch)
                started = time.perf_counter_ns()
                part()
                if current.training:  # an evaluation is no part of a step
                    self.recorder.add(action, current.step, microbatch, task.ready_ns, started)
            if action is frees:
                self.in_flight -= len(task.parts)
            self.activity.stop()

        return run
