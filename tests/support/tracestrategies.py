"""Arbitrary traces for hypothesis, including traces that no run would record."""

from __future__ import annotations

from hypothesis import strategies as st

from rpcmp.observability.trace.spans import NO_MICROBATCH, Clock, Kind, Span, Trace, Track

clocks = st.builds(
    Clock,
    st.integers(-(10**15), 10**15),
    st.integers(0, 10**12),
    st.sampled_from([0.0, 1e-4, -1e-4]),
)

actions = st.tuples(st.sampled_from(Kind), st.integers(1, 3), st.integers(0, 2)).map(
    lambda key: (*key[:2], NO_MICROBATCH) if key[0] is Kind.OPTIMIZER else key
)


@st.composite
def spans(draw: st.DrawFn, at_least: int = 0) -> tuple[Span, ...]:
    """Draw the consecutive spans of one stage, with any gaps."""
    keys = draw(st.lists(actions, unique=True, min_size=at_least, max_size=8))
    now_ns = draw(st.integers(0, 10**12))
    found = []
    for kind, step, microbatch in keys:
        start_ns = now_ns + draw(st.integers(0, 3_000))
        now_ns = start_ns + draw(st.integers(0, 3_000)) + 1
        ready_ns = start_ns - draw(st.integers(0, 4_000))
        found.append(Span(kind, step, microbatch, ready_ns, start_ns, now_ns))
    return tuple(found)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Draw the traces of stages that read earlier ones; the first stage has at least one span."""
    tracks: list[Track] = []
    producers: dict[str, tuple[str, ...]] = {}
    for index in range(draw(st.integers(1, 3))):
        name = f"stage{index}"
        read = draw(st.sets(st.sampled_from(sorted(producers)))) if producers else set()
        producers[name] = tuple(sorted(read))
        tracks.append(Track(name, "host", draw(spans(at_least=not index)), draw(clocks)))
    return Trace(tuple(tracks), producers)
