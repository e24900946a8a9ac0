"""The history of a run on the page, which takes bounded memory: a curve and a list of entries.

The curve has at most MAX_ROWS rows, however many steps the run has:

    steps   1 2 3 4 5 6 7 8            one row per step
    full    └┬┘ └┬┘ └┬┘ └┬┘            pairs of rows are merged; new rows cover two steps each

A row keeps the mean, lowest and highest loss of its steps, so that no spike is lost.

The list has the newest entries of each kind, so that a flood of one kind hides no other.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from rpcmp.observability import events
from rpcmp.observability.events.event import map_floats
from rpcmp.observability.events.wording import RunContext, describe

DIGITS = 6
"""Significant digits; a curve of 2,000 rows is a third shorter than with all digits."""

MAX_ROWS = 2000
"""Rows of a curve, more than a screen has pixels across."""

MAX_ENTRIES = 200
"""Entries of each kind in the list of events."""


def number(value: float | None) -> float | None:
    """Round a number to DIGITS significant digits; None unless it is finite, as JSON needs it."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def rounded(value: Any) -> Any:
    """Return a value of an event with all numbers in it rounded; see `number`."""
    return map_floats(value, number)


@dataclass
class Row:
    """A point of the curve: one step, or several consecutive ones.

    Attributes:
        count: number of steps.
        step, seconds: number of the last step, and its end in seconds since the run's start.
        loss, low, high: mean, lowest and highest loss; None if no loss was finite.
        rate: mean samples per second.
        version: of the state that changed the row last.
    """

    count: int
    step: int
    seconds: float
    loss: float | None
    low: float | None
    high: float | None
    rate: float
    version: int

    def add(self, other: Row) -> None:
        """Merge the row that follows into this one."""
        count, added = self.count, other.count
        if self.loss is None or other.loss is None:
            self.loss = other.loss if self.loss is None else self.loss
        else:
            self.loss = (self.loss * count + other.loss * added) / (count + added)
        lows, highs = (self.low, other.low), (self.high, other.high)
        self.low = min((low for low in lows if low is not None), default=None)
        self.high = max((high for high in highs if high is not None), default=None)
        self.rate = (self.rate * count + other.rate * added) / (count + added)
        self.count, self.step, self.seconds = count + added, other.step, other.seconds
        self.version = other.version


class Curve:
    """The rows of a run's steps."""

    def __init__(self, limit: int = MAX_ROWS) -> None:
        self._limit = limit
        self._stride = 1
        self._rows: list[Row] = []

    def add(self, row: Row) -> None:
        """Append one step."""
        if self._rows and self._rows[-1].count < self._stride:
            self._rows[-1].add(row)
            return
        self._rows.append(row)
        if len(self._rows) > self._limit:
            self._halve(row.version)

    def since(self, version: int) -> dict[str, Any] | None:
        """Return the rows from the first that changed after `version`; None if none did."""
        first = bisect_right(self._rows, version, key=lambda row: row.version)
        rows = self._rows[first:]
        if not rows:
            return None
        return {
            "from": first,
            "rows": [
                [row.step, *map(number, (row.seconds, row.loss, row.low, row.high, row.rate))]
                for row in rows
            ],
        }

    def _halve(self, version: int) -> None:
        self._stride *= 2
        rows, self._rows = self._rows, self._rows[::2]
        for row, following in zip(self._rows, rows[1::2], strict=False):
            row.add(following)
        for row in self._rows:
            row.version = version


ENTRIES = {
    "fault": ("fault", "waiting", "replaced"),
    "generation": ("generation", "recovered", "resumed"),
    "checkpoint": ("checkpoint", "best"),
    "evaluation": ("eval", "early_stop"),
    "message": ("warning", "log"),
    "run": (
        *("measuring", "plan", "shares", "start", "schedule", "rebalance"),
        *("report", "summary", "end"),
    ),
}
"""The kinds of entries, and the events that make them; other events make none."""

KINDS = {event: kind for kind, names in ENTRIES.items() for event in names}


class Entries:
    """The list of a run's events."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[dict[str, Any]]] = {
            kind: deque(maxlen=MAX_ENTRIES) for kind in ENTRIES
        }
        self._run = RunContext()
        self.counts: Counter[str] = Counter()

    def add(self, event: events.Event, version: int) -> bool:
        """Add the run's next event; return whether it made an entry."""
        self._run.add(event)
        kind = KINDS.get(event.event)
        if kind is None:
            return False
        entry = {
            "n": version,
            "kind": kind,
            "time": event.time,
            "step": getattr(event, "step", None),
            "generation": event.generation,
            "stage": getattr(event, "stage", ""),
            "level": _level(event),
            "text": describe(event, self._run),
        }
        self._kept[kind].append(entry)
        self.counts[kind] += 1
        return True

    def since(self, version: int) -> list[dict[str, Any]]:
        """Return the entries made after `version`, in order."""
        entries = (entry for kept in self._kept.values() for entry in kept if entry["n"] > version)
        return sorted(entries, key=lambda entry: int(entry["n"]))


def _level(event: events.Event) -> str:
    match event:
        case events.FaultEvent():
            return "error"
        case events.WarningEvent() | events.WaitingEvent():
            return "warning"
        case events.RebalanceEvent() if event.outcome != "moved":
            return "warning"
        case events.EndEvent():
            return "error" if event.outcome == "failed" else "info"
        case events.LogEvent():
            level = event.level.lower()
            return {"error": "error", "critical": "error", "warning": "warning"}.get(level, "info")
    return "info"
