"""How all processes of a run are, over its generations: heard from the servers, told as an event.

Between two generations what was heard last stands, but for who was lost; so a page can show a stage
that is gone until it is back.
"""

from __future__ import annotations

import asyncio
import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from rpcmp.members import DRIVER
from rpcmp.process import usage
from rpcmp.process.activity import Doing
from rpcmp.process.channel import Message
from rpcmp.process.traffic import Way
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

Pair = tuple[str, str]
"""From whom, to whom; labels."""


class Vitals:
    """What is known of every process of a run."""

    def __init__(self) -> None:
        self._workers: dict[str, Message] = {}
        self._driver: Message = {}
        self._restarts = -1
        self._listens: dict[str, str] = {}
        self._ways: dict[str, list[Way]] = {}
        self._before: dict[Pair, int] = {}
        self._told_at = time.monotonic()
        self._heard = asyncio.Event()

    def begin(self) -> None:
        """Hear that the next group is being formed, of fresh processes."""
        self._restarts += 1
        self._driver = {}
        for known in (self._listens, self._ways, self._before):
            known.clear()

    def hear(self, label: str, change: pb.WatchResponse) -> None:
        """Take what a server says of its worker."""
        worker = self._workers.setdefault(label, {})
        worker["state"] = _STATES.get(change.state, "claimed")
        worker["restarts"] = self._restarts
        if change.listens:
            self._listens[change.listens] = label
        if change.HasField("vitals"):
            worker.update(_told(change.vitals))
            self._ways[label] = [
                Way(way.peer, way.sent, way.received, way.round_trip_s)
                for way in change.vitals.ways
            ]
            self._heard.set()

    def hear_driver(
        self, pid: int, doing: Doing, ways: Iterable[Any], carried: Mapping[str, float]
    ) -> None:
        """Take a sign of life of the driver process.

        Args:
            pid, doing: its own.
            ways: see rpcmp.process.traffic.
            carried: seconds to other hosts and back, see rpcmp.wire.relay.
        """
        found = [Way(*way) for way in ways]
        self._ways[DRIVER] = [
            way._replace(round_trip_s=carried.get(way.peer, way.round_trip_s)) for way in found
        ]
        self._driver = {
            "state": "running" if DRIVER in self._listens.values() else "building",
            "restarts": self._restarts,
            "host": platform.node(),
            "pid": pid,
            "phase": doing.phase,
            "microbatch": doing.microbatch,
            "seconds": doing.seconds,
            "memory": usage.resident_bytes(pid),
            "cpu_seconds": usage.cpu_seconds(pid),
            "in_flight": 0,
        }

    def joined(self, address: str) -> None:
        """Hear where the driver's agent listens."""
        self._listens[address] = DRIVER

    def lose(self, label: str) -> None:
        """Hear who a generation has ended with; empty: nobody knows."""
        for known, process in [*self._workers.items(), (DRIVER, self._driver)]:
            if known == label:
                process.update(state=LOST, memory=0, in_flight=0, pid=0)

    async def wait(self) -> None:
        """Return when there is anything to tell."""
        await self._heard.wait()

    def event(self, step: int) -> Message:
        """The event `vitals`.

        Args:
            step: the last that was reported.
        """
        return {
            "event": "vitals",
            "step": step,
            "workers": {label: dict(of) for label, of in self._workers.items() if "pid" in of},
            "driver": dict(self._driver),
            "links": self._links(),
        }

    def _links(self) -> list[Message]:
        now = time.monotonic()
        seconds, self._told_at = now - self._told_at, now
        sent, fastest = self._sums()
        links = [
            {
                "from": pair[0],
                "to": pair[1],
                "bytes": count,
                "bytes_per_s": max(0, count - self._before.get(pair, 0)) / max(seconds, 1e-3),
                "rtt_s": fastest.get(pair, 0.0),
            }
            for pair, count in sent.items()
        ]
        self._before = dict(sent)
        return links

    def _sums(self) -> tuple[dict[Pair, int], dict[Pair, float]]:
        """Bytes from member to member, and seconds there and back, over all connections."""
        sent: defaultdict[Pair, int] = defaultdict(int)
        fastest: dict[Pair, float] = {}
        for label, ways in self._ways.items():
            for way in ways:
                if (peer := self._listens.get(way.peer)) is None:
                    continue  # something of the user's own
                sent[label, peer] += way.sent
                sent[peer, label] += way.received
                for pair in ((label, peer), (peer, label)):
                    if way.round_trip_s:
                        known = fastest.get(pair, way.round_trip_s)
                        fastest[pair] = min(known, way.round_trip_s)
        return sent, fastest


def _told(vitals: pb.Vitals) -> Message:
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
