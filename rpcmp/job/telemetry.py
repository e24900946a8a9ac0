"""How all processes of a run are, over its generations: heard from the servers, told as an event.

Between two generations what was heard last stands, but for who was lost; so a page can show a stage
that is gone until it is back.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from rpcmp.config.topology import DRIVER, member_name
from rpcmp.observability.events.definitions import VitalsEvent
from rpcmp.observability.events.event import LinkTraffic, ProcessVitals
from rpcmp.process import liveness
from rpcmp.process.activity import Doing
from rpcmp.process.sockets import PeerTraffic
from rpcmp.v1 import control_pb2 as pb

VITALS_SECONDS = 1.0
"""Between two events."""

LOST = "lost"
"""The state of a process that a generation has ended with."""

_STATES = {
    pb.SERVER_STATE_CLAIMED: "claimed",
    pb.SERVER_STATE_BUILDING: "building",
    pb.SERVER_STATE_RUNNING: "running",
    pb.SERVER_STATE_ENDED: "ended",
}

SHORTEST_SECONDS = 0.1
"""Between two counts that a rate can be made of: they come every half second."""

Pair = tuple[str, str]
"""From whom, to whom; labels."""


class _Count(NamedTuple):
    """What one process has counted.

    Attributes:
        at: when.
        ways: what has gone so far, by peer.
        rates: bytes a second since the count before, sent and received, by peer.
    """

    at: float
    ways: list[PeerTraffic]
    rates: dict[str, tuple[float, float]]

    def next(self, at: float, ways: list[PeerTraffic]) -> _Count:
        """The count that follows this one."""
        seconds = at - self.at
        if seconds < SHORTEST_SECONDS:
            return self
        before = {way.peer: way for way in self.ways}
        rates = {
            way.peer: ((way.sent - last.sent) / seconds, (way.received - last.received) / seconds)
            for way in ways
            if (last := before.get(way.peer)) is not None
        }
        return _Count(at, ways, rates)


class Vitals:
    """What is known of every process of a run."""

    def __init__(self) -> None:
        self._workers: dict[str, ProcessVitals] = {}
        self._driver: ProcessVitals = {}
        self._restarts = -1
        self._listens: dict[str, str] = {}
        self._connections: dict[str, _Count] = {}
        self._tensors: dict[str, _Count] = {}
        self._heard = asyncio.Event()

    def begin(self) -> None:
        """Hear that the next group is being formed, of fresh processes."""
        self._restarts += 1
        self._driver = {}
        self._listens.clear()
        self._connections.clear()
        self._tensors.clear()

    def hear(self, label: str, change: pb.WatchResponse) -> None:
        """Take what a server says of its worker."""
        worker = self._workers.setdefault(label, {})
        worker["state"] = _STATES.get(change.state, "claimed")
        worker["restarts"] = self._restarts
        if change.listens:
            self._listens[change.listens] = label
        if change.HasField("vitals"):
            worker.update(_told(change.vitals))
            at = time.monotonic() - change.vitals.counted_s_ago
            _count(self._connections, label, at, map(_way, change.vitals.ways))
            _count(self._tensors, label, at, map(_way, change.vitals.tensors))
            self._heard.set()

    def hear_driver(
        self,
        pid: int,
        doing: Doing,
        ways: Iterable[Any],
        carried: Mapping[str, float],
        tensors: Iterable[Any],
    ) -> None:
        """Take a sign of life of the driver process.

        Args:
            pid, doing: its own.
            ways: see rpcmp.process.sockets.
            carried: seconds to other hosts and back, see rpcmp.net.relay.
            tensors: see rpcmp.rpc.transport.
        """
        at, found = time.monotonic(), [PeerTraffic(*way) for way in ways]
        found = [
            way._replace(round_trip_s=carried.get(way.peer, way.round_trip_s)) for way in found
        ]
        _count(self._connections, DRIVER, at, found)
        _count(self._tensors, DRIVER, at, map(PeerTraffic._make, tensors))
        self._driver = {
            "state": "running" if DRIVER in self._listens.values() else "building",
            "restarts": self._restarts,
            "host": platform.node(),
            "pid": pid,
            "phase": doing.phase,
            "microbatch": doing.microbatch,
            "seconds": doing.seconds,
            "memory": liveness.resident_bytes(pid),
            "cpu_seconds": liveness.cpu_seconds(pid),
            "in_flight": 0,
        }

    def joined(self, address: str) -> None:
        """Hear where the driver's agent listens."""
        self._listens[address] = DRIVER

    def lose(self, label: str) -> None:
        """Hear who a generation has ended with; empty: nobody knows.

        Of one that died before its first sign of life there is nothing to tell.
        """
        for known, process in [*self._workers.items(), (DRIVER, self._driver)]:
            if known == label and "pid" in process:
                process.update({"state": LOST, "memory": 0, "in_flight": 0, "pid": 0})

    async def wait(self) -> None:
        """Return when there is anything to tell."""
        await self._heard.wait()

    def event(self, step: int) -> VitalsEvent:
        """The event `vitals`.

        Args:
            step: the last that was reported.
        """
        workers = {label: process for label, process in self._workers.items() if "pid" in process}
        return VitalsEvent(
            step=step,
            workers={label: process.copy() for label, process in workers.items()},
            driver=self._driver.copy(),
            links=self._links(),
        )

    def _links(self) -> list[LinkTraffic]:
        """From member to member.

        What has gone over all connections that either of them has opened; or the tensors alone
        where they are more, since on one machine they take another way.
        """
        links = _links(self._connections, self._listens)
        for pair, of_tensors in _links(self._tensors, self._names()).items():
            link = links.setdefault(pair, of_tensors)
            link["bytes"] = max(link["bytes"], of_tensors["bytes"])
            link["bytes_per_s"] = max(link["bytes_per_s"], of_tensors["bytes_per_s"])
        return list(links.values())

    def _names(self) -> dict[str, str]:
        """The labels of all members, by label, name, and stage where it is the first replica."""
        return {
            name: label
            for label in self._listens.values()
            for name in (label, member_name(label), label.removesuffix(":0"))
        }


def _way(said: pb.Way) -> PeerTraffic:
    return PeerTraffic(said.peer, said.sent, said.received, said.round_trip_s)


def _count(counts: dict[str, _Count], label: str, at: float, ways: Iterable[PeerTraffic]) -> None:
    before, now = counts.get(label), list(ways)
    counts[label] = _Count(at, now, {}) if before is None else before.next(at, now)


def _links(counts: Mapping[str, _Count], labels: Mapping[str, str]) -> dict[Pair, LinkTraffic]:
    """Made of what each member has counted, by its label; `labels` says who a peer is."""
    links: dict[Pair, LinkTraffic] = {}
    for label, count in counts.items():
        for way in count.ways:
            if (peer := labels.get(way.peer)) is None:
                continue  # something of the user's own, or opened by another member
            there, back = count.rates.get(way.peer, (0.0, 0.0))
            _add(links, (label, peer), way.sent, there, way.round_trip_s)
            _add(links, (peer, label), way.received, back, way.round_trip_s)
    return links


def _add(
    links: dict[Pair, LinkTraffic], pair: Pair, sent: int, rate: float, seconds: float
) -> None:
    empty: LinkTraffic = {
        "from": pair[0],
        "to": pair[1],
        "bytes": 0,
        "bytes_per_s": 0.0,
        "rtt_s": 0.0,
    }
    link = links.setdefault(pair, empty)
    link["bytes"] += sent
    link["bytes_per_s"] += rate
    known = [each for each in (link["rtt_s"], seconds) if each]
    link["rtt_s"] = min(known, default=0.0)


def _told(vitals: pb.Vitals) -> ProcessVitals:
    return {
        "host": vitals.host,
        "pid": vitals.pid,
        "phase": vitals.doing.phase,
        "microbatch": vitals.doing.microbatch,
        "seconds": vitals.doing.seconds,
        "memory": vitals.memory,
        "cpu_seconds": vitals.cpu_seconds,
        "in_flight": vitals.in_flight,
    }
