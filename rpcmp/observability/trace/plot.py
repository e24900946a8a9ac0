"""The pipeline diagram: a row per stage, time to the right, a box per span.

matplotlib is imported late, since reading a trace does not need it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rpcmp.errors import ConfigError
from rpcmp.observability.trace.analysis import mean_lost, measure
from rpcmp.observability.trace.critical_path import IdleReason
from rpcmp.observability.trace.spans import NO_MICROBATCH, Kind, Span, Trace, Track, Window

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD: "#E69F00",
    Kind.WEIGHT: "#009E73",
    Kind.OPTIMIZER: "#CC79A7",
}
"""Colours of Okabe and Ito (2008), distinguishable with any colour vision."""

NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.WEIGHT: "weight gradient",
    Kind.OPTIMIZER: "optimizer",
}

WIDTH, DPI = 18.0, 120
"""Inches, and pixels per inch."""

FONT_SIZE = 6.0
"""Points; the width of a digit is about 0.6 of it."""

BOX = 0.8
"""Height of a box; the distance of rows is 1."""


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError("the diagram needs matplotlib; install it: pip install 'rpcmp[plot]'")


def write_png(trace: Trace, window: Window, path: Path) -> None:
    """Draw `window` of `trace` into `path`.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    require_matplotlib()
    try:
        figure(trace, window).savefig(path, format="png", dpi=DPI)
    except OSError as error:
        raise ConfigError(f"cannot write the diagram {path}: {error.strerror or error}") from error


def figure(trace: Trace, window: Window) -> Figure:
    """Return the diagram of `window`; without pyplot, which needs a display and keeps figures."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(WIDTH, 1.6 + 0.45 * len(trace.tracks)), layout="constrained")
    axes = drawn.add_subplot()
    axes.set_xlim(0, _ms(window.end_ns, window))
    axes.set_ylim(len(trace.tracks) - 0.5, -0.5)
    axes.set_yticks(range(len(trace.tracks)), [track.stage for track in trace.tracks])
    axes.set_xlabel("ms")
    bubble = mean_lost(measure(trace, window), IdleReason.BUBBLE)
    axes.set_title(f"{window}, {window.step_s * 1e3:,.1f} ms each, bubble {bubble:.1%}")
    for row, track in enumerate(trace.tracks):
        _draw(axes, row, track, window)
    _legend(drawn, trace, window)
    return drawn


def _draw(axes: Axes, row: int, track: Track, window: Window) -> None:
    spans = [span for span in track.spans if window.overlap_ns(span.start_ns, span.end_ns)]
    for kind, colour in COLOURS.items():
        boxes = [
            (_ms(span.start_ns, window), (span.end_ns - span.start_ns) / 1e6)
            for span in spans
            if span.kind is kind
        ]
        place = (row - BOX / 2, BOX)
        axes.broken_barh(boxes, place, facecolors=colour, edgecolor="white", linewidth=0.4)
    for span in filter(lambda span: _fits(span, window), spans):
        middle = _ms((span.start_ns + span.end_ns) // 2, window)
        number = str(span.microbatch)
        axes.text(middle, row, number, ha="center", va="center", fontsize=FONT_SIZE, clip_on=True)


def _fits(span: Span, window: Window) -> bool:
    """Return whether a span's micro-batch fits into its box; labels take a part of the width."""
    points = 0.85 * WIDTH * 72 * (span.end_ns - span.start_ns) / (window.end_ns - window.begin_ns)
    digits = len(str(span.microbatch))
    return span.microbatch != NO_MICROBATCH and points > 0.6 * FONT_SIZE * digits + 2


def _legend(drawn: Figure, trace: Trace, window: Window) -> None:
    from matplotlib.patches import Patch

    used = {
        span.kind
        for track in trace.tracks
        for span in track.spans
        if window.overlap_ns(span.start_ns, span.end_ns)
    }
    patches = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in Kind if kind in used]
    drawn.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)


def _ms(ns: int, window: Window) -> float:
    return (ns - window.begin_ns) / 1e6
