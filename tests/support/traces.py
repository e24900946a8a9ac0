"""Traces for tests, drawn with a row per stage; two characters are one millisecond.

F0 B1 W2 O   an action, continued by `=`; after O the stage is in its next step
.            idle: a bubble
~            idle: network
-            idle: overhead; everything that the next action needs has arrived before
"""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import dedent

from rpcmp.observability.trace.critical_path import Causes, IdleReason, idle
from rpcmp.observability.trace.spans import NO_MICROBATCH, Kind, Span, Trace, Track

CELL_NS = 1_000_000

SIGNS = {IdleReason.BUBBLE: ".", IdleReason.NETWORK: "~", IdleReason.OVERHEAD: "-"}


def drawn(picture: str, producers: Mapping[str, tuple[str, ...]] | None = None) -> Trace:
    """Return the trace of a picture; without `producers`, the stages are a chain.

    Only `-` is read among the signs for idle time: an analysis has to find the others.
    """
    rows = {row.split()[0]: row.split()[1:] for row in dedent(picture).strip().splitlines()}
    names = list(rows)
    chain = {name: tuple(names[i - 1 : i]) for i, name in enumerate(names)}
    tracks = (Track(name, f"host-{name}", _spans(cells)) for name, cells in rows.items())
    return Trace(tuple(tracks), producers or chain)


def redrawn(trace: Trace) -> str:
    """Return the picture of a trace, with the idle time that the trace's own analysis finds."""
    causes, rows = Causes(trace), []
    for track in trace.tracks:
        cells = {_cell(span.start_ns): _name(span) for span in track.spans}
        for span in track.spans:
            within = range(_cell(span.start_ns) + 1, _cell(span.end_ns))
            cells.update(dict.fromkeys(within, "="))
        for gap in idle(track, causes, trace.begin_ns, trace.end_ns):
            within = range(_cell(gap.start_ns), _cell(gap.end_ns))
            cells.update(dict.fromkeys(within, SIGNS[gap.loss]))
        rows.append(f"{track.stage}  " + " ".join(f"{cells[i]:2}" for i in sorted(cells)))
    return "\n".join(row.rstrip() for row in rows)


def _spans(cells: list[str]) -> tuple[Span, ...]:
    spans: list[Span] = []
    step = 1
    for index, cell in enumerate(cells):
        if cell == "=":
            spans[-1] = spans[-1]._replace(end_ns=(index + 1) * CELL_NS)
        elif cell not in SIGNS.values():
            waits = index - len("".join(c[0] for c in cells[:index]).rstrip("-"))
            times = ((index - waits) * CELL_NS, index * CELL_NS, (index + 1) * CELL_NS)
            microbatch = int(cell[1:]) if cell[1:] else NO_MICROBATCH
            spans.append(Span(Kind(cell[0]), step, microbatch, *times))
            step += cell == "O"
    return tuple(spans)


def _name(span: Span) -> str:
    return "O" if span.kind is Kind.OPTIMIZER else span.label


def _cell(ns: int) -> int:
    return ns // CELL_NS


SLOW_LINKS = """\
stage0  F0 F1 .  .  .  ~  B0 .  ~  B1 ~  O  ~  F0 -  F1 .  .  ~  B0 .  ~  B1 ~  O
stage1  .  ~  F0 -  B0 F1 -  B1 .  .  ~  O  .  .  ~  F0 -  B0 F1 -  B1 .  .  ~  O"""
"""1F1B, with one millisecond between two processes, and one for the sink to start its backward. The
first F1 of step 2 starts late, and no stage steps before all gradients are known."""

ZERO_BUBBLE = """\
stage0  F0 F1 .  B0 W0 B1 W1 O  F0 F1 .  B0 W0 B1 W1 O
stage1  .  F0 B0 F1 B1 W0 W1 O  .  F0 B0 F1 B1 W0 W1 O"""
"""Links that take no time, and steps that follow each other at once."""

SLOW_LAST = """\
stage0  F0 F1 .  .  .  B0 .  .  .  .  B1
stage1  .  F0 =  B0 =  F1 =  =  B1 =  ."""
"""A last stage that computes longer than the first. The gradient of B0 arrives at once."""

FROZEN_FIRST = """\
stage0  F0 .  .  ~  F1 .  .
stage1  .  F0 B0 .  .  F1 B1"""
"""The first stage trains nothing; the driver asks for F1 when B0 is done."""

DIAMOND = """\
a  F0 .  .  .  .  .  .  .  .  B0
b  .  F0 .  .  .  .  B0 .  .  .
c  .  F0 =  =  .  .  B0 =  =  .
d  .  .  .  .  F0 B0 .  .  .  ."""
"""d waits for the slower of b and c, and a waits for the gradient of the slower one."""

DIAMOND_PRODUCERS = {"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c")}
