"""What a run records: which stage computed what, from when to when.

    ready          start                end
      ┆  overhead    ├────── span ───────┤          on the stage's one compute thread
      everything that the action needs has arrived

Only training is recorded: an evaluation shows as time in which the stages wait for the driver.

Clocks of different hosts, brought to the driver's.

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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rpcmp.config.topology import Graph


class Ping(NamedTuple):
    """One question for the remote time: `sent_ns`, `received_ns` on the driver's clock."""

    sent_ns: int
    remote_ns: int
    received_ns: int

    @property
    def round_trip_ns(self) -> int:
        """From question to answer."""
        return self.received_ns - self.sent_ns


class ClockEstimate(NamedTuple):
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


def estimate(pings: Iterable[Ping]) -> ClockEstimate:
    """The best that `pings`, at least one, can tell."""
    best = min(pings, key=lambda ping: ping.round_trip_ns)
    middle_ns = (best.sent_ns + best.received_ns) // 2
    return ClockEstimate(best.remote_ns, middle_ns - best.remote_ns)


def between(before: ClockEstimate, after: ClockEstimate) -> Clock:
    """The clock whose offset is a line through two estimates, such as from before and after a run.

    Between the two its error is at most the larger one of theirs.
    """
    elapsed_ns = after.remote_ns - before.remote_ns
    drift = (after.offset_ns - before.offset_ns) / elapsed_ns if elapsed_ns else 0.0
    return Clock(before.offset_ns, before.remote_ns, drift)


NO_MICROBATCH = -1
"""The micro-batch of the optimizer, which works for all of them."""


class Kind(StrEnum):
    """What a stage computes. A backward that is not split is a BACKWARD without a WEIGHT."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    OPTIMIZER = "O"


class Span(NamedTuple):
    """One action of one stage; (kind, step, microbatch) tells it from the stage's others.

    Attributes:
        kind: what was computed.
        step: optimizer step, counted from 1.
        microbatch: index within the step, or NO_MICROBATCH.
        ready_ns: when all that it needs had arrived; at most `start_ns`.
        start_ns, end_ns: when the thread began and ended it, like `ready_ns` on the clock of the
            stage's host (`time.perf_counter_ns`).
    """

    kind: Kind
    step: int
    microbatch: int
    ready_ns: int
    start_ns: int
    end_ns: int

    @property
    def label(self) -> str:
        """ "F3", or "optimizer"."""
        if self.kind is Kind.OPTIMIZER:
            return self.kind.name.lower()
        return f"{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Track:
    """The spans of one stage.

    Attributes:
        stage: its name.
        host: the name of its host.
        spans: in order; they never overlap, because one thread computes them.
        clock: brings their times to the driver's clock.
    """

    stage: str
    host: str
    spans: tuple[Span, ...]
    clock: Clock = DRIVER_CLOCK

    def aligned(self) -> Track:
        """The same on the driver's clock."""
        if self.clock == DRIVER_CLOCK:
            return self
        at = self.clock.to_driver
        spans = (
            Span(kind, step, microbatch, at(ready), at(start), at(end))
            for kind, step, microbatch, ready, start, end in self.spans
        )
        return Track(self.stage, self.host, tuple(spans))


@dataclass(frozen=True)
class Trace:
    """The tracks of all stages, always on the driver's clock, whatever clocks they come with.

    Attributes:
        tracks: one a stage, in the graph's order.
        producers: for each stage, the stages that it reads; empty for one that reads the batch
            alone.
    """

    tracks: tuple[Track, ...]
    producers: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tracks", tuple(track.aligned() for track in self.tracks))

    @property
    def begin_ns(self) -> int:
        """When the first span starts; there must be one."""
        return min(track.spans[0].start_ns for track in self.tracks if track.spans)

    @property
    def end_ns(self) -> int:
        """When the last span ends; there must be one."""
        return max(track.spans[-1].end_ns for track in self.tracks if track.spans)


def producers(graph: Graph) -> dict[str, tuple[str, ...]]:
    """`Trace.producers` of a graph: each stage once, and nothing that comes from the batch."""
    return {
        stage: tuple(dict.fromkeys(ref.producer for ref in references if not ref.from_batch))
        for stage, references in graph.inputs.items()
    }
