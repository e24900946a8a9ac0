"""Vitals of a run's processes, as the stage servers and the driver report them.

They outlive a generation: until the next one reports, the last values stand, except for the
process that was lost. So the page can show a lost stage until it is back.
"""

from __future__ import annotations

import asyncio
import math
import platform
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from rpcmp.config.topology import DRIVER, member_name
from rpcmp.observability.events import (
    LOST,
    WORKER_STATES,
    LinkTraffic,
    ProcessVitals,
    VitalsEvent,
    state_name,
)
from rpcmp.process.activity import Doing, cpu_seconds, resident_bytes
from rpcmp.process.sockets import PeerTraffic
from rpcmp.v1 import control_pb2 as pb

VITALS_SECONDS = 1.0
"""Between two events `vitals`."""

_STATES = {number: state_name(name) for name, number in pb.ServerState.items()}

MIN_RATE_SECONDS = 0.25
"""The shortest time between two counts that gives a rate. They come every half second at most: one
that seems to come sooner is the one before, repeated on its way."""

Link = tuple[str, str]
"""Labels of the sender and the receiver."""


class _TrafficCount(NamedTuple):
    """The traffic that one process has counted at a time, with all its peers.

    Attributes:
        rates: bytes per second since the count before, sent and received, by peer.
    """

    at: float
    traffic: list[PeerTraffic]
    rates: dict[str, tuple[float, float]]


class Vitals:
    """The state of every process of a run."""

    def __init__(self) -> None:
        self._workers: dict[str, ProcessVitals] = {}
        self._driver: ProcessVitals = {}
        self._restarts = -1
        self._agent_addresses: dict[str, str] = {}
        self._connections: dict[str, _TrafficCount] = {}
        self._tensors: dict[str, _TrafficCount] = {}
        self._is_known = asyncio.Event()

    def start_generation(self) -> None:
        """Forget what belongs to the processes of the generation before."""
        self._restarts += 1
        self._driver = {}
        self._agent_addresses.clear()
        self._connections.clear()
        self._tensors.clear()

    def keep(self, labels: Collection[str]) -> None:
        """Forget the workers with other labels: their hosts have left."""
        self._workers = {label: each for label, each in self._workers.items() if label in labels}

    def update_worker(self, label: str, change: pb.WatchResponse) -> None:
        """Record what a stage server reports of its worker."""
        worker = self._workers.setdefault(label, {})
        state = _STATES.get(change.state, "")
        worker["state"] = state if state in WORKER_STATES else "claimed"
        worker["restarts"] = self._restarts
        if change.listens:
            self._agent_addresses[change.listens] = label
        if change.HasField("vitals"):
            worker.update(_from_proto(change.vitals))
            at = time.monotonic() - change.vitals.counted_s_ago
            _count(self._connections, label, at, map(_traffic, change.vitals.ways))
            _count(self._tensors, label, at, map(_traffic, change.vitals.tensors))
            self._is_known.set()

    def update_driver(
        self,
        pid: int,
        doing: Doing,
        round_trips: Mapping[str, float],
        counts: tuple[Iterable[Any], Iterable[Any]] | None,
    ) -> None:
        """Record a heartbeat of the driver process.

        Args:
            doing: its current action.
            round_trips: seconds to the peers on other hosts; see rpcmp.net.relay.
            counts: its TCP and its tensor traffic, see rpcmp.process.sockets and
                rpcmp.rpc.transport; None: not counted since the last time.
        """
        if counts is not None:
            connections, tensors = (map(PeerTraffic._make, each) for each in counts)
            counted = [
                peer._replace(round_trip_s=round_trips.get(peer.peer, peer.round_trip_s))
                for peer in connections
            ]
            at = time.monotonic()
            _count(self._connections, DRIVER, at, counted)
            _count(self._tensors, DRIVER, at, tensors)
        self._driver = {
            "state": "running" if DRIVER in self._agent_addresses.values() else "building",
            "restarts": self._restarts,
            "host": platform.node(),
            "pid": pid,
            "phase": doing.phase,
            "microbatch": doing.microbatch,
            "seconds": doing.seconds,
            "memory": resident_bytes(pid),
            "cpu_seconds": cpu_seconds(pid),
            "in_flight": 0,
        }

    def add_driver_address(self, address: str) -> None:
        self._agent_addresses[address] = DRIVER

    def mark_lost(self, label: str) -> None:
        """Mark the process whose fault ended a generation, if it has reported anything before."""
        process = self._driver if label == DRIVER else self._workers.get(label, {})
        if "pid" in process:
            process.update(
                {"state": LOST, "memory": 0, "device_memory": 0, "in_flight": 0, "pid": 0}
            )

    async def wait(self) -> None:
        """Return when there is something to report."""
        await self._is_known.wait()

    def event(self, step: int) -> VitalsEvent:
        """Return the event `vitals` after `step`, the last one that was reported."""
        workers = self._workers.items()
        return VitalsEvent(
            step=step,
            workers={label: worker.copy() for label, worker in workers if "pid" in worker},
            driver=self._driver.copy(),
            links=self._links(),
        )

    def _links(self) -> list[LinkTraffic]:
        """Return the traffic between all members.

        It is what all connections that either of them opened have carried, or the tensors alone if
        those are more: on one machine tensors take another way.
        """
        links = _links(self._connections, self._agent_addresses)
        for pair, of_tensors in _links(self._tensors, self._labels_by_name()).items():
            link = links.setdefault(pair, of_tensors)
            link["bytes"] = max(link["bytes"], of_tensors["bytes"])
            link["bytes_per_s"] = max(link["bytes_per_s"], of_tensors["bytes_per_s"])
        return list(links.values())

    def _labels_by_name(self) -> dict[str, str]:
        """Map all names of each member to its label; replica 0 also has its stage's name."""
        return {
            name: label
            for label in self._agent_addresses.values()
            for name in (label, member_name(label), label.removesuffix(":0"))
        }


def _traffic(way: pb.Way) -> PeerTraffic:
    return PeerTraffic(way.peer, way.sent, way.received, way.round_trip_s)


def _count(
    counts: dict[str, _TrafficCount], label: str, at: float, traffic: Iterable[PeerTraffic]
) -> None:
    before = counts.get(label, _TrafficCount(-math.inf, [], {}))
    seconds = at - before.at
    if seconds < MIN_RATE_SECONDS:
        return
    now, last = list(traffic), {peer.peer: peer for peer in before.traffic}
    rates = {
        peer: ((sent - last[peer].sent) / seconds, (received - last[peer].received) / seconds)
        for peer, sent, received, *_ in now
        if peer in last
    }
    counts[label] = _TrafficCount(at, now, rates)


def _links(
    counts: Mapping[str, _TrafficCount], labels: Mapping[str, str]
) -> dict[Link, LinkTraffic]:
    """Add up what all members have counted; `labels` maps their peers to members."""
    links: dict[Link, LinkTraffic] = {}

    def add(sender: str, receiver: str, sent: int, rate: float, round_trip_s: float) -> None:
        empty: LinkTraffic = {
            "from": sender,
            "to": receiver,
            "bytes": 0,
            "bytes_per_s": 0.0,
            "rtt_s": 0.0,
        }
        link = links.setdefault((sender, receiver), empty)
        link["bytes"] += sent
        link["bytes_per_s"] += rate
        link["rtt_s"] = min(filter(None, (link["rtt_s"], round_trip_s)), default=0.0)

    for label, count in counts.items():
        for way in count.traffic:
            if (peer := labels.get(way.peer)) is None:
                continue  # something of the user's own, or opened by another member
            there, back = count.rates.get(way.peer, (0.0, 0.0))
            add(label, peer, way.sent, there, way.round_trip_s)
            add(peer, label, way.received, back, way.round_trip_s)
    return links


def _from_proto(vitals: pb.Vitals) -> ProcessVitals:
    return {
        "host": vitals.host,
        "pid": vitals.pid,
        "phase": vitals.doing.phase,
        "microbatch": vitals.doing.microbatch,
        "seconds": vitals.doing.seconds,
        "memory": vitals.memory,
        "cpu_seconds": vitals.cpu_seconds,
        "in_flight": vitals.in_flight,
        "device": vitals.device,
        "device_memory": vitals.device_memory,
    }
