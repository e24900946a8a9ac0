"""What each span had to wait for.

    F3   the forwards F3 of what the stage reads; without such, the driver, who sends the batch
    B3   the input gradients B3 of the stage's readers; at the sink its own F3: the conductor beside
         it turns the loss into a gradient
    W3   its own B3
    O    its own last backward; or the driver, who has seen that of all stages, where no stage steps
         before the norm of all gradients is known

Where micro-batches share a message, they wait for the last one of the sender's bundle.

The driver leaves no spans. What it asks for follows what it last learned: that a micro-batch's
backward has come back to where it began, or that a stage's optimizer is done.

Why a stage computed nothing.

    ├─ span ─┤ bubble │ network │ overhead ├─ next span ─┤
             free    sent     ready      start

The span that ends a gap is what the stage waited for: until what it needs was sent, the schedule
had nothing to do here; then it was on its way; then it lay ready.

The critical path: the chain of work and waiting that a window could not be shorter than.

    stage0   F0 ──F1                    ──B1──┐
                   └~~┐              ┌~~      │
    stage1            F1 ──B0 ──B1 ──┘        end

Walked from the last span backwards: to the span before it on the same thread where that thread was
not free earlier, else to the span that it waited for. A bubble is never on the path: at that time
the path is at the stage that the idle one waits for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from rpcmp.observability.trace.spans import Kind, Span, Trace, Track, Window

_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.WEIGHT: Kind.BACKWARD}
"""What the stage itself has done just before, for the same micro-batch."""


class Via(StrEnum):
    """How what a span needs comes to it: from the same stage, from another one, or the driver."""

    OWN = "own"
    LINK = "link"
    DRIVER = "driver"


class Cause(NamedTuple):
    """The span that another one waited for.

    Attributes:
        stage: whose.
        span: which; its end is when what it made was sent.
        via: how that came to who waited.
    """

    stage: str
    span: Span
    via: Via


class Causes:
    """The data flow of a trace.

    Args:
        trace: any; what its spans needed may be missing, at its beginning for instance.
    """

    def __init__(self, trace: Trace) -> None:
        self._spans = {track.stage: _sent(track) for track in trace.tracks}
        readers: dict[str, list[str]] = defaultdict(list)
        for reader, read in trace.producers.items():
            for producer in read:
                readers[producer].append(reader)
        self._neighbours = {Kind.FORWARD: trace.producers, Kind.BACKWARD: readers}
        self._held = _held(trace)
        backwards = list(_last_backwards(trace))
        self._learned = {
            Kind.OPTIMIZER: sorted(backwards, key=_end_ns),
            Kind.FORWARD: sorted([*backwards, *_all(trace, Kind.OPTIMIZER)], key=_end_ns),
        }

    def senders(self, stage: str, span: Span) -> list[Cause]:
        """The spans at other stages whose outputs or gradients `span` of `stage` needed."""
        neighbours: Sequence[str] = self._neighbours.get(span.kind, {}).get(stage, ())
        found = [(name, self._spans.get(name, {}).get(span[:3])) for name in neighbours]
        return [Cause(name, sender, Via.LINK) for name, sender in found if sender is not None]

    def latest(self, stage: str, span: Span) -> Cause | None:
        """The last of all that `span` of `stage` needed; None where the trace cannot tell."""
        if senders := self.senders(stage, span):
            return max(senders, key=_end_ns)
        if span.kind in _BEFORE:
            own = self._spans[stage].get((_BEFORE[span.kind], *span[1:3]))
            return Cause(stage, own, Via.OWN) if own else None
        if span.kind is Kind.OPTIMIZER and span.step not in self._held:
            return self._own_last(stage, span)
        learned = self._learned[span.kind]
        number = bisect_right(learned, span.ready_ns, key=_end_ns)
        return learned[number - 1] if number else None

    def _own_last(self, stage: str, span: Span) -> Cause | None:
        """What the stage itself has done last in the step that `span` ends."""
        own = [
            Cause(stage, each, Via.OWN)
            for each in self._spans[stage].values()
            if each.step == span.step and each.kind in (Kind.BACKWARD, Kind.WEIGHT)
        ]
        return max(own, key=_end_ns, default=None)


def _held(trace: Trace) -> set[int]:
    """The steps in which no stage has stepped before the last backward of all had come back."""
    last: dict[int, int] = defaultdict(int)
    for cause in _all(trace, Kind.BACKWARD):
        last[cause.span.step] = max(last[cause.span.step], cause.span.end_ns)
    early = {
        cause.span.step
        for cause in _all(trace, Kind.OPTIMIZER)
        if cause.span.ready_ns < last[cause.span.step]
    }
    return {*last} - early if len(trace.tracks) > 1 else set()


def _sent(track: Track) -> dict[tuple[Kind, int, int], Span]:
    """For each span the last one of its bundle: a message leaves when all of it is computed.

    What a bundle's spans have in common is when it was ready.
    """
    last = {(span.kind, span.step, span.ready_ns): span for span in track.spans}
    return {span[:3]: last[span.kind, span.step, span.ready_ns] for span in track.spans}


def _end_ns(cause: Cause) -> int:
    return cause.span.end_ns


def _all(trace: Trace, kind: Kind) -> Iterator[Cause]:
    for track in trace.tracks:
        yield from (
            Cause(track.stage, span, Via.DRIVER) for span in track.spans if span.kind is kind
        )


def _last_backwards(trace: Trace) -> Iterator[Cause]:
    """The backwards that send no gradient on: a frozen producer wants none."""
    backwards = list(_all(trace, Kind.BACKWARD))
    sending = {cause.stage for cause in backwards}
    for cause in backwards:
        if sending.isdisjoint(trace.producers.get(cause.stage, ())):
            yield cause


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
