"""Why a stage computed nothing.

    ├─ span ─┤ bubble │ network │ overhead ├─ next span ─┤
             free    sent     ready      start

The span that ends a gap is what the stage waited for: until what it needs was sent, the schedule
had nothing to do here; then it was on its way; then it lay ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from rpcmp.trace.causes import Cause, Causes, Via
from rpcmp.trace.spans import Span, Track


class Loss(StrEnum):
    """Where idle time goes.

    BUBBLE: what the next action waits for was not computed yet.
    NETWORK: it was on its way, through the driver where there is no other.
    OVERHEAD: it had arrived, and the compute thread had not begun.
    """

    BUBBLE = "bubble"
    NETWORK = "network"
    OVERHEAD = "overhead"


class Idle(NamedTuple):
    """Time without a span; never empty."""

    loss: Loss
    start_ns: int
    end_ns: int


def idle(track: Track, causes: Causes, begin_ns: int, end_ns: int) -> Iterator[Idle]:
    """All of a stage's time from `begin_ns` to `end_ns` that its spans leave, in order.

    The time after the last span is a bubble: others still compute.
    """
    free_ns = begin_ns
    for span in track.spans:
        if span.start_ns > free_ns:
            yield from gap(free_ns, span, causes.latest(track.stage, span))
        free_ns = max(free_ns, span.end_ns)
    if end_ns > free_ns:
        yield Idle(Loss.BUBBLE, free_ns, end_ns)


def gap(free_ns: int, span: Span, cause: Cause | None) -> Iterator[Idle]:
    """The parts of the time from `free_ns` to `span`, whose cause, if unknown, is long done."""
    ready_ns = max(span.ready_ns, free_ns)
    sent_ns = free_ns if cause is None else min(max(cause.span.end_ns, free_ns), ready_ns)
    if cause is not None and cause.via is Via.OWN:
        ready_ns = sent_ns  # nothing travels
    times = (free_ns, sent_ns, ready_ns, span.start_ns)
    for loss, start_ns, end_ns in zip(Loss, times, times[1:], strict=False):
        if start_ns < end_ns:
            yield Idle(loss, start_ns, end_ns)
