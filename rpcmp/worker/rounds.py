"""How far a stage has come in the rounds that it knows of. Not thread-safe; see compute.py.

A round is one train step, evaluation or prediction. Rounds are numbered without gaps and every
stage takes part in all of them, so a stage works on them strictly in order; but what it will need
for the next one may arrive while the one before is still being computed.

What is counted here are bundles; see rpcmp.work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rpcmp.schedule import Action, Limits, Progress


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
class Round:
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
    limits: Limits
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

    def progress(self) -> Progress:
        """What the schedule chooses by."""
        return Progress(
            len(self.bundles),
            self.done[Action.FORWARD],
            self.done[Action.BACKWARD],
            self.done[Action.WEIGHT],
            self.is_ready(Action.FORWARD),
            self.is_ready(Action.BACKWARD),
        )


class Rounds:
    """The rounds that have begun and are not complete."""

    def __init__(self) -> None:
        self._current = 1
        self._rounds: dict[int, Round] = {}
        self._aborted: set[int] = set()

    @property
    def current(self) -> Round | None:
        """The round to work on; None until somebody has begun it."""
        return self._rounds.get(self._current)

    def begin(self, number: int, make: Callable[[], Round]) -> None:
        """Note that round `number` exists; `make` makes it the first time."""
        known = number < self._current or number in self._rounds or number in self._aborted
        if not known:
            self._rounds[number] = make()

    def get(self, number: int) -> Round | None:
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
