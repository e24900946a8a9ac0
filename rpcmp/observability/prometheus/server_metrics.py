"""The figures of a stage server: what it does, and how its worker is."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from rpcmp.observability.prometheus.registry import Family, Store, Tally
from rpcmp.observability.prometheus.run import KINDS
from rpcmp.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rpcmp.server.claim import Claim
    from rpcmp.server.stage_server import StageServer

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
"""Between two looks at the server; a scrape finds what the last one saw."""

STATES = ("idle", "claimed", "building", "running", "ended", "profiling")

STAGE = ("stage",)

FAMILIES = [
    Family(
        "rpcmp_server",
        "info",
        "What serves; the stage's index is empty for a spare",
        ("stage_index", "replica", "rpcmp", "torch", "python", "machine"),
    ),
    Family("rpcmp_server_state", "gauge", "1 for the state that the server is in", ("state",)),
    Family("rpcmp_server_draining", "gauge", "1 where it takes no new job"),
    Family("rpcmp_server_jobs", "counter", "Jobs that have claimed the server"),
    Family("rpcmp_server_worker_restarts", "counter", "Workers started anew for the same job"),
    Family("rpcmp_server_generation", "gauge", "Of the group that its worker is of"),
    Family("rpcmp_server_step", "gauge", "The last optimizer step that its worker began", STAGE),
    Family("rpcmp_server_worker_memory_bytes", "gauge", "Resident memory of its worker", STAGE),
    Family("rpcmp_server_worker_cpu_seconds", "counter", "CPU time of its workers", STAGE),
    Family(
        "rpcmp_server_worker_busy_seconds",
        "counter",
        "Time that its workers have computed: forward, backward, weight (gradients), optimizer",
        ("stage", "kind"),
    ),
    Family(
        "rpcmp_server_worker_in_flight_microbatches",
        "gauge",
        "Micro-batches whose activations its worker keeps for their backward",
        STAGE,
    ),
    Family(
        "rpcmp_server_sent_bytes",
        "counter",
        "Sent by its workers over TCP; tensors on one machine go through memory",
        STAGE,
    ),
    Family("rpcmp_server_received_bytes", "counter", "Received by them, likewise", STAGE),
    Family(
        "rpcmp_server_link_round_trip_seconds",
        "gauge",
        "To another host and back, while its worker has a connection there that is carried",
        ("stage", "peer"),
    ),
]
"""All that a stage server can serve. `stage` is the label of its worker."""

_PRESENT = (
    "rpcmp_server_generation",
    "rpcmp_server_step",
    "rpcmp_server_worker_memory_bytes",
    "rpcmp_server_worker_in_flight_microbatches",
    "rpcmp_server_link_round_trip_seconds",
)
"""What is of the present worker alone."""


class ServerMetrics:
    """Looks at a stage server now and then, on its event loop.

    Args:
        server: which.

    Attributes:
        store: what was seen.
    """

    def __init__(self, server: StageServer) -> None:
        self.store = Store(FAMILIES)
        self._server = server
        self._tally = Tally()
        self._claim: Claim | None = None
        self._job_id = ""
        self.store.set("rpcmp_server_jobs", 0)
        self.store.set("rpcmp_server_worker_restarts", 0)
        self._introduce(server.describe())

    async def run(self) -> None:
        """Look for ever."""
        while True:
            try:
                self.look()
            except Exception:  # else the last figures would be scraped for ever
                log.exception("the figures of this second are missing")
            await asyncio.sleep(EVERY_SECONDS)

    def look(self) -> None:
        """Take in what the server is now."""
        seen = self._server.describe()
        state = pb.ServerState.Name(seen.state).removeprefix("SERVER_STATE_").lower()
        for each in STATES:
            self.store.set("rpcmp_server_state", each == state, each)
        self.store.set("rpcmp_server_draining", seen.draining)
        claim = self._server.claim
        if claim is not self._claim:
            for name in _PRESENT:
                self.store.forget(name)
        if claim is not None:
            self._count(claim)
            self.store.set("rpcmp_server_generation", claim.generation)
            if claim.stage_name:
                self._look_at(claim)
        self._claim = claim

    def _introduce(self, seen: pb.DescribeResponse) -> None:
        index = "" if seen.spare else str(seen.stage_index)
        software = (seen.versions.rpcmp, seen.versions.torch, seen.versions.python)
        self.store.set("rpcmp_server", 1, index, str(seen.replica), *software, seen.machine)

    def _count(self, claim: Claim) -> None:
        """A claim is of another job, or of the same job's next generation."""
        if claim is self._claim:
            return
        is_next = claim.job_id == self._job_id
        self.store.add("rpcmp_server_worker_restarts" if is_next else "rpcmp_server_jobs", 1)
        self._job_id = claim.job_id

    def _look_at(self, claim: Claim) -> None:
        stage, vitals, source = claim.stage_name, claim.vitals(), (claim.job_id, claim.generation)
        self.store.set("rpcmp_server_step", claim.step, stage)
        self.store.set("rpcmp_server_worker_memory_bytes", vitals.memory, stage)
        self.store.set("rpcmp_server_worker_in_flight_microbatches", vitals.in_flight, stage)
        counts: dict[tuple[str, ...], float] = {
            ("rpcmp_server_worker_cpu_seconds", stage): vitals.cpu_seconds,
            ("rpcmp_server_sent_bytes", stage): sum(way.sent for way in vitals.ways),
            ("rpcmp_server_received_bytes", stage): sum(way.received for way in vitals.ways),
        }
        for kind, seconds in claim.busy_seconds.items():
            counts["rpcmp_server_worker_busy_seconds", stage, KINDS[kind]] = seconds
        for (name, *labels), count in counts.items():
            total = self._tally.total((name, *labels), source, count)
            self.store.set(name, total, *labels)
        self.store.forget("rpcmp_server_link_round_trip_seconds")
        for peer, seconds in claim.relay.round_trips.items():
            server = claim.servers.get(peer, peer)
            self.store.set("rpcmp_server_link_round_trip_seconds", seconds, stage, server)
