"""The steps of a trace that are looked at, and the time that they take.

A window begins where any stage begins its first step and ends where any begins the step after its
last, so that what lies between two steps counts once.
"""

from __future__ import annotations

from typing import NamedTuple

from rpcmp.errors import ConfigError
from rpcmp.observability.trace.spans import Kind, Trace


class Window(NamedTuple):
    """Consecutive steps, and their time on the driver's clock."""

    steps: tuple[int, ...]
    begin_ns: int
    end_ns: int

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return (self.end_ns - self.begin_ns) / len(self.steps) / 1e9

    def overlap_ns(self, start_ns: int, end_ns: int) -> int:
        """How much of a span lies inside."""
        return max(0, min(end_ns, self.end_ns) - max(start_ns, self.begin_ns))

    def __str__(self) -> str:
        if len(self.steps) == 1:
            return f"step {self.steps[0]}"
        return f"steps {self.steps[0]} to {self.steps[-1]}"


def choose_window(trace: Trace, first: int | None = None, last: int | None = None) -> Window:
    """The window of the steps from `first` to `last`, both included.

    Args:
        trace: what was recorded.
        first, last: None for the trace's own. Without both, the first step is left out if there
            are others: it pays for memory and code that is touched for the first time.

    Raises:
        ConfigError: the trace has no such steps.
    """
    every = _steps(trace)
    if first is None and last is None and len(every) > 1:
        first = every[1]
    first, last = every[0] if first is None else first, every[-1] if last is None else last
    if not every[0] <= first <= last <= every[-1]:
        raise ConfigError(
            f"no steps {first} to {last} in the trace; it has {every[0]} to {every[-1]}"
        )
    return _between(trace, tuple(step for step in every if first <= step <= last))


def last_complete(trace: Trace, count: int = 2) -> Window:
    """The window of the last `count` steps, or fewer, that no end of the run has cut.

    Raises:
        ConfigError: the trace has no steps.
    """
    every = _steps(trace)
    updates = [
        {span.step for span in track.spans if span.kind is Kind.OPTIMIZER} for track in trace.tracks
    ]
    updated = set.intersection(set(every), *filter(None, updates))
    complete = [step for step in every if step in updated] or every
    return choose_window(trace, complete[-count:][0], complete[-1])


def _steps(trace: Trace) -> list[int]:
    found = sorted({span.step for track in trace.tracks for span in track.spans})
    if not found:
        raise ConfigError("the trace has no steps; let the run train for two at least")
    return found


def _between(trace: Trace, steps: tuple[int, ...]) -> Window:
    spans = [span for track in trace.tracks for span in track.spans]
    begin_ns = min(span.start_ns for span in spans if steps[0] <= span.step <= steps[-1])
    later = (span.start_ns for span in spans if span.step > steps[-1])
    end_ns = min(later, default=trace.end_ns)
    if end_ns <= begin_ns:
        raise ConfigError(f"steps {steps[0]} to {steps[-1]} of the trace take no time")
    return Window(steps, begin_ns, end_ns)
