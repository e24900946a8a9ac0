"""Collects what all stages record, with their clocks, into one trace."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from rpcmp.config import Config
from rpcmp.driver.clocks import Clocks
from rpcmp.driver.group import Group
from rpcmp.trace import chrome, clock
from rpcmp.trace.spans import Span, Trace, Track
from rpcmp.worker.recorder import AT_ONCE

STEPS_BETWEEN = 50
"""Steps after which the spans are fetched, so that no worker piles up a run's."""


class Tracer:
    """Traces from its making until `write`.

    Args:
        config: the job.
        group: its stages, between two steps.
    """

    def __init__(self, config: Config, group: Group) -> None:
        self._group = group
        self._clocks = Clocks(config, group)
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
                clock.between(self._before[label], after[label]),
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
