"""What a run records: which stage computed what, from when to when.

    ready          start                end
      ┆  overhead    ├────── span ───────┤          on the stage's one compute thread
      everything that the action needs has arrived

Only training is recorded: an evaluation shows as time in which the stages wait for the driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rpcmp.graph import Graph
from rpcmp.trace.clock import DRIVER_CLOCK, Clock

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
