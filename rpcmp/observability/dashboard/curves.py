"""Curves that stay light: however many steps a run has, a bounded number of rows.

    steps   1 2 3 4 5 6 7 8            one row a step
    full    └┬┘ └┬┘ └┬┘ └┬┘            two rows become one; rows that follow are of two steps

A row keeps its steps' mean, lowest and highest loss, so that no spike is lost.

Values as the page gets them: finite, and no longer than what anybody reads.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

DIGITS = 6
"""Significant ones; a curve of 2,000 rows is a third shorter than with all."""


def plain(value: Any) -> Any:
    """A value of an event as JSON has it: without NaN and infinity, which become None."""
    match value:
        case dict():
            return {str(key): plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
        case float():
            return number(value)
        case None | bool() | int() | str():
            return value
    return str(value)


def number(value: float | None) -> float | None:
    """A number with DIGITS significant digits; None for what is none."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


LIMIT = 2000
"""Rows, more than a screen has pixels across."""


@dataclass
class Row:
    """One step, or some that follow each other.

    Attributes:
        count: how many.
        step, seconds: of the last: its number, and when it ended, from the run's begin.
        loss, low, high: mean, lowest and highest; None where none was finite.
        rate: samples a second, their mean.
    """

    count: int
    step: int
    seconds: float
    loss: float | None
    low: float | None
    high: float | None
    rate: float

    def add(self, other: Row) -> None:
        """Take in what follows."""
        mine, its = self.count, other.count
        if self.loss is None or other.loss is None:
            self.loss = other.loss if self.loss is None else self.loss
        else:
            self.loss = (self.loss * mine + other.loss * its) / (mine + its)
        lows, highs = (self.low, other.low), (self.high, other.high)
        self.low = min((low for low in lows if low is not None), default=None)
        self.high = max((high for high in highs if high is not None), default=None)
        self.rate = (self.rate * mine + other.rate * its) / (mine + its)
        self.count, self.step, self.seconds = mine + its, other.step, other.seconds

    def values(self) -> list[float | None]:
        """As the page gets it."""
        found = (self.seconds, self.loss, self.low, self.high, self.rate)
        return [self.step, *map(number, found)]


class Curve:
    """The rows of a run's steps, and which version of the state changed each."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._stride = 1
        self._rows: list[Row] = []
        self._versions: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row, version: int) -> None:
        """Append one step."""
        if self._rows and self._rows[-1].count < self._stride:
            self._rows[-1].add(row)
            self._versions[-1] = version
            return
        self._rows.append(row)
        self._versions.append(version)
        if len(self._rows) > self._limit:
            self._halve(version)

    def since(self, version: int) -> dict[str, Any] | None:
        """What has changed after `version`: rows from an index on; None where nothing has."""
        begin = bisect_right(self._versions, version)
        if begin == len(self._rows):
            return None
        return {"from": begin, "rows": [row.values() for row in self._rows[begin:]]}

    def _halve(self, version: int) -> None:
        self._stride *= 2
        kept = self._rows[::2]
        for row, other in zip(kept, self._rows[1::2], strict=False):
            row.add(other)
        self._rows = kept
        self._versions = [version] * len(kept)
