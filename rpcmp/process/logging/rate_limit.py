"""Flood control: of lines that are alike the first few pass, the others are counted.

    said      a1 a2 a3 a4 a5 a6 a7 a8 . . . a90   │          b1
    passed    a1 a2 a3 a4 a5                      │ a90 x85  b1
              └─ FIRST of a kind ─┘      end of the window: the last, and how many it stands for

Lines are alike that differ in nothing but numbers and punctuation. A kind that goes on and on is
told of ever more rarely, up to once in LONGEST. Whatever the kinds, no more than a certain amount
of text passes: a budget that fills up again with time.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, replace

from rpcmp.process.logging.records import Line

FIRST = 5
"""Lines of a kind that pass in a window."""

SECONDS = 5.0
"""A window at first; each that had to count doubles the next."""

LONGEST = 60.0

KINDS = 256
"""Kinds that are known at a time."""

BURST, REFILL = 400.0, 100.0
"""What may pass at once, and in a second. A line costs 1, and 1 more for each 256 characters."""

# Words with a digit, and all that is between words. Linear: a word is looked at from its beginning
# alone, and only once.
_NOT_WORDS = re.compile(r"(?<![^\W_])[^\W\d_]*+\d\w*+|[\W_]+")

_LOOKED_AT = 200
"""Characters that decide which kind a line is of."""

Kind = tuple[str, str]


@dataclass
class _Window:
    ends: float
    seconds: float = SECONDS
    passed: int = 0
    held: int = 0
    last: Line | None = None

    def take_summary(self) -> list[Line]:
        """The last line that was held, for all of them."""
        if self.last is None:
            return []
        line, self.last = replace(self.last, count=self.held), None
        self.held = 0
        return [line]


class LogRateLimiter:
    """Decides which lines pass. Pure: told the time, in seconds of any clock."""

    def __init__(self) -> None:
        self._windows: OrderedDict[Kind, _Window] = OrderedDict()
        self._budget, self._filled = BURST, 0.0
        self._rest = _Window(ends=float("inf"))
        self._next = float("inf")  # nothing is due before
        self._newest: _Window | None = None

    @property
    def newest_held(self) -> Line | None:
        """The line that was held last, for all of its kind."""
        window = self._newest
        return replace(window.last, count=window.held) if window and window.last else None

    def take(self, line: Line, now: float) -> list[Line]:
        """What passes when `line` is said."""
        passing = self.due(now)
        kind = line.level, _NOT_WORDS.sub(" ", line.text[:_LOOKED_AT])
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _Window(ends=now + SECONDS)
            self._next = min(self._next, window.ends)
            self._forget_oldest(now)
        if window.passed < FIRST and self._affords(line, now):
            window.passed += 1
            passing.append(line)
        else:
            window.held += line.count
            window.last = line
            self._newest = window
        return passing

    def due(self, now: float) -> list[Line]:
        """What has to be told by now of lines that were held."""
        if now < self._next:
            return []
        passing = []
        for kind, window in list(self._windows.items()):
            if now < window.ends:
                continue
            if window.last is None:  # quiet: the next of its kind is news again
                del self._windows[kind]
                continue
            passing += window.take_summary()
            window.seconds = min(2 * window.seconds, LONGEST)
            window.ends, window.passed = now + window.seconds, FIRST
        if now >= self._rest.ends:
            passing += self._summary_of_rest()
        windows = [*self._windows.values(), self._rest]
        self._next = min(window.ends for window in windows)
        return passing

    def next_due(self) -> float | None:
        """When `due` has something to tell; None: nothing is held."""
        windows = [*self._windows.values(), self._rest]
        return min((window.ends for window in windows if window.last is not None), default=None)

    def flush(self) -> list[Line]:
        """All that is held, at once."""
        told = [line for window in self._windows.values() for line in window.take_summary()]
        return [*told, *self._summary_of_rest()]

    def _affords(self, line: Line, now: float) -> bool:
        passed = max(0.0, now - self._filled)
        self._budget, self._filled = min(BURST, self._budget + REFILL * passed), now
        cost = 1 + len(line.text) / 256
        if self._budget < cost:
            return False
        self._budget -= cost
        return True

    def _forget_oldest(self, now: float) -> None:
        """Bound the memory: what the oldest kind holds is told with what others did."""
        if len(self._windows) <= KINDS:
            return
        _, oldest = self._windows.popitem(last=False)
        if oldest.last is None:
            return
        if self._rest.last is None:
            self._rest.ends = now + SECONDS
            self._next = min(self._next, self._rest.ends)
        self._rest.held += oldest.held
        self._rest.last = oldest.last

    def _summary_of_rest(self) -> list[Line]:
        number, self._rest.ends = self._rest.held, float("inf")
        return [
            replace(line, text=f"... {number:,} lines left out, the last: {line.text}", count=1)
            for line in self._rest.take_summary()
        ]
