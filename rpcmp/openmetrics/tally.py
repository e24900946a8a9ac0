"""Counters of things that begin again at zero: processes, and the connections between them.

process 1    0 ── 5 ── 9 |                  what is read
process 2                | 0 ── 3 ── 4
counter      0 ── 5 ── 9 ── 9 ── 12 ── 13   what is served
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable


class Tally:
    """Totals over all that has been counted; they never fall."""

    def __init__(self) -> None:
        self._before: defaultdict[Hashable, float] = defaultdict(float)
        self._last: dict[Hashable, tuple[object, float]] = {}

    def total(self, key: Hashable, source: object, count: float) -> float:
        """The total of `key`.

        Args:
            source: what is counted now, such as a process id; with another one it has begun anew.
            count: of that source, so far.
        """
        known, last = self._last.get(key, (source, 0.0))
        if known != source:
            self._before[key] += last
            last = 0.0
        self._last[key] = source, max(last, count)
        return self._before[key] + max(last, count)
