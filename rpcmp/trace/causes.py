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
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

from rpcmp.trace.spans import Kind, Span, Trace, Track

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
