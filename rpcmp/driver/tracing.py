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

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import RpcmpError, one_line
from rpcmp.observability.events import Event, WarningEvent
from rpcmp.observability.trace import chrome
from rpcmp.observability.trace.analysis import timeline
from rpcmp.observability.trace.spans import (
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
from rpcmp.worker.measurements import SPANS_PER_ANSWER
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


class ClockSync:
    """Estimates the clocks of all workers.

    Attributes:
        labels: of the workers, in the graph's order.
        producers: see Trace; of a stage with replicas, all that the worker may read.
    """

    def __init__(self, config: Config, group: StageGroup) -> None:
        self._group = group
        graph = config.graph()
        rows = {stage: row for row, stage in enumerate(graph.stages)}
        self._workers = sorted(config.workers, key=lambda worker: rows[worker.stage])
        self.labels = [worker.label for worker in self._workers]
        read = producers(graph)
        self.producers = {
            worker.label: tuple(
                other.label
                for stage in read[worker.stage]
                for other in self._workers
                if other.stage == stage
            )
            for worker in self._workers
        }

    def ask(self) -> dict[str, ClockEstimate]:
        """Return the offset of each worker's clock from the driver's, by label."""
        return {
            worker.label: estimate(self._ping(worker) for _ in range(PINGS))
            for worker in self._workers
        }

    def _ping(self, worker: Member) -> Ping:
        sent = time.perf_counter_ns()
        remote = self._group.clock(worker)
        return Ping(sent, remote, time.perf_counter_ns())


class SpanReader:
    """Reads the spans of all workers.

    Args:
        steps: how many steps the workers keep.

    Attributes:
        hosts: names of the workers' hosts, by label.
    """

    def __init__(self, group: StageGroup, steps: int) -> None:
        self._group = group
        recording = group.everywhere(Stage.record_spans, steps)
        self.hosts = {label: host for label, (host, _) in recording.items()}
        self._start = {label: cursor for label, (_, cursor) in recording.items()}
        self._cursors = self._start

    def read_new(self) -> dict[str, list[Span]]:
        """Return the spans since the last call, or since this reader was made; blocks."""
        self._cursors, spans = self._read(self._request(self._cursors))
        return spans

    def request(self, first_step: int, last_step: int) -> Callable[[], dict[str, list[Span]]]:
        """Request the spans of these steps, as far as they are kept.

        Returns:
            A function that waits for them.
        """
        answers = self._request(self._start, first_step, last_step)
        return lambda: self._read(answers, first_step, last_step)[1]

    def _request(
        self, cursors: Mapping[str, int], first_step: int = 0, last_step: int = sys.maxsize
    ) -> Callable[[], dict[str, tuple[int, list[Span]]]]:
        return self._group.request_spans(cursors, first_step, last_step)

    def _read(
        self,
        answers: Callable[[], dict[str, tuple[int, list[Span]]]],
        first_step: int = 0,
        last_step: int = sys.maxsize,
    ) -> tuple[dict[str, int], dict[str, list[Span]]]:
        """Wait for `answers` and request more of them until there are none."""
        spans: defaultdict[str, list[Span]] = defaultdict(list)
        while True:
            newest = answers()
            cursors = {label: cursor for label, (cursor, _) in newest.items()}
            for label, (_, found) in newest.items():
                spans[label] += found
            if all(len(found) < SPANS_PER_ANSWER for _, found in newest.values()):
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
        self._clocks = ClockSync(config, group)
        self._estimates = self._ask_clocks()
        self._spans = SpanReader(group, STEPS_SAMPLED)
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
        spans = self._spans.request(step - 2, step)
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
            spans = self._spans.request(self._last - STEPS_SAMPLED + 1, self._last)()
            self._estimates = self._ask_clocks()
            chrome.write(self._trace(spans), new)
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
                self._estimates = self._ask_clocks()
            event = timeline(self._trace(spans), step)
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

    def _trace(self, spans: dict[str, list[Span]]) -> Trace:
        tracks = (
            Track(
                label,
                self._spans.hosts[label],
                tuple(spans[label]),
                Clock(self._estimates[label].offset_ns),
            )
            for label in self._clocks.labels
        )
        return Trace(tuple(tracks), self._clocks.producers)

    def _ask_clocks(self) -> dict[str, ClockEstimate]:
        self._clocks_due = time.monotonic() + CLOCK_SECONDS
        return self._clocks.ask()


class Tracer:
    """Traces a run from its construction until `write`.

    Args:
        group: the stages, between two steps.
    """

    def __init__(self, config: Config, group: StageGroup) -> None:
        self._clocks = ClockSync(config, group)
        self._before = self._clocks.ask()
        self._reader = SpanReader(group, STEPS_TRACED)
        self._spans: defaultdict[str, list[Span]] = defaultdict(list)

    def after_step(self, step: int) -> None:
        """Read the spans, now and then."""
        if step % STEPS_BETWEEN == 0:
            self._read()

    def write(self, path: Path) -> None:
        """Write the trace of all steps so far.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._read()
        after = self._clocks.ask()
        tracks = tuple(
            Track(
                label,
                self._reader.hosts[label],
                tuple(self._spans[label]),
                between(self._before[label], after[label]),
            )
            for label in self._clocks.labels
        )
        chrome.write(Trace(tracks, self._clocks.producers), path)

    def _read(self) -> None:
        for label, spans in self._reader.read_new().items():
            self._spans[label] += spans
