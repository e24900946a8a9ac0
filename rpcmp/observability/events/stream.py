"""The stream of a run's events: stamped, and each reported once even if its steps are replayed."""

from __future__ import annotations

import time
from collections.abc import Callable

from rpcmp.observability.events import (
    EarlyStopEvent,
    EvalEvent,
    Event,
    ReportEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)

LOSSES_KEPT = 64
"""Losses that are kept, to compare them with the losses of a replay."""


class EventStream:
    """Stamps the events of a run with `time` and `generation` and passes them on.

    Args:
        report: called with the stamped events.
        generation: returns the number of the current generation.

    Attributes:
        step: the last step that was reported.
        step_seconds: durations of the steps that were reported.
    """

    def __init__(self, report: Callable[[Event], None], generation: Callable[[], int]) -> None:
        self._report = report
        self._generation = generation
        self._reported_once: set[str] = set()
        self._losses: dict[int, float] = {}
        self._evaluated_step = -1
        self.step = 0
        self.step_seconds: list[float] = []

    def emit(self, event: Event) -> None:
        """Pass on an event."""
        self._report(event.stamped(time.time(), self._generation()))

    def emit_new(self, event: Event) -> None:
        """Pass on an event of the driver process, unless an earlier generation has reported it."""
        match event:
            case StepEvent():
                self._emit_step(event)
            case EvalEvent():
                if event.step > self._evaluated_step:
                    self._evaluated_step = event.step
                    self.emit(event)
            case StartEvent() | ReportEvent() | EarlyStopEvent():
                if event.event not in self._reported_once:
                    self._reported_once.add(event.event)
                    self.emit(event)
            case _:
                self.emit(event)

    def _emit_step(self, event: StepEvent) -> None:
        step, loss = event.step, event.loss
        before = self._losses.get(step)
        if before is not None and before.hex() != loss.hex():  # -0.0 is not 0.0, and NaN is NaN
            text = (
                f"step {step} gave a loss of {loss!r} in its replay and {before!r} before: the "
                "model draws on something that is not reproducible"
            )
            self.emit(WarningEvent(text=text))
        if step <= self.step:
            return
        self.step = step
        self.step_seconds.append(event.step_s)
        self._losses[step] = loss
        self._losses.pop(step - LOSSES_KEPT, None)
        self.emit(event)
