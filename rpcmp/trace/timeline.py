"""One step of a run that goes on, as its observers are told of it.

Stages work on several steps at once, so what is shown is what all of them did from the moment when
the first began the step until the first began the next, or until nobody did anything for it any
more: an evaluation that follows is no part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rpcmp.trace.bottleneck import bottleneck
from rpcmp.trace.causes import Causes
from rpcmp.trace.idle import idle
from rpcmp.trace.shares import Shares, measure
from rpcmp.trace.spans import Trace, Track
from rpcmp.trace.window import Window

DIGITS = 6
"""Of seconds: a microsecond."""


def timeline(trace: Trace, step: int) -> dict[str, Any] | None:
    """The event `timeline`; None where the trace does not have all of the step.

    Args:
        trace: what was recorded of the step, of the one before and of the next.
        step: which.
    """
    window = _window(trace, step)
    if window is None:
        return None
    shares, causes = measure(trace, window), Causes(trace)
    pairs = zip(trace.tracks, shares, strict=True)
    return {
        "event": "timeline",
        "step": step,
        "seconds": round(window.step_s, DIGITS),
        "stages": [_stage(track, of, trace, causes, window) for track, of in pairs],
        "bottleneck": str(bottleneck(trace, window, shares)),
    }


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
) -> dict[str, Any]:
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
    """Seconds from the window's beginning to both ends of what lies inside it, if anything does."""
    start_ns, end_ns = max(start_ns, window.begin_ns), min(end_ns, window.end_ns)
    if start_ns < end_ns:
        yield _seconds(window, start_ns), _seconds(window, end_ns)


def _seconds(window: Window, ns: int) -> float:
    return round((ns - window.begin_ns) / 1e9, DIGITS)
