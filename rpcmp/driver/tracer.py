"""Collects what all stages record, with their clocks, into one trace."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from rpcmp.config import Config
from rpcmp.driver.group import Group
from rpcmp.members import Member
from rpcmp.trace import chrome, clock
from rpcmp.trace.clock import Estimate, Ping
from rpcmp.trace.spans import Span, Trace, Track, producers

PINGS = 20
"""Questions for each stage's clock; the one with the shortest way counts."""

STEPS_BETWEEN = 50
"""Steps after which the spans are fetched, so that no worker piles up a run's."""


class Tracer:
    """Traces from its making until `write`.

    Args:
        config: the job.
        group: its stages, between two steps.
    """

    def __init__(self, config: Config, group: Group) -> None:
        self._graph = config.graph()
        rows = {stage: row for row, stage in enumerate(self._graph.stages)}
        self._workers = sorted(config.workers, key=lambda worker: rows[worker.stage])
        self._group = group
        self._spans: defaultdict[str, list[Span]] = defaultdict(list)
        self._before = self._ask_clocks()
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
        after = self._ask_clocks()
        tracks = tuple(
            Track(
                label,
                self._hosts[label],
                tuple(self._spans[label]),
                clock.between(self._before[label], after[label]),
            )
            for label in (worker.label for worker in self._workers)
        )
        chrome.write(Trace(tracks, self._producers()), path)

    def _producers(self) -> dict[str, tuple[str, ...]]:
        """See Trace; of a stage with replicas each may be the one that is read."""
        read = producers(self._graph)
        return {
            worker.label: tuple(
                other.label
                for stage in read[worker.stage]
                for other in self._workers
                if other.stage == stage
            )
            for worker in self._workers
        }

    def _fetch(self) -> None:
        for stage, spans in self._group.take_spans().items():
            self._spans[stage] += spans

    def _ask_clocks(self) -> dict[str, Estimate]:
        return {
            worker.label: clock.estimate(self._ping(worker) for _ in range(PINGS))
            for worker in self._workers
        }

    def _ping(self, worker: Member) -> Ping:
        sent = time.perf_counter_ns()
        remote = self._group.clock(worker)
        return Ping(sent, remote, time.perf_counter_ns())
