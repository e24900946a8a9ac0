"""What a compute thread did, and when: sums always, every action while somebody traces."""

from __future__ import annotations

import time
from typing import NamedTuple

OPTIMIZER = "O"
"""The optimizer step, beside the names of `rpcmp.schedule.Action`."""


class Span(NamedTuple):
    """One action; times in nanoseconds of this host's `time.perf_counter_ns`.

    Attributes:
        kind: "F", "B", "W" or "O".
        step: the optimizer step.
        microbatch: its index; -1 for the optimizer.
        ready: when all that it needs had arrived.
        start, end: when the compute thread did it.
    """

    kind: str
    step: int
    microbatch: int
    ready: int
    start: int
    end: int


class Recorder:
    """Written by the compute thread alone; `take_busy` and `take_spans` run there as well."""

    def __init__(self) -> None:
        self.traces = False
        self._busy = dict.fromkeys("FBWO", 0)
        self._spans: list[Span] = []

    def add(self, kind: str, step: int, microbatch: int, ready: int, start: int) -> None:
        """Note an action that has just ended."""
        end = time.perf_counter_ns()
        self._busy[kind] += end - start
        if self.traces:
            self._spans.append(Span(kind, step, microbatch, ready, start, end))

    def take_busy(self) -> dict[str, float]:
        """Seconds by kind since this was last asked."""
        busy, self._busy = self._busy, dict.fromkeys("FBWO", 0)
        return {kind: nanoseconds / 1e9 for kind, nanoseconds in busy.items()}

    def take_spans(self) -> list[Span]:
        """The actions since this was last asked, in order; none unless `traces` is set."""
        spans, self._spans = self._spans, []
        return spans
