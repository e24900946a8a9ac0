"""Spans, which record when a stage computed what; their recorder; clocks; windows of steps.

    ready          start                end
      ┆  overhead    ├────── span ───────┤          on the stage's one compute thread
      everything that the action needs has arrived

Only training is recorded: an evaluation shows as time in which the stages wait for the driver.

The clocks of different hosts are converted to the driver's:

    driver    sent ───┐           ┌──> received
                      │           │
    remote            └──> remote ┘

The reply to a ping carries the time of the remote clock. If both directions take equally long, the
remote clock was read halfway; otherwise the estimate is off by half of their difference, and never
by more than half of the round trip. So the ping with the shortest round trip is the most accurate
(Cristian 1989; NTP does the same). Clocks also drift apart, some microseconds per second: estimates
before and after a run give a line through both.

A window starts when any stage starts its first step, and ends when any stage starts the step after
its last, so that the time between two steps counts once. Pure: no sockets, no torch.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rpcmp.config.topology import Graph
from rpcmp.errors import ConfigError
from rpcmp.process.activity import core_seconds


class Ping(NamedTuple):
    """A request for the remote time; `sent_ns` and `received_ns` are on the driver's clock."""

    sent_ns: int
    remote_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        return self.received_ns - self.sent_ns


class ClockEstimate(NamedTuple):
    """The offset of a remote clock, estimated at one moment.

    Attributes:
        remote_ns: the moment, on the remote clock.
        offset_ns: added to the remote clock, gives the driver's; wrong by half of the shortest
            round trip at most.
    """

    remote_ns: int
    offset_ns: int


@dataclass(frozen=True, slots=True)
class Clock:
    """Maps a remote clock to the driver's.

    Attributes:
        offset_ns: added to the remote clock at `remote_ns`, gives the driver's.
        remote_ns: the remote time at which `offset_ns` is exact.
        drift: nanoseconds by which the offset grows per nanosecond of the remote clock.
    """

    offset_ns: int = 0
    remote_ns: int = 0
    drift: float = 0.0

    def to_driver(self, ns: int) -> int:
        """Return the driver's time at remote time `ns`."""
        return ns + self.offset_ns + round(self.drift * (ns - self.remote_ns))


DRIVER_CLOCK = Clock()


def estimate(pings: Iterable[Ping]) -> ClockEstimate:
    """Return the estimate of the best of `pings`; there must be at least one."""
    best = min(pings, key=lambda ping: ping.round_trip_ns)
    middle_ns = (best.sent_ns + best.received_ns) // 2
    return ClockEstimate(best.remote_ns, middle_ns - best.remote_ns)


def between(before: ClockEstimate, after: ClockEstimate) -> Clock:
    """Return the clock whose offset is a line through the estimates before and after a run.

    Between the two estimates its error is at most the larger of theirs.
    """
    elapsed_ns = after.remote_ns - before.remote_ns
    drift = (after.offset_ns - before.offset_ns) / elapsed_ns if elapsed_ns else 0.0
    return Clock(before.offset_ns, before.remote_ns, drift)


NO_MICROBATCH = -1
"""The micro-batch of an optimizer's span, which covers all of them."""


class Kind(StrEnum):
    """The kind of an action. A backward that is not split is a BACKWARD without a WEIGHT."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    OPTIMIZER = "O"


class Span(NamedTuple):
    """One action of one stage, identified within the stage by (kind, step, microbatch).

    Attributes:
        kind: what was computed.
        step: optimizer step, counted from 1.
        microbatch: index within the step, or NO_MICROBATCH.
        ready_ns: when all of its inputs had arrived; at most `start_ns`.
        start_ns, end_ns: when the thread started and finished it. Like `ready_ns`, these are on
            the clock of the stage's host (`time.perf_counter_ns`).
    """

    kind: Kind
    step: int
    microbatch: int
    ready_ns: int
    start_ns: int
    end_ns: int

    @property
    def label(self) -> str:
        """ "F3", or "optimizer"."""
        if self.kind is Kind.OPTIMIZER:
            return self.kind.name.lower()
        return f"{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Track:
    """The spans of one stage.

    Attributes:
        stage: the stage's name.
        host: the name of its host.
        spans: in order; they never overlap, because one thread computes them.
        clock: converts their times to the driver's clock.
    """

    stage: str
    host: str
    spans: tuple[Span, ...]
    clock: Clock = DRIVER_CLOCK

    def aligned(self) -> Track:
        """Return the track on the driver's clock."""
        if self.clock == DRIVER_CLOCK:
            return self
        at = self.clock.to_driver
        spans = (
            Span(kind, step, microbatch, at(ready), at(start), at(end))
            for kind, step, microbatch, ready, start, end in self.spans
        )
        return Track(self.stage, self.host, tuple(spans))


@dataclass(frozen=True)
class Trace:
    """The tracks of all stages, converted to the driver's clock.

    Attributes:
        tracks: one per stage, in the graph's order.
        producers: for each stage, the stages whose outputs it reads; empty if it reads only the
            batch.
    """

    tracks: tuple[Track, ...]
    producers: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tracks", tuple(track.aligned() for track in self.tracks))

    @property
    def begin_ns(self) -> int:
        """The start of the first span; there must be one."""
        return min(track.spans[0].start_ns for track in self.tracks if track.spans)

    @property
    def end_ns(self) -> int:
        """The end of the last span; there must be one."""
        return max(track.spans[-1].end_ns for track in self.tracks if track.spans)


def producers(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return `Trace.producers` of a graph: each stage once, without inputs from the batch."""
    return {
        stage: tuple(dict.fromkeys(ref.producer for ref in references if not ref.from_batch))
        for stage, references in graph.inputs.items()
    }


class Window(NamedTuple):
    """Consecutive steps, and their time on the driver's clock."""

    steps: tuple[int, ...]
    begin_ns: int
    end_ns: int

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return (self.end_ns - self.begin_ns) / len(self.steps) / 1e9

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        """Return how much of a span lies inside."""
        return max(0, min(end_ns, self.end_ns) - max(start_ns, self.begin_ns))

    def __str__(self) -> str:
        if len(self.steps) == 1:
            return f"step {self.steps[0]}"
        return f"steps {self.steps[0]} to {self.steps[-1]}"


def choose_window(trace: Trace, first: int | None = None, last: int | None = None) -> Window:
    """Return the window of the steps from `first` to `last`, both included.

    Args:
        trace: the trace.
        first, last: default to the trace's own. Without both, the first step is left out if there
            are others, since it includes first-time costs of memory and code.

    Raises:
        ConfigError: the trace has no such steps.
    """
    steps = _step_numbers(trace)
    if first is None and last is None and len(steps) > 1:
        first = steps[1]
    first, last = steps[0] if first is None else first, steps[-1] if last is None else last
    if not steps[0] <= first <= last <= steps[-1]:
        raise ConfigError(
            f"no steps {first} to {last} in the trace; it has {steps[0]} to {steps[-1]}"
        )
    return _between(trace, tuple(step for step in steps if first <= step <= last))


def last_complete(trace: Trace, count: int = 2) -> Window:
    """Return the window of the last `count` complete steps, or of fewer if there are not enough.

    Raises:
        ConfigError: the trace has no steps.
    """
    steps = _step_numbers(trace)
    updates = [
        {span.step for span in track.spans if span.kind is Kind.OPTIMIZER} for track in trace.tracks
    ]
    updated = set.intersection(set(steps), *filter(None, updates))
    complete = [step for step in steps if step in updated] or steps
    return choose_window(trace, complete[-count:][0], complete[-1])


def _step_numbers(trace: Trace) -> list[int]:
    steps = sorted({span.step for track in trace.tracks for span in track.spans})
    if not steps:
        raise ConfigError("the trace has no steps; let the run train for two at least")
    return steps


def _between(trace: Trace, steps: tuple[int, ...]) -> Window:
    spans = [span for track in trace.tracks for span in track.spans]
    begin_ns = min(span.start_ns for span in spans if steps[0] <= span.step <= steps[-1])
    later = (span.start_ns for span in spans if span.step > steps[-1])
    end_ns = min(later, default=trace.end_ns)
    if end_ns <= begin_ns:
        raise ConfigError(f"steps {steps[0]} to {steps[-1]} of the trace take no time")
    return Window(steps, begin_ns, end_ns)


SPANS_PER_ANSWER = 10_000
"""`rpcmp.net.rpc_pickle` refuses messages of unlimited length."""


class SpanRecorder:
    """Busy time per kind of action, and a ring buffer of the actions of the last steps.

    Only the compute thread calls its methods.

    Attributes:
        total: nanoseconds per kind of action since the process started; any thread may read it.
    """

    def __init__(self) -> None:
        self.total: dict[str, int] = dict.fromkeys(Kind, 0)
        self._taken = dict(self.total)
        self._core_seconds = 0.0, 0.0
        self._spans: deque[Span] = deque()
        self._first = 0  # the position of the oldest span that is kept
        self._steps_kept = 0

    def add(self, kind: str, step: int, microbatch: int, ready: int, start: int) -> None:
        """Record an action that has just ended; times are from `time.perf_counter_ns`."""
        end = time.perf_counter_ns()
        self.total[kind] += end - start
        if not self._steps_kept:
            return
        self._spans.append(Span(Kind(kind), step, microbatch, min(ready, start), start, end))
        while self._spans[0].step < step - self._steps_kept:
            self._spans.popleft()
            self._first += 1

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the seconds since the last call: per kind of action, and of this thread's cores.

        The latter are those for which it had one, "used", and for which it waited for one,
        "waited".
        """
        before, self._taken = self._taken, dict(self.total)
        (used, waited), self._core_seconds = self._core_seconds, core_seconds()
        now_used, now_waited = self._core_seconds
        busy = {str(kind): (now - before[kind]) / 1e9 for kind, now in self.total.items()}
        return busy, {"used": now_used - used, "waited": now_waited - waited}

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
