"""How a worker is: what it says with each sign of life, and what its kernel says of it."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping

from rpcmp.process import usage
from rpcmp.process.activity import Doing
from rpcmp.process.channel import Message
from rpcmp.v1 import control_pb2 as pb


class WorkerVitals:
    """What is known of one worker.

    Attributes:
        busy_seconds: that it has computed, by kind of action ("F", "B", "W", "O").
    """

    def __init__(self) -> None:
        self.busy_seconds: dict[str, float] = {}
        self._in_flight = 0
        self._ways: list[pb.Way] = []
        self._tensors: list[pb.Way] = []
        self._counted = time.monotonic()

    def hear(self, beat: Message) -> None:
        """Keep what a sign of life says.

        Raises:
            TypeError, ValueError, LookupError: nothing that a worker of ours says.
        """
        self._counted = time.monotonic()
        self._in_flight = pb.Vitals(in_flight=beat.get("in_flight", 0)).in_flight
        busy = beat.get("busy", {})
        self.busy_seconds = {kind: float(busy[kind]) for kind in "FBWO" if kind in busy}
        self._ways, self._tensors = (
            [
                pb.Way(peer=peer, sent=sent, received=received, round_trip_s=seconds)
                for peer, sent, received, seconds in beat[counted]
            ]
            for counted in ("ways", "tensors")
        )

    def message(self, pid: int, doing: Doing, round_trips: Mapping[str, float]) -> pb.Vitals:
        """How it is at this moment; read from outside, whatever it does.

        Args:
            pid: its process; 0: there is none.
            doing: what it does.
            round_trips: seconds to peers to whom its connections are carried by a relay.
        """
        return pb.Vitals(
            host=platform.node(),
            pid=pid,
            doing=pb.Doing(**doing._asdict()),
            memory=usage.resident_bytes(pid),
            cpu_seconds=usage.cpu_seconds(pid),
            in_flight=self._in_flight if pid else 0,
            counted_s_ago=time.monotonic() - self._counted,
            ways=[
                pb.Way(
                    peer=way.peer,
                    sent=way.sent,
                    received=way.received,
                    round_trip_s=round_trips.get(way.peer, way.round_trip_s),
                )
                for way in self._ways
            ],
            tensors=self._tensors,
        )
