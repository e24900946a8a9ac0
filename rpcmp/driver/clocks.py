"""The workers of a job in the order of a trace, and what their clocks say."""

from __future__ import annotations

import time

from rpcmp.config import Config
from rpcmp.driver.group import Group
from rpcmp.members import Member
from rpcmp.trace import clock
from rpcmp.trace.clock import Estimate, Ping
from rpcmp.trace.spans import producers

PINGS = 20
"""Questions for each stage's clock; the one with the shortest way counts."""


class Clocks:
    """Asks for the clocks of all workers.

    Args:
        config: the job.
        group: its stages.

    Attributes:
        labels: of the workers, in the graph's order.
        producers: see rpcmp.trace.spans.Trace; of a stage with replicas each may be the one that is
            read.
    """

    def __init__(self, config: Config, group: Group) -> None:
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

    def ask(self) -> dict[str, Estimate]:
        """How far each worker's clock is from the driver's, by its label."""
        return {
            worker.label: clock.estimate(self._ping(worker) for _ in range(PINGS))
            for worker in self._workers
        }

    def _ping(self, worker: Member) -> Ping:
        sent = time.perf_counter_ns()
        remote = self._group.clock(worker)
        return Ping(sent, remote, time.perf_counter_ns())
