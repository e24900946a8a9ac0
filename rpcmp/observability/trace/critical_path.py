"""Causes of waiting, idle time by reason, and the critical path.

Each span waits for its causes:

    F3   the forwards F3 of the stages that its stage reads; for a source stage, the driver, which
         sends the batch
    B3   the input gradients B3 of the stages that read its stage; at the sink, its own F3, since
         the loss is computed there
    W3   its own B3
    O    its own last backward; or the driver, which has seen the last backwards of all stages, if
         no stage steps before the norm of all gradients is known

If micro-batches share a message, they wait for the last one of the sender's bundle.

The driver has no spans. Its requests follow the last report that it got: that the backward of a
micro-batch has returned to its source stage, or that a stage's optimizer is done.

The idle time before a span has three parts:

    ├─ span ─┤ bubble │ network │ overhead ├─ next span ─┤
             free    sent     ready      start

The critical path is the chain of work and waiting that determines the length of a window:

    stage0   F0 ──F1                    ──B1──┐
                   └~~┐              ┌~~      │
    stage1            F1 ──B0 ──B1 ──┘        end

It is followed backwards from the last span: to the previous span on the same thread if that thread
was busy until then, otherwise to the span that it waited for. A bubble is never on the path, since
meanwhile the path is at the stage that the idle one waits for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from rpcmp.observability.trace.spans import Kind, Span, Trace, Track, Window

_BEFORE = {Kind.BACKWARD: Kind.FORWARD, Kind.WEIGHT: Kind.BACKWARD}
"""The preceding action of the same stage, for the same micro-batch."""


class Via(StrEnum):
    """The source of a span's input: the same stage, another one, or the driver."""

    OWN = "own"
    LINK = "link"
    DRIVER = "driver"


class Cause(NamedTuple):
    """The span that another span waited for.

    Attributes:
        stage: the stage of the span.
        span: the span; its result was sent when it ended.
        via: the way of the result to the waiting span.
    """

    stage: str
    span: Span
    via: Via


class Causes:
    """The data flow of a trace.

    Args:
        trace: the trace; causes of spans may be missing, as at its start.
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
        """Return the spans at other stages whose outputs or gradients `span` needed."""
        neighbours: Sequence[str] = self._neighbours.get(span.kind, {}).get(stage, ())
        spans = [(name, self._spans.get(name, {}).get(span[:3])) for name in neighbours]
        return [Cause(name, sender, Via.LINK) for name, sender in spans if sender is not None]

    def latest(self, stage: str, span: Span) -> Cause | None:
        """Return the last cause of `span` of `stage`; None if the trace lacks it."""
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
        """Return the stage's last backward or weight gradient in the step of an optimizer."""
        own = [
            Cause(stage, each, Via.OWN)
            for each in self._spans[stage].values()
            if each.step == span.step and each.kind in (Kind.BACKWARD, Kind.WEIGHT)
        ]
        return max(own, key=_end_ns, default=None)


def _held(trace: Trace) -> set[int]:
    """Return the steps in which all optimizers waited for the last backward of all stages."""
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
    """Return for each span the last one of its bundle, since a bundle is one message.

    The spans of a bundle have the same `ready_ns`.
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
    """Yield the backwards that send no gradient to another stage; a frozen producer gets none."""
    backwards = list(_all(trace, Kind.BACKWARD))
    sending = {cause.stage for cause in backwards}
    for cause in backwards:
        if sending.isdisjoint(trace.producers.get(cause.stage, ())):
            yield cause


class IdleReason(StrEnum):
    """The reason of idle time.

    BUBBLE: the input of the next action was not computed yet.
    NETWORK: the input was in transit, or the driver had not requested the action yet.
    OVERHEAD: the input had arrived, but the compute thread had not started.
    """

    BUBBLE = "bubble"
    NETWORK = "network"
    OVERHEAD = "overhead"


class Idle(NamedTuple):
    """An interval without a span, never empty."""

    loss: IdleReason
    start_ns: int
    end_ns: int


def idle(track: Track, causes: Causes, begin_ns: int, end_ns: int) -> Iterator[Idle]:
    """Yield a stage's idle time from `begin_ns` to `end_ns`, in order.

    The time after the last span is a bubble, since other stages still compute.
    """
    free_ns = begin_ns
    for span in track.spans:
        if span.start_ns > free_ns:
            yield from gap(free_ns, span, causes.latest(track.stage, span))
        free_ns = max(free_ns, span.end_ns)
    if end_ns > free_ns:
        yield Idle(IdleReason.BUBBLE, free_ns, end_ns)


def gap(free_ns: int, span: Span, cause: Cause | None) -> Iterator[Idle]:
    """Yield the parts of the time from `free_ns` to `span`; an unknown cause is long done."""
    ready_ns = max(span.ready_ns, free_ns)
    sent_ns = free_ns if cause is None else min(max(cause.span.end_ns, free_ns), ready_ns)
    if cause is not None and cause.via is Via.OWN:
        ready_ns = sent_ns  # nothing travels
    times = (free_ns, sent_ns, ready_ns, span.start_ns)
    for loss, start_ns, end_ns in zip(IdleReason, times, times[1:], strict=False):
        if start_ns < end_ns:
            yield Idle(loss, start_ns, end_ns)


class Leg(NamedTuple):
    """A part of the path.

    Attributes:
        stage: the stage.
        what: the kind of computation, or the reason to wait: NETWORK or OVERHEAD.
        via: the way of the input that is waited for.
        ns: duration inside the window.
    """

    stage: str
    what: Kind | IdleReason
    via: Via
    ns: int


def critical_path(trace: Trace, window: Window) -> Iterator[Leg]:
    """Yield the path through `window`, from its end to its start, without gaps.

    It stops before the start if the trace lacks the cause of a span.
    """
    causes = Causes(trace)
    spans = {track.stage: track.spans for track in trace.tracks}
    at, left = _last(trace, window), window
    for _ in range(sum(map(len, spans.values()))):  # no span twice, even if clocks are wrong
        if at is None or left.end_ns <= left.begin_ns:
            return
        stage, span, _ = at
        yield Leg(stage, span.kind, Via.OWN, left.overlap_ns(span.start_ns, span.end_ns))
        left = _until(left, span.start_ns)
        before, cause = _before(spans[stage], span), causes.latest(stage, span)
        free_ns = window.begin_ns if before is None else before.end_ns
        at = before and Cause(stage, before, Via.OWN)
        for loss, start_ns, end_ns in reversed(list(gap(free_ns, span, cause))):
            if loss is IdleReason.BUBBLE:
                at = cause
                break
            via = Via.LINK if cause is None else cause.via
            yield Leg(stage, loss, via, left.overlap_ns(start_ns, end_ns))
            left = _until(left, start_ns)


def _until(window: Window, end_ns: int) -> Window:
    return window._replace(end_ns=min(window.end_ns, end_ns))


def _last(trace: Trace, window: Window) -> Cause | None:
    """Return the span in `window` that ends last; of equal ones, the first stage's."""
    inside = (
        Cause(track.stage, span, Via.OWN)
        for track in trace.tracks
        for span in track.spans
        if span.end_ns <= window.end_ns
    )
    return max(inside, key=_end_ns, default=None)


def _before(spans: tuple[Span, ...], span: Span) -> Span | None:
    index = bisect_left(spans, span.start_ns, key=lambda other: other.start_ns)
    return spans[index - 1] if index else None
