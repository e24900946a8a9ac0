"""What a compute thread did, and when: sums always, every action while somebody wants to know."""

from __future__ import annotations

import time
from collections import deque

from rpcmp.trace.spans import Kind, Span

STEPS_KEPT = 24
"""Steps before the newest whose actions are kept while somebody follows the run."""

AT_ONCE = 10_000
"""Actions in one answer: `rpcmp.wire.rpcpickle` takes no message of any length."""


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
