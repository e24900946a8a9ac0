"""Analysis of traces: shares of time per stage, the bottleneck, and the event `timeline`.

The bottleneck is the stage that computes longest, and the largest other loss. The idle time of a
single stage does not show it: while one stage waits for the network, all stages after it have a
bubble. So waiting is measured on the critical path, and a step consists of

    busy (of the busiest stage) + network + overhead (on the path) + bubble (the rest)

The rest is the time to fill and drain the pipeline. Another loss is uneven stages: the time that
the busiest stage computes beyond the mean.

Stages work on several steps at once. A timeline therefore shows all stages from the first start of
the step at any stage to the first start of the next step, or to the last end of the step if that is
earlier. An evaluation after the step is not part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rpcmp.observability.events import StageTimeline, TimelineEvent
from rpcmp.observability.trace.critical_path import Causes, IdleReason, Via, critical_path, idle
from rpcmp.observability.trace.spans import Kind, Trace, Track, Window


@dataclass(frozen=True)
class Shares:
    """The shares of one stage's time in a window, which add up to 1.

    Attributes:
        stage, host: the stage and its host.
        busy: the share of every kind of action.
        lost: the share of every reason to idle.
    """

    stage: str
    host: str
    busy: Mapping[Kind, float]
    lost: Mapping[IdleReason, float]

    @property
    def total_busy(self) -> float:
        return sum(self.busy.values())


def measure(trace: Trace, window: Window) -> tuple[Shares, ...]:
    """Return the shares of every stage, in the order of the trace."""
    causes = Causes(trace)
    return tuple(_shares(track, trace, causes, window) for track in trace.tracks)


def mean_lost(shares: tuple[Shares, ...], loss: IdleReason) -> float:
    """Return the mean share of a loss over all stages."""
    return sum(stage.lost[loss] for stage in shares) / len(shares)


def _shares(track: Track, trace: Trace, causes: Causes, window: Window) -> Shares:
    busy, lost = dict.fromkeys(Kind, 0), dict.fromkeys(IdleReason, 0)
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


NEGLIGIBLE = 0.05
"""The share of a step below which a loss is not worth advice."""

ADVICE = {
    "uneven stages": "Move layers away from {busiest}, or give it a faster host.",
    "bubble": "More micro-batches, or a schedule with fewer bubbles, fill it.",
    "waiting for network": "Let more micro-batches be in flight, send fewer bytes, or use a "
    "faster link.",
    "waiting for the driver": "Give the driver a core of its own, or a faster link; load data "
    "faster where a step's line says that it waits for data.",
    "overhead": "Fewer, larger micro-batches have less of it; so has a host with idle cores.",
}
"""The advice for each loss."""


@dataclass(frozen=True)
class Bottleneck:
    """The bottleneck of a window.

    Attributes:
        stage: the stage that computes longest; a step cannot be shorter.
        busy_s: seconds that it computes per step.
        step_s: seconds per step.
        loss: the largest loss, a key of ADVICE.
        loss_stage: the stage with that loss.
        loss_share: the loss as a share of a step.
        advice: a sentence of advice.
    """

    stage: str
    busy_s: float
    step_s: float
    loss: str
    loss_stage: str
    loss_share: float
    advice: str

    def __str__(self) -> str:
        return (
            f"bottleneck: {self.stage} computes {self.busy_s * 1e3:,.1f} ms of each step's "
            f"{self.step_s * 1e3:,.1f} ms; largest loss on the critical path: "
            f"{self.loss} at {self.loss_stage}, {self.loss_share:.0%} of a step. {self.advice}"
        )


def bottleneck(trace: Trace, window: Window, shares: Sequence[Shares]) -> Bottleneck:
    """Return the bottleneck of a window; of equal stages, the first in the graph."""
    busiest = max(shares, key=lambda stage: stage.total_busy)
    losses = _waits(trace, window)
    bubble = max(0.0, 1 - busiest.total_busy - sum(losses.values()))
    mean_busy = sum(stage.total_busy for stage in shares) / len(shares)
    losses["uneven stages", busiest.stage] = busiest.total_busy - mean_busy
    losses["bubble", busiest.stage] = bubble
    (loss, stage), share = max(losses.items(), key=lambda item: item[1])
    advice = ADVICE[loss] if share >= NEGLIGIBLE else "Only a faster {busiest} shortens steps."
    return Bottleneck(
        stage=busiest.stage,
        busy_s=busiest.total_busy * window.step_s,
        step_s=window.step_s,
        loss=loss,
        loss_stage=stage,
        loss_share=share,
        advice=advice.format(busiest=busiest.stage),
    )


def _waits(trace: Trace, window: Window) -> dict[tuple[str, str], float]:
    """Return the waits on the critical path, by reason and stage, as shares of the window."""
    waits_ns: Counter[tuple[str, str]] = Counter()
    for leg in critical_path(trace, window):
        if leg.what is IdleReason.OVERHEAD:
            waits_ns["overhead", leg.stage] += leg.ns
        elif leg.what is IdleReason.NETWORK:
            sender = "the driver" if leg.via is Via.DRIVER else "network"
            waits_ns[f"waiting for {sender}", leg.stage] += leg.ns
    return {key: ns / (window.end_ns - window.begin_ns) for key, ns in waits_ns.items()}


DIGITS = 6
"""Decimal places of seconds, which give microseconds."""


def timeline(trace: Trace, step: int) -> TimelineEvent | None:
    """Return the event `timeline` of a step; None if the trace lacks a part of the step.

    Args:
        trace: a trace of the step, the step before and the next.
        step: number of the step.
    """
    window = _window(trace, step)
    if window is None:
        return None
    shares, causes = measure(trace, window), Causes(trace)
    pairs = zip(trace.tracks, shares, strict=True)
    return TimelineEvent(
        step=step,
        seconds=round(window.step_s, DIGITS),
        stages=[_stage(track, share, trace, causes, window) for track, share in pairs],
        bottleneck=str(bottleneck(trace, window, shares)),
    )


def _window(trace: Trace, step: int) -> Window | None:
    spans = [span for track in trace.tracks for span in track.spans]
    own = [span for span in spans if span.step == step]
    later = [span.start_ns for span in spans if span.step > step]
    if not own or not later:
        return None
    begin_ns, last_ns = min(span.start_ns for span in own), max(span.end_ns for span in own)
    end_ns = min(last_ns, *later)
    return Window((step,), begin_ns, end_ns) if begin_ns < end_ns else None


def _stage(
    track: Track, shares: Shares, trace: Trace, causes: Causes, window: Window
) -> StageTimeline:
    spans = ((str(span.kind), span.microbatch, span.start_ns, span.end_ns) for span in track.spans)
    gaps = idle(track, causes, trace.begin_ns, trace.end_ns)
    return {
        "label": track.stage,
        "host": track.host,
        "spans": [
            [kind, microbatch, *times]
            for kind, microbatch, *ends in spans
            for times in _within(window, *ends)
        ],
        "idle": [[str(gap.loss), *times] for gap in gaps for times in _within(window, *gap[1:])],
        "busy": {str(kind): share for kind, share in shares.busy.items()},
        "lost": {str(loss): share for loss, share in shares.lost.items()},
    }


def _within(window: Window, start_ns: int, end_ns: int) -> Iterator[tuple[float, float]]:
    """Yield the part of a time span inside the window, in seconds since its start, if any."""
    start_ns, end_ns = max(start_ns, window.begin_ns), min(end_ns, window.end_ns)
    if start_ns < end_ns:
        yield _seconds(window, start_ns), _seconds(window, end_ns)


def _seconds(window: Window, ns: int) -> float:
    return round((ns - window.begin_ns) / 1e9, DIGITS)
