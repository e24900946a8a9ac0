"""Spans of all workers, with the offsets of their clocks: written as a trace, or shown live.

Every worker keeps the spans of its last steps in a ring buffer. `Tracer` reads all of them, every
STEPS_BETWEEN steps. `StepSampler` reads a few steps now and then, and waits for the answers on a
thread of its own, so that the next step is not delayed.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import RpcmpError, one_line
from rpcmp.observability.events import Event, WarningEvent
from rpcmp.observability.trace import chrome
from rpcmp.observability.trace.analysis import timeline
from rpcmp.observability.trace.spans import (
    SPANS_PER_ANSWER,
    Clock,
    ClockEstimate,
    Ping,
    Span,
    Trace,
    Track,
    between,
    estimate,
    producers,
)
from rpcmp.worker.stage import Stage

PINGS = 20
"""Requests for each worker's clock, of which the one with the shortest round trip counts."""

STEPS_SAMPLED = 24
"""Steps that workers keep for a StepSampler, besides the newest."""

STEPS_BETWEEN = 50
"""Steps after which a Tracer reads the spans, so that workers need not keep those of a run."""

STEPS_TRACED = 2 * STEPS_BETWEEN
"""Steps that workers keep for a Tracer, with a reserve for those that are in flight."""

MAX_LOAD = 0.01
"""The largest share of one processor for a StepSampler, however many spans a step has."""

CLOCK_SECONDS = 60.0
"""Seconds between two estimates of the clocks, which drift by some microseconds per second."""


class SpanReader:
    """Reads the clocks of all workers, and the spans that they keep of `steps`."""

    def __init__(self, config: Config, group: StageGroup, steps: int) -> None:
        self._refs = group.workers
        graph = config.graph()
        rows = {stage: row for row, stage in enumerate(graph.stages)}
        self._workers = sorted(config.workers, key=lambda worker: rows[worker.stage])
        read = producers(graph)
        self._producers = {
            worker.label: tuple(
                other.label
                for stage in read[worker.stage]
                for other in self._workers
                if other.stage == stage
            )
            for worker in self._workers
        }
        recording = self._refs.everywhere(Stage.record_spans, steps)
        self._hosts = {label: host for label, (host, _) in recording.items()}
        self._start = {label: cursor for label, (_, cursor) in recording.items()}
        self._cursors = self._start

    def estimate_clocks(self) -> dict[str, ClockEstimate]:
        """Return the offset of each worker's clock from the driver's, by label."""
        return {
            worker.label: estimate(self._ping(worker) for _ in range(PINGS))
            for worker in self._workers
        }

    def read_new(self) -> dict[str, list[Span]]:
        """Return the spans since the last call, or since this reader was made; blocks."""
        self._cursors, spans = self._read(self._request(self._cursors))
        return spans

    def request(self, first_step: int, last_step: int) -> Callable[[], dict[str, list[Span]]]:
        """Request the spans of these steps, if kept; return a function that waits for them."""
        answers = self._request(self._start, first_step, last_step)
        return lambda: self._read(answers, first_step, last_step)[1]

    def trace(self, spans: Mapping[str, list[Span]], clocks: Mapping[str, Clock]) -> Trace:
        tracks = tuple(
            Track(label, self._hosts[label], tuple(spans[label]), clocks[label])
            for label in self._producers
        )
        return Trace(tracks, self._producers)

    def _ping(self, worker: Member) -> Ping:
        sent = time.perf_counter_ns()
        remote = self._refs.rpc_sync(worker, Stage.clock)
        return Ping(sent, remote, time.perf_counter_ns())

    def _request(
        self, cursors: Mapping[str, int], first_step: int = 0, last_step: int = sys.maxsize
    ) -> Callable[[], dict[str, Any]]:
        """Request SPANS_PER_ANSWER spans at most of each worker, and its next cursor."""
        return self._refs.start(
            Stage.read_spans, lambda worker: (cursors[worker.label], first_step, last_step)
        )

    def _read(
        self,
        answers: Callable[[], dict[str, tuple[int, list[Span]]]],
        first_step: int = 0,
        last_step: int = sys.maxsize,
    ) -> tuple[dict[str, int], dict[str, list[Span]]]:
        """Wait for `answers`, and request more of them until a worker has no more."""
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        while True:
            newest = answers()
            cursors = {label: cursor for label, (cursor, _) in newest.items()}
            for label, (_, part) in newest.items():
                spans[label] += part
            if all(len(part) < SPANS_PER_ANSWER for _, part in newest.values()):
                return cursors, spans
            answers = self._request(cursors, first_step, last_step)


class StepSampler:
    """Reports a step's timeline now and then, from its construction until `close`.

    Args:
        group: the stages, between two steps.
        report: gets the event `timeline`, on another thread.
        seconds: at least, between two steps that are reported.
    """

    def __init__(
        self,
        config: Config,
        group: StageGroup,
        report: Callable[[Event], None],
        seconds: float,
    ) -> None:
        self._report = report
        self._seconds = seconds
        self._reader = SpanReader(config, group, STEPS_SAMPLED)
        self._clocks = self._read_clocks()
        self._first: int | None = None
        self._last: int | None = None
        self._due = 0.0
        self._showing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "rpcmp-follower")

    def after_step(self, step: int) -> None:
        """Report the step before this one, whose last spans all stages have, if it is due."""
        self._first, self._last = self._first or step, step
        is_free = self._showing is None or self._showing.done()
        if step == self._first or not is_free or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._seconds
        spans = self._reader.request(step - 2, step)
        self._showing = self._thread.submit(self._show, spans, step - 1)

    def close(self) -> None:
        self._thread.shutdown()

    def write(self, path: Path) -> None:
        """Write a trace of the last steps, between two steps: whole or not at all.

        A failure is only a warning: the run has come to its end, and its results matter more.
        """
        if self._last is None:
            return
        new = path.with_name(f"new-{path.name}")
        try:
            spans = self._reader.request(self._last - STEPS_SAMPLED + 1, self._last)()
            self._clocks = self._read_clocks()
            chrome.write(self._reader.trace(spans, self._clocks), new)
            new.replace(path)
        except Exception as error:
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            self._warn("no trace of the last steps", error)

    def _show(self, answers: Callable[[], dict[str, list[Span]]], step: int) -> None:
        spent = time.thread_time()
        try:
            spans = answers()
            if time.monotonic() >= self._clocks_due:
                self._clocks = self._read_clocks()
            event = timeline(self._reader.trace(spans, self._clocks), step)
            if event is not None:
                self._report(event)
        except RpcmpError:
            pass  # the server of a lost stage reports that
        except Exception as error:  # it would be the same every time
            self._due = float("inf")
            self._warn("no timelines from here on", error)
        spent = time.thread_time() - spent
        self._due = max(self._due, time.monotonic() + spent / MAX_LOAD)

    def _warn(self, what: str, error: Exception) -> None:
        why = error if isinstance(error, RpcmpError) else one_line(error)
        self._report(WarningEvent(text=f"{what}: {why}"))

    def _read_clocks(self) -> dict[str, Clock]:
        self._clocks_due = time.monotonic() + CLOCK_SECONDS
        estimates = self._reader.estimate_clocks()
        return {label: Clock(each.offset_ns) for label, each in estimates.items()}


class Tracer:
    """Traces a run from its construction, between two steps, until `write`."""

    def __init__(self, config: Config, group: StageGroup) -> None:
        self._reader = SpanReader(config, group, STEPS_TRACED)
        self._before = self._reader.estimate_clocks()
        self._spans: defaultdict[str, list[Span]] = defaultdict(list)

    def after_step(self, step: int) -> None:
        """Read the spans every STEPS_BETWEEN steps."""
        if step % STEPS_BETWEEN == 0:
            self._read()

    def write(self, path: Path) -> None:
        """Write the trace of all steps so far."""
        self._read()
        after = self._reader.estimate_clocks()
        clocks = {label: between(before, after[label]) for label, before in self._before.items()}
        chrome.write(self._reader.trace(self._spans, clocks), path)

    def _read(self) -> None:
        for label, spans in self._reader.read_new().items():
            self._spans[label] += spans
