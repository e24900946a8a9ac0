"""Collects what all stages record, with their clocks, into one trace."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from rpcmp.config import Config
from rpcmp.driver.group import Group
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
                stage,
                self._hosts[stage],
                tuple(self._spans[stage]),
                clock.between(self._before[stage], after[stage]),
            )
            for stage in self._graph.stages
        )
        chrome.write(Trace(tracks, producers(self._graph)), path)

    def _fetch(self) -> None:
        for stage, spans in self._group.take_spans().items():
            self._spans[stage] += spans

    def _ask_clocks(self) -> dict[str, Estimate]:
        return {
            stage: clock.estimate(self._ping(stage) for _ in range(PINGS))
            for stage in self._graph.stages
        }

    def _ping(self, stage: str) -> Ping:
        sent = time.perf_counter_ns()
        remote = self._group.clock(stage)
        return Ping(sent, remote, time.perf_counter_ns())
