"""The critical path: the chain of work and waiting that a window could not be shorter than.

    stage0   F0 ──F1                    ──B1──┐
                   └~~┐              ┌~~      │
    stage1            F1 ──B0 ──B1 ──┘        end

Walked from the last span backwards: to the span before it on the same thread where that thread was
not free earlier, else to the span that it waited for. A bubble is never on the path: at that time
the path is at the stage that the idle one waits for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

from rpcmp.trace.causes import Cause, Causes, Via
from rpcmp.trace.idle import Loss, gap
from rpcmp.trace.spans import Kind, Span, Trace
from rpcmp.trace.window import Window


class Leg(NamedTuple):
    """A part of the path.

    Attributes:
        stage: where.
        what: computing, or waiting for the network or for the thread.
        via: how what it waits for came to it.
        ns: how long, inside the window.
    """

    stage: str
    what: Kind | Loss
    via: Via
    ns: int


def critical_path(trace: Trace, window: Window) -> Iterator[Leg]:
    """The path through `window`, from its end to its beginning; it has no gaps.

    It may stop before the beginning, where the trace does not say what was waited for.
    """
    causes = Causes(trace)
    spans = {track.stage: track.spans for track in trace.tracks}
    at, left = _last(trace, window), window
    for _ in range(sum(map(len, spans.values()))):  # no span twice, whatever the clocks say
        if at is None or left.end_ns <= left.begin_ns:
            return
        stage, span, _ = at
        yield Leg(stage, span.kind, Via.OWN, left.overlap_ns(span.start_ns, span.end_ns))
        left = _until(left, span.start_ns)
        before, cause = _before(spans[stage], span), causes.latest(stage, span)
        free_ns = window.begin_ns if before is None else before.end_ns
        at = before and Cause(stage, before, Via.OWN)
        for loss, start_ns, end_ns in reversed(list(gap(free_ns, span, cause))):
            if loss is Loss.BUBBLE:
                at = cause
                break
            via = Via.LINK if cause is None else cause.via
            yield Leg(stage, loss, via, left.overlap_ns(start_ns, end_ns))
            left = _until(left, start_ns)


def _until(window: Window, end_ns: int) -> Window:
    return window._replace(end_ns=min(window.end_ns, end_ns))


def _last(trace: Trace, window: Window) -> Cause | None:
    """The span in `window` that ends last; of equals, the first stage's."""
    inside = (
        Cause(track.stage, span, Via.OWN)
        for track in trace.tracks
        for span in track.spans
        if span.end_ns <= window.end_ns
    )
    return max(inside, key=lambda found: found.span.end_ns, default=None)


def _before(spans: tuple[Span, ...], span: Span) -> Span | None:
    index = bisect_left(spans, span.start_ns, key=lambda other: other.start_ns)
    return spans[index - 1] if index else None
