"""What a stage measures of itself: the actions of its compute thread, and its memory."""

from __future__ import annotations

import itertools
import resource
import sys
import time
from collections import deque
from pathlib import Path

import torch

from rpcmp.observability.events import Memory
from rpcmp.observability.trace.spans import Kind, Span

SPANS_PER_ANSWER = 10_000
"""`rpcmp.net.rpc_pickle` refuses messages of unlimited length."""


class Recorder:
    """Busy time per kind of action, and a ring buffer of the actions of the last steps.

    Only the compute thread calls its methods.

    Attributes:
        total: nanoseconds per kind of action since the process started; any thread may read it.
    """

    def __init__(self) -> None:
        self.total: dict[str, int] = dict.fromkeys(Kind, 0)
        self._taken = dict(self.total)
        self._spans: deque[Span] = deque()
        self._first = 0  # the position of the oldest span that is kept
        self._steps_kept = 0

    def add(self, kind: str, step: int, microbatch: int, ready: int, start: int) -> None:
        """Record an action that has just ended; times are those of `time.perf_counter_ns`."""
        end = time.perf_counter_ns()
        self.total[kind] += end - start
        if not self._steps_kept:
            return
        self._spans.append(Span(Kind(kind), step, microbatch, min(ready, start), start, end))
        while self._spans[0].step < step - self._steps_kept:
            self._spans.popleft()
            self._first += 1

    def take_busy(self) -> dict[str, float]:
        """Return the seconds per kind of action since the last call."""
        before, self._taken = self._taken, dict(self.total)
        return {str(kind): (now - before[kind]) / 1e9 for kind, now in self.total.items()}

    def keep(self, steps: int) -> int:
        """Keep the spans of the newest step and `steps` before it; return the cursor to read from.

        Spans that were recorded earlier lie before the cursor.
        """
        self._steps_kept = max(steps, self._steps_kept)
        return self._first + len(self._spans)

    def read(
        self, cursor: int, first_step: int = 0, last_step: int = sys.maxsize
    ) -> tuple[int, list[Span]]:
        """Return the next cursor, and the spans from `cursor` on that belong to these steps.

        An answer of SPANS_PER_ANSWER spans may not be all of them.
        """
        spans: list[Span] = []
        position = max(cursor, self._first)
        for span in itertools.islice(self._spans, position - self._first, None):
            position += 1
            if first_step <= span.step <= last_step:
                spans.append(span)
            if len(spans) == SPANS_PER_ANSWER:
                break
        return position, spans


class Meter:
    """Memory of this stage: resident memory on a CPU, memory allocated by torch on a GPU.

    Create it when the stage has been built and nothing has run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle = self._now()

    def read(self) -> Memory:
        """Return bytes: "idle", when the stage had been built, and "peak" since then."""
        return {"idle": self._idle, "peak": max(self._idle, self._peak())}

    def _now(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * resource.getpagesize()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
