"""What a compute thread did, and when: sums always, every action while somebody traces."""

from __future__ import annotations

import time

from rpcmp.trace.spans import Kind, Span


class Recorder:
    """Written by the compute thread alone; `take_busy` and `take_spans` run there as well.

    Attributes:
        traces: whether every action is kept.
    """

    def __init__(self) -> None:
        self.traces = False
        self._busy: dict[str, int] = dict.fromkeys(Kind, 0)
        self._spans: list[Span] = []

    def add(self, kind: str, step: int, microbatch: int, ready: int, start: int) -> None:
        """Note an action that has just ended; times are those of `time.perf_counter_ns`."""
        end = time.perf_counter_ns()
        self._busy[kind] += end - start
        if self.traces:
            self._spans.append(Span(Kind(kind), step, microbatch, min(ready, start), start, end))

    def take_busy(self) -> dict[str, float]:
        """Seconds by kind of action since this was last asked."""
        busy, self._busy = self._busy, dict.fromkeys(Kind, 0)
        return {str(kind): nanoseconds / 1e9 for kind, nanoseconds in busy.items()}

    def take_spans(self) -> list[Span]:
        """The actions since this was last asked, in order; none unless `traces` is set."""
        spans, self._spans = self._spans, []
        return spans
