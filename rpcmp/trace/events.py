"""A trace as events of the Chrome trace event format, which Perfetto reads too.

Each stage is a process. Its first thread shows what it computes and why it idles, the others what
is under way to it, each on a thread that is free: slices of one thread must not overlap. Arrows go
from the span that made an output or a gradient to the span that used it.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import count
from typing import Any

from rpcmp.trace.causes import Causes
from rpcmp.trace.idle import idle
from rpcmp.trace.spans import Kind, Trace, Track

Event = dict[str, Any]

COMPUTE = 0
"""The lane of what a stage computes; transfers lie in lanes from 1 on."""

ARROWS = {Kind.FORWARD: "activation", Kind.BACKWARD: "gradient"}


def category(kind: Kind) -> str:
    """The `cat` of a kind's events."""
    return kind.name.lower()


def microseconds(ns: int) -> float:
    """What the format wants, so that rounding and cutting off both give `ns` back.

    Perfetto multiplies by 1000 and cuts off: 1.001 would become 1000 ns, and slices that touch
    would overlap and be dropped.
    """
    value = ns / 1000
    return value if int(value * 1000) == ns else math.nextafter(value, math.inf)


class Events:
    """The events of a trace with at least one span; times count from its first.

    Args:
        trace: what was recorded.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._causes = Causes(trace)
        self._begin_ns = trace.begin_ns
        self._pids = {track.stage: pid for pid, track in enumerate(trace.tracks, start=1)}

    def __iter__(self) -> Iterator[Event]:
        for track in self._trace.tracks:
            yield from self._process(track)
            yield from self._spans(track)
            yield from self._idle(track)
            yield from self._transfers(track)
        ids = count(1)
        for track in self._trace.tracks:
            yield from self._arrows(track, ids)

    def _process(self, track: Track) -> Iterator[Event]:
        pid = self._pids[track.stage]
        yield self._metadata(track.stage, "process_name", name=f"{track.stage} on {track.host}")
        yield self._metadata(track.stage, "process_sort_index", sort_index=pid)
        yield self._metadata(track.stage, "thread_name", name="compute")

    def _spans(self, track: Track) -> Iterator[Event]:
        for span in track.spans:
            waited = microseconds(span.start_ns - span.ready_ns)
            args = {"step": span.step, "microbatch": span.microbatch, "waited_us": waited}
            times = (span.start_ns, span.end_ns)
            yield self._slice(track.stage, COMPUTE, span.label, category(span.kind), times, args)

    def _idle(self, track: Track) -> Iterator[Event]:
        whole = (self._begin_ns, self._trace.end_ns)
        for loss, *times in idle(track, self._causes, *whole):
            yield self._slice(track.stage, COMPUTE, loss.value, "idle", times, {})

    def _transfers(self, track: Track) -> Iterator[Event]:
        """From the end of the span that sends to the arrival of all that the reader needs."""
        found = sorted(
            (sender.end_ns, max(sender.end_ns, span.ready_ns), name, span)
            for span in track.spans
            for name, sender, _ in self._causes.senders(track.stage, span)
        )
        lanes = _lanes((start_ns, end_ns) for start_ns, end_ns, _, _ in found)
        most = COMPUTE
        for lane, (*times, name, span) in zip(lanes, found, strict=True):
            if lane > most:
                most = lane
                yield self._metadata(track.stage, "thread_name", lane, name=f"transfer {lane}")
            args = {"step": span.step, "microbatch": span.microbatch}
            label = f"{span.label} from {name}"
            yield self._slice(track.stage, lane, label, "transfer", times, args)

    def _arrows(self, track: Track, ids: Iterator[int]) -> Iterator[Event]:
        """Both ends strictly inside their slices, where these last longer than a nanosecond."""
        for span in track.spans:
            for name, sender, _ in self._causes.senders(track.stage, span):
                to_ns = min(span.start_ns + 1, span.end_ns)
                from_ns = max(sender.start_ns, min(sender.end_ns - 1, to_ns))
                arrow = {"cat": "arrow", "name": ARROWS[span.kind], "id": next(ids)}
                yield {"ph": "s", **arrow, **self._place(name, from_ns)}
                yield {"ph": "f", "bp": "e", **arrow, **self._place(track.stage, to_ns)}

    def _slice(
        self,
        stage: str,
        lane: int,
        name: str,
        category: str,
        times: Iterable[int],
        args: Event,
    ) -> Event:
        start_ns, end_ns = times
        event = {"ph": "X", "name": name, "cat": category, **self._place(stage, start_ns, lane)}
        return {**event, "dur": microseconds(end_ns - start_ns), "args": args}

    def _metadata(self, stage: str, kind: str, lane: int = COMPUTE, **args: Any) -> Event:
        return {"ph": "M", "name": kind, **self._thread(stage, lane), "args": args}

    def _place(self, stage: str, ns: int, lane: int = COMPUTE) -> Event:
        return {**self._thread(stage, lane), "ts": microseconds(ns - self._begin_ns)}

    def _thread(self, stage: str, lane: int) -> Event:
        """Thread ids are unique in the whole file: some readers look names up by them alone."""
        pid = self._pids[stage]
        return {"pid": pid, "tid": pid + lane * len(self._pids)}


def _lanes(intervals: Iterable[tuple[int, int]]) -> Iterator[int]:
    """A lane, from 1 on, for each interval; those of one lane do not overlap.

    Args:
        intervals: (start, end) in order of start.
    """
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    unused = count(1)
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        lane = heappop(free) if free else next(unused)
        heappush(busy, (end, lane))
        yield lane
