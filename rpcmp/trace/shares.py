"""Where each stage's time went, as shares of a window that add up to 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rpcmp.trace.causes import Causes
from rpcmp.trace.idle import Loss, idle
from rpcmp.trace.spans import Kind, Trace, Track
from rpcmp.trace.window import Window


@dataclass(frozen=True)
class Shares:
    """One stage's shares of a window.

    Attributes:
        stage, host: whose.
        busy: for every kind of action, between 0 and 1.
        lost: for every reason to idle, between 0 and 1.
    """

    stage: str
    host: str
    busy: Mapping[Kind, float]
    lost: Mapping[Loss, float]

    @property
    def total_busy(self) -> float:
        """The share in which the stage computes."""
        return sum(self.busy.values())


def measure(trace: Trace, window: Window) -> tuple[Shares, ...]:
    """The shares of every stage, in the order of the trace."""
    causes = Causes(trace)
    return tuple(_shares(track, trace, causes, window) for track in trace.tracks)


def mean_lost(shares: tuple[Shares, ...], loss: Loss) -> float:
    """The share over all stages."""
    return sum(stage.lost[loss] for stage in shares) / len(shares)


def _shares(track: Track, trace: Trace, causes: Causes, window: Window) -> Shares:
    busy, lost = dict.fromkeys(Kind, 0), dict.fromkeys(Loss, 0)
    for span in track.spans:
        busy[span.kind] += window.overlap_ns(span.start_ns, span.end_ns)
    for gap in idle(track, causes, trace.begin_ns, trace.end_ns):
        lost[gap.loss] += window.overlap_ns(gap.start_ns, gap.end_ns)
    length_ns = window.end_ns - window.begin_ns
    return Shares(
        track.stage,
        track.host,
        {kind: ns / length_ns for kind, ns in busy.items()},
        {loss: ns / length_ns for loss, ns in lost.items()},
    )
