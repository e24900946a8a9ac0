"""The metrics of a stage server and of its worker."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from rpcmp.observability.events import state_name
from rpcmp.observability.prometheus import Family, Store
from rpcmp.observability.run_metrics import KINDS
from rpcmp.v1 import control_pb2 as pb

if TYPE_CHECKING:
    from rpcmp.server.claim import Claim
    from rpcmp.server.stage_server import StageServer

log = logging.getLogger(__name__)

EVERY_SECONDS = 1.0
"""Seconds between two updates; a scrape gets the values of the last one."""

STATES = tuple(state_name(name) for name, number in pb.ServerState.items() if number)

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
    Family(
        "rpcmp_server_worker_device_memory_bytes",
        "gauge",
        "What torch has allocated on its worker's device, if that is an accelerator",
        ("stage", "device"),
    ),
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
"""All metrics of a stage server. `stage` is the label of its worker."""

_PRESENT = (
    "rpcmp_server_generation",
    "rpcmp_server_step",
    "rpcmp_server_worker_memory_bytes",
    "rpcmp_server_worker_device_memory_bytes",
    "rpcmp_server_worker_in_flight_microbatches",
    "rpcmp_server_link_round_trip_seconds",
)
"""Metrics of the present worker, which are cleared with it."""


class ServerMetrics:
    """Keeps the metrics of a stage server in `store`, updated on the server's event loop."""

    def __init__(self, server: StageServer) -> None:
        self.store = Store(FAMILIES)
        self._server = server
        self._claim: Claim | None = None
        self._job_id = ""
        self.store.set("rpcmp_server_jobs", 0)
        self.store.set("rpcmp_server_worker_restarts", 0)
        self._set_info(server.describe())

    async def run(self) -> None:
        """Update the metrics until the task is cancelled."""
        while True:
            try:
                self.update()
            except Exception:  # otherwise the last values would be scraped for ever
                log.exception("the figures of this second are missing")
            await asyncio.sleep(EVERY_SECONDS)

    def update(self) -> None:
        store, claim = self.store, self._server.claim
        description = self._server.describe()
        state = state_name(pb.ServerState.Name(description.state))
        for name in STATES:
            store.set("rpcmp_server_state", name == state, name)
        store.set("rpcmp_server_draining", description.draining)
        if claim is not self._claim:
            for name in _PRESENT:
                store.clear(name)
        if claim is not None:
            self._count_claim(claim)
            store.set("rpcmp_server_generation", claim.generation)
            if claim.stage_name:
                self._update_worker(claim)
        self._claim = claim

    def _set_info(self, server: pb.DescribeResponse) -> None:
        index = "" if server.spare else str(server.stage_index)
        software = (server.versions.rpcmp, server.versions.torch, server.versions.python)
        self.store.set("rpcmp_server", 1, index, str(server.replica), *software, server.machine)

    def _count_claim(self, claim: Claim) -> None:
        """Count a new claim: it belongs to another job, or to the same job's next generation."""
        if claim is self._claim:
            return
        is_next = claim.job_id == self._job_id
        self.store.add("rpcmp_server_worker_restarts" if is_next else "rpcmp_server_jobs", 1)
        self._job_id = claim.job_id

    def _update_worker(self, claim: Claim) -> None:
        store, stage, vitals = self.store, claim.stage_name, claim.vitals()
        store.set("rpcmp_server_step", claim.step, stage)
        store.set("rpcmp_server_worker_memory_bytes", vitals.memory, stage)
        store.set("rpcmp_server_worker_in_flight_microbatches", vitals.in_flight, stage)
        if vitals.device not in ("", "cpu"):
            name = "rpcmp_server_worker_device_memory_bytes"
            store.set(name, vitals.device_memory, stage, vitals.device)
        source = (claim.job_id, claim.generation)
        sent = sum(way.sent for way in vitals.ways)
        received = sum(way.received for way in vitals.ways)
        store.count("rpcmp_server_worker_cpu_seconds", source, vitals.cpu_seconds, stage)
        store.count("rpcmp_server_sent_bytes", source, sent, stage)
        store.count("rpcmp_server_received_bytes", source, received, stage)
        for kind, seconds in claim.worker_vitals.busy_seconds.items():
            store.count("rpcmp_server_worker_busy_seconds", source, seconds, stage, KINDS[kind])
        store.clear("rpcmp_server_link_round_trip_seconds")
        for peer, seconds in claim.relay.round_trips.items():
            server = claim.servers.get(peer, peer)
            store.set("rpcmp_server_link_round_trip_seconds", seconds, stage, server)
