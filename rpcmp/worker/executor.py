"""The one thread on which a stage computes, and the rounds that it works through.

RPC threads submit forwards and backwards once all their inputs have arrived. The thread asks the
schedule which one to run. There is one thread because that fixes the order of sums, because glibc
keeps a malloc arena and OpenMP a team for every thread that computes, and because no user code then
ever runs concurrently with itself.

After a round's last weight gradient the stage's `after_round` runs, which steps the optimizer. The
next round's first forward follows at once: no stage waits for the driver between two steps.

A round is one train step, evaluation or prediction. Rounds are numbered without gaps and every
stage takes part in all of them, strictly in order, but inputs of the next round may arrive while
the current one is still being computed. Progress is counted in bundles; see rpcmp.rpc.messages.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.futures import Future

from rpcmp.config.topology import ReplicaShare
from rpcmp.observability.trace.spans import SpanRecorder
from rpcmp.pipelining.schedule import Action, InFlightLimits, Policy, RoundProgress
from rpcmp.process.activity import Activity
from rpcmp.rpc.messages import AfterRound, RoundHeader
from rpcmp.rpc.transport import attempt

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Owner = TypeVar("Owner", bound="ComputeThreadOwner")


@dataclass
class Task:
    """An action on a bundle of micro-batches.

    Attributes:
        parts: run it, one micro-batch each, in order; must not raise.
        first: index in the round of the first micro-batch.
        cancel: called instead if the round was aborted.
        ready_ns: when all inputs had arrived; `time.perf_counter_ns`.
    """

    parts: Sequence[Callable[[], None]]
    first: int
    cancel: Callable[[], None] = lambda: None
    ready_ns: int = field(default_factory=time.perf_counter_ns)


@dataclass
class RoundState:
    """Progress of one round at this worker.

    Attributes:
        bundles: numbers of the bundles that this worker computes, in order.
        limits: how many of them may be in flight.
        is_held: whether the next round has to wait for `ComputeThread.release`.
    """

    header: RoundHeader
    bundles: Sequence[int]
    limits: InFlightLimits
    is_held: bool = False
    done: dict[Action, int] = field(default_factory=lambda: dict.fromkeys(Action, 0))
    ready: dict[tuple[Action, int], Task] = field(default_factory=dict)

    def is_ready(self, action: Action) -> bool:
        done = self.done[action]
        return done < len(self.bundles) and (action, self.bundles[done]) in self.ready

    def take(self, action: Action) -> Task:
        """Return the next action of that kind, which now counts as done."""
        bundle = self.bundles[self.done[action]]
        self.done[action] += 1
        return self.ready.pop((action, bundle))

    def is_done(self, action: Action) -> bool:
        """Whether all actions of a kind are done; outside of training there are only forwards."""
        last = action if self.header.is_training else Action.FORWARD
        return self.done[last] == len(self.bundles)

    def progress(self) -> RoundProgress:
        return RoundProgress(
            len(self.bundles),
            self.done[Action.FORWARD],
            self.done[Action.BACKWARD],
            self.done[Action.WEIGHT],
            self.is_ready(Action.FORWARD),
            self.is_ready(Action.BACKWARD),
        )


class RoundQueue:
    """The rounds that have started and are not complete. Not thread-safe."""

    def __init__(self) -> None:
        self._current = 1
        self._rounds: dict[int, RoundState] = {}
        self._aborted: set[int] = set()

    @property
    def current(self) -> RoundState | None:
        """The round to work on; None until it has started."""
        return self._rounds.get(self._current)

    def start(self, number: int, make: Callable[[], RoundState]) -> None:
        """Add round `number`, made by `make`, unless it is known already."""
        known = number < self._current or number in self._rounds or number in self._aborted
        if not known:
            self._rounds[number] = make()

    def get(self, number: int) -> RoundState | None:
        return self._rounds.get(number)

    def complete(self) -> None:
        self._rounds.pop(self._current, None)
        self._current += 1
        self._skip_aborted()

    def abort(self, first: int, last: int) -> list[Task]:
        """Drop the rounds from `first` to `last`; return the tasks that waited in them."""
        numbers = range(max(first, self._current), last + 1)
        self._aborted.update(numbers)
        dropped = [self._rounds.pop(number) for number in numbers if number in self._rounds]
        self._skip_aborted()
        return [task for state in dropped for task in state.ready.values()]

    def _skip_aborted(self) -> None:
        while self._current in self._aborted:
            self._aborted.discard(self._current)
            self._current += 1


class ComputeThread:
    """Runs a stage's actions one at a time, in the order that the schedule chooses.

    Args:
        limits: what the stage may keep in flight while it trains.
        share: the bundles that this worker computes.
        before_round: called on the thread before the first action, if the worker has any in the
            round; must not raise.
        after_round: called after the last action, before the next round; must not raise.

    Attributes:
        recorder: records every action of a train step.
        in_flight: micro-batches whose activations wait for their backward; any thread may read it.
    """

    def __init__(
        self,
        policy: Policy,
        limits: InFlightLimits,
        share: ReplicaShare,
        before_round: Callable[[RoundHeader], None],
        after_round: Callable[[RoundHeader], None],
        activity: Activity | None = None,
    ) -> None:
        self.policy = policy
        self.limits = limits
        self.activity = activity or Activity()
        self.recorder = SpanRecorder()
        self.in_flight = 0
        self._share = share
        self._before_round = before_round
        self._after_round = after_round
        self._changed = threading.Condition()
        self._rounds = RoundQueue()
        self._calls: deque[Callable[[], None]] = deque()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="rpcmp-compute", daemon=True)
        self._thread.start()

    def reschedule(self, policy: Policy, limits: InFlightLimits) -> None:
        """Switch to another schedule; on this thread, between two rounds."""
        self.policy, self.limits = policy, limits

    def start_round(self, header: RoundHeader) -> None:
        """Add a round, unless it is known already."""
        with self._changed:
            self._rounds.start(header.number, lambda: self._new_round(header))
            self._changed.notify()

    def submit(self, round_number: int, action: Action, bundle: int, task: Task) -> None:
        """Queue an action whose inputs are there; cancel it if its round was aborted."""
        with self._changed:
            state = self._rounds.get(round_number)
            if state is not None:
                state.ready[action, bundle] = task
                self._changed.notify()
        if state is None:
            task.cancel()

    def future(self, function: Callable[[], Any]) -> Future[Any]:
        """Return a future of the result, or a Raised, of something that belongs to no round.

        First the thread does everything that the round before can do without other stages.
        """
        future: Future[Any] = Future()
        with self._changed:
            self._calls.append(lambda: future.set_result(attempt(function)))
            self._changed.notify()
        return future

    def release(self) -> None:
        """Let the next round start, if the current one is held."""
        with self._changed:
            if self._rounds.current is not None:
                self._rounds.current.is_held = False
                self._changed.notify()

    def abort(self, first: int, last: int) -> None:
        """Cancel all tasks of the rounds from `first` to `last`, and all that arrive later."""
        with self._changed:
            waiting = self._rounds.abort(first, last)
            self._changed.notify()
        for task in waiting:
            task.cancel()

    def close(self) -> None:
        """Let the thread end after its current action, if it has to end before its process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _new_round(self, header: RoundHeader) -> RoundState:
        bundles = self._share.numbers(header.num_bundles)
        unlimited = InFlightLimits(header.num_bundles, header.num_bundles)
        limits = self.limits if header.is_training else unlimited
        return RoundState(header, bundles, limits, is_held=header.after is AfterRound.HOLD)

    def _loop(self) -> None:
        while (run := self._wait()) is not None:
            try:
                run()
            except BaseException:
                # Tasks do not raise, so this is a bug, and no caller would see it.
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            del run  # an idle thread must not keep a micro-batch alive

    def _wait(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._is_closed:
                if (run := self._next()) is not None:
                    return run
                self._changed.wait()
        return None

    def _next(self) -> Callable[[], None] | None:
        current = self._rounds.current
        is_complete = current is not None and current.is_done(Action.WEIGHT)
        if current is not None and is_complete and not current.is_held:
            self._rounds.complete()
            return functools.partial(self._after_round, current.header)  # stage.py [12]
        # Not while the thread can complete the round by itself.
        if self._calls and (current is None or is_complete or not current.is_done(Action.BACKWARD)):
            return self._calls.popleft()
        if current is None:
            return None
        action = self.policy.choose(current.progress(), current.limits)
        return None if action is None else self._take(current, action)

    def _take(self, current: RoundState, action: Action) -> Callable[[], None]:
        header = current.header
        is_first = not any(current.done.values())
        task = current.take(action)  # stage.py [7]
        if action is Action.BACKWARD and not current.limits.splits:
            current.done[Action.WEIGHT] += 1
        frees = Action.WEIGHT if current.limits.splits else Action.BACKWARD

        def run() -> None:
            if is_first:
                self.in_flight = 0
                self._before_round(header)
            if header.is_training and action is Action.FORWARD:
                self.in_flight += len(task.parts)
            for microbatch, part in enumerate(task.parts, task.first):
                self.activity.start(action.name.lower(), header.step, microbatch)
                started = time.perf_counter_ns()
                part()
                if header.is_training:  # an evaluation is not part of a step
                    self.recorder.add(action, header.step, microbatch, task.ready_ns, started)
            if action is frees:
                self.in_flight -= len(task.parts)
            self.activity.stop()

        return run


class ComputeThreadOwner:
    """A class whose decorated methods run `on_compute_thread`."""

    _compute: ComputeThread

    def _guard(self, function: Callable[[], Result]) -> Result:
        """Call `function` on the compute thread; may translate its errors."""
        return function()


def on_compute_thread(
    method: Callable[Concatenate[Owner, Parameters], Result],
) -> Callable[Concatenate[Owner, Parameters], Future[Result]]:
    """Make a method run on its owner's compute thread; callers get a future of the result."""

    @functools.wraps(method)
    def submit(
        owner: Owner, /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        return owner._compute.future(lambda: owner._guard(lambda: method(owner, *args, **kwargs)))

    return submit
