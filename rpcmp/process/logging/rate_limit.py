"""Rate limiting of log lines: the first few of a kind pass, the others are counted.

    logged    a1 a2 a3 a4 a5 a6 a7 a8 . . . a90   │          b1
    passed    a1 a2 a3 a4 a5                      │ a90 x85  b1
              └─ FIRST of a kind ─┘      end of the window: the last, and how many it stands for

Lines that differ only in numbers and punctuation are of one kind. A kind that goes on and on is
summarized ever more rarely, down to once in LONGEST. In addition a budget, which refills with time,
limits the text that passes, whatever its kinds.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, replace

from rpcmp.process.logging.records import Line

FIRST = 5
"""Lines of a kind that pass in a window."""

SECONDS = 5.0
"""The first window of a kind; each window that had to count doubles the next."""

LONGEST = 60.0

KINDS = 256
"""Kinds that are remembered."""

BURST, REFILL = 400.0, 100.0
"""What may pass at once, and per second. A line costs 1, and 1 more per 256 characters."""

# Words with a digit, and everything between words. Linear: a word is matched from its start only,
# and only once.
_NOT_WORDS = re.compile(r"(?<![^\W_])[^\W\d_]*+\d\w*+|[\W_]+")

_KIND_CHARACTERS = 200
"""Characters that decide a line's kind."""

Kind = tuple[str, str]


@dataclass
class _Window:
    ends: float
    seconds: float = SECONDS
    passed: int = 0
    held: int = 0
    last: Line | None = None

    def take_summary(self) -> list[Line]:
        """Return the last line that was held, with the count of all, and reset."""
        if self.last is None:
            return []
        line, self.last = replace(self.last, count=self.held), None
        self.held = 0
        return [line]


class LogRateLimiter:
    """Decides which lines pass. Pure: times are arguments, in seconds of any clock."""

    def __init__(self) -> None:
        self._windows: OrderedDict[Kind, _Window] = OrderedDict()
        self._budget, self._filled = BURST, 0.0
        self._rest = _Window(ends=float("inf"))
        self._next = float("inf")  # nothing is due before
        self._newest: _Window | None = None

    @property
    def newest_held(self) -> Line | None:
        """The line that was held last, with the count of its kind."""
        window = self._newest
        return replace(window.last, count=window.held) if window and window.last else None

    def take(self, line: Line, now: float) -> list[Line]:
        """Add a line, and return the lines that pass."""
        passing = self.due(now)
        kind = line.level, _NOT_WORDS.sub(" ", line.text[:_KIND_CHARACTERS])
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
        """Return the summaries of windows that have ended."""
        if now < self._next:
            return []
        passing = []
        for kind, window in list(self._windows.items()):
            if now < window.ends:
                continue
            if window.last is None:  # it was quiet: its next line is news again
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
        """Return when `due` will return a line; None if none is held."""
        windows = [*self._windows.values(), self._rest]
        return min((window.ends for window in windows if window.last is not None), default=None)

    def flush(self) -> list[Line]:
        """Return the summaries of all lines that are held."""
        lines = [line for window in self._windows.values() for line in window.take_summary()]
        return [*lines, *self._summary_of_rest()]

    def _affords(self, line: Line, now: float) -> bool:
        elapsed = max(0.0, now - self._filled)
        self._budget, self._filled = min(BURST, self._budget + REFILL * elapsed), now
        cost = 1 + len(line.text) / 256
        if self._budget < cost:
            return False
        self._budget -= cost
        return True

    def _forget_oldest(self, now: float) -> None:
        """Bound the memory: lines that the oldest kind holds join a window shared by such kinds."""
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
