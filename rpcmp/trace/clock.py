"""Clocks of different hosts, brought to the driver's.

    driver    sent ───┐           ┌──> received
                      │           │
    remote            └──> remote ┘

A ping is answered with the remote clock. Where both ways take equally long, the remote clock was
read in the middle; where they do not, the estimate is off by half of their difference, and never
by more than half of the round trip. So the ping with the shortest round trip is the one to trust
(Cristian 1989; NTP does the same). Clocks also drift apart, some microseconds a second: estimates
before and after a run give a line through both. Pure: no sockets, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Ping(NamedTuple):
    """One question for the remote time: `sent_ns`, `received_ns` on the driver's clock."""

    sent_ns: int
    remote_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        """From question to answer."""
        return self.received_ns - self.sent_ns


class Estimate(NamedTuple):
    """How far a remote clock is from the driver's.

    Attributes:
        remote_ns: when, on the remote clock.
        offset_ns: what to add to the remote clock to get the driver's; wrong by half of the
            shortest round trip at most.
    """

    remote_ns: int
    offset_ns: int


@dataclass(frozen=True, slots=True)
class Clock:
    """Maps a remote clock to the driver's.

    Attributes:
        offset_ns: what to add to the remote clock at `remote_ns`.
        remote_ns: where `offset_ns` holds exactly.
        drift: nanoseconds by which the offset grows in each nanosecond of the remote clock.
    """

    offset_ns: int = 0
    remote_ns: int = 0
    drift: float = 0.0

    def to_driver(self, ns: int) -> int:
        """The driver's time at remote time `ns`."""
        return ns + self.offset_ns + round(self.drift * (ns - self.remote_ns))


DRIVER_CLOCK = Clock()
"""The driver's own."""


def estimate(pings: Iterable[Ping]) -> Estimate:
    """The best that `pings`, at least one, can tell."""
    best = min(pings, key=lambda ping: ping.round_trip_ns)
    middle_ns = (best.sent_ns + best.received_ns) // 2
    return Estimate(best.remote_ns, middle_ns - best.remote_ns)


def between(before: Estimate, after: Estimate) -> Clock:
    """The clock whose offset is a line through two estimates, such as from before and after a run.

    Between the two its error is at most the larger one of theirs.
    """
    elapsed_ns = after.remote_ns - before.remote_ns
    drift = (after.offset_ns - before.offset_ns) / elapsed_ns if elapsed_ns else 0.0
    return Clock(before.offset_ns, before.remote_ns, drift)
