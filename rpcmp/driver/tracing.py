"""The workers of a job in the order of a trace, and what their clocks say.

Shows what a step looks like at this moment, now and then, while the run goes on.

The stages keep what they did in their last steps; now and then they are asked for it. Nobody waits
for the answers but a thread of their own: the next step is not held up by it.

Collects what all stages record, with their clocks, into one trace.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rpcmp.config.schema import Config
from rpcmp.config.topology import Member
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import RpcmpError, one_line
from rpcmp.observability.events.definitions import WarningEvent
from rpcmp.observability.events.event import Event
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
from rpcmp.worker.executor import AT_ONCE, STEPS_KEPT

PINGS = 20
"""Questions for each stage's clock; the one with the shortest way counts."""


class ClockSync:
    """Asks for the clocks of all workers.

    Args:
        config: the job.
        group: its stages.

    Attributes:
        labels: of the workers, in the graph's order.
        producers: see Trace; of a stage with replicas each may be the one that is
            read.
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
        """How far each worker's clock is from the driver's, by its label."""
        return {
            worker.label: estimate(self._ping(worker) for _ in range(PINGS))
            for worker in self._workers
        }

    def _ping(self, worker: Member) -> Ping:
        sent = time.perf_counter_ns()
        remote = self._group.clock(worker)
        return Ping(sent, remote, time.perf_counter_ns())


SHARE = 0.01
"""The most that showing them takes of one processor, however many spans a step has."""

CLOCK_SECONDS = 60.0
"""After which the clocks are asked anew: they drift apart by some microseconds a second."""


class StepSampler:
    """Follows a run from its making until `close`.

    Args:
        config: the job.
        group: its stages, between two steps.
        report: told of the event `timeline`, on another thread.
        seconds: between two steps that are shown, at least.
    """

    def __init__(
        self,
        config: Config,
        group: StageGroup,
        report: Callable[[Event], None],
        seconds: float,
    ) -> None:
        self._group, self._report = group, report
        self._seconds = seconds
        self._clocks = ClockSync(config, group)
        self._estimates = self._ask_clocks()
        self._hosts = group.follow()
        self._first: int | None = None
        self._last: int | None = None
        self._due = 0.0
        self._showing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "rpcmp-follower")

    def after_step(self, step: int) -> None:
        """Show the step before this one, whose last spans all stages have done, where it is due."""
        self._first, self._last = self._first or step, step
        is_free = self._showing is None or self._showing.done()
        if step == self._first or not is_free or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._seconds
        self._showing = self._thread.submit(self._show, self._group.ask_recent(step, 3), step - 1)

    def close(self) -> None:
        """Wait until what was asked for has been shown."""
        self._thread.shutdown()

    def write(self, path: Path) -> None:
        """Write a trace of the last steps, between two steps: whole or not at all.

        Where that cannot be done a warning says so: the run has come to its end, and its results
        matter more.
        """
        if self._last is None:
            return
        new = path.with_name(f"new-{path.name}")
        try:
            spans = self._group.ask_recent(self._last, STEPS_KEPT)()
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
            pass  # of a stage that is lost, its server will tell
        except Exception as error:  # it would be the same every time
            self._due = float("inf")
            self._warn("no timelines from here on", error)
        spent = time.thread_time() - spent
        self._due = max(self._due, time.monotonic() + spent / SHARE)

    def _warn(self, what: str, error: Exception) -> None:
        why = error if isinstance(error, RpcmpError) else one_line(error)
        self._report(WarningEvent(text=f"{what}: {why}"))

    def _trace(self, spans: dict[str, list[Span]]) -> Trace:
        tracks = (
            Track(
                label,
                self._hosts[label],
                tuple(spans[label]),
                Clock(self._estimates[label].offset_ns),
            )
            for label in self._clocks.labels
        )
        return Trace(tuple(tracks), self._clocks.producers)

    def _ask_clocks(self) -> dict[str, ClockEstimate]:
        self._clocks_due = time.monotonic() + CLOCK_SECONDS
        return self._clocks.ask()


STEPS_BETWEEN = 50
"""Steps after which the spans are fetched, so that no worker piles up a run's."""


class Tracer:
    """Traces from its making until `write`.

    Args:
        config: the job.
        group: its stages, between two steps.
    """

    def __init__(self, config: Config, group: StageGroup) -> None:
        self._group = group
        self._clocks = ClockSync(config, group)
        self._spans: defaultdict[str, list[Span]] = defaultdict(list)
        self._before = self._clocks.ask()
        self._hosts = group.trace(True)

    def after_step(self, step: int) -> None:
        """Fetch what has been recorded, now and then."""
        if step % STEPS_BETWEEN == 0:
            self._fetch()

    def write(self, path: Path) -> None:
        """Write the trace so far, and stop.

        Raises:
            ConfigError: the file cannot be written.
        """
        self._group.trace(False)
        self._fetch()
        after = self._clocks.ask()
        tracks = tuple(
            Track(
                label,
                self._hosts[label],
                tuple(self._spans[label]),
                between(self._before[label], after[label]),
            )
            for label in self._clocks.labels
        )
        chrome.write(Trace(tracks, self._clocks.producers), path)

    def _fetch(self) -> None:
        while True:
            found = self._group.take_spans()
            for stage, spans in found.items():
                self._spans[stage] += spans
            if max(map(len, found.values())) < AT_ONCE:
                return
