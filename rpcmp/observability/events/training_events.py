"""The events of training: steps, evaluations, checkpoints, and the summary.

`EventStream` reports each of them once, although steps are replayed after a fault.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, TypedDict

from rpcmp.observability.events.event import Event, event_type
from rpcmp.observability.events.run_events import WarningEvent


class Memory(TypedDict):
    """The memory of a stage's process in bytes, in the event `summary`."""

    idle: int
    peak: int


class BestStep(TypedDict):
    """The best checkpoint that is kept, in the event `summary`."""

    step: int
    metric: str
    value: float
    path: str


class PlanOutcome(TypedDict):
    """The plan of the event `plan` and its outcome, in the event `summary`."""

    balance: list[int]
    predicted_step_s: float
    measured_step_s: float | None
    wrong: str


@event_type("start")
class StartEvent(Event):
    """Training starts.

    Attributes:
        steps: optimizer steps that the whole run will have done
    """

    steps: int


@event_type("step")
class StepEvent(Event):
    """After each optimizer step.

    Attributes:
        step: number of the step, from 1
        epoch: number of its epoch, from 1
        loss: mean loss of the mini-batch
        samples_per_s: samples per second
        step_s: seconds since the end of the step before
        data_share: share of that time in which the driver waited for samples
        busy: share of that time in which each stage computed
        busy_seconds: seconds in which each stage computed, by kind: `F` forward, `B` backward, `W`
            weight gradients, `O` optimizer
        core_seconds: seconds in which the thread that computes a stage had a core, `used`, or
            waited for one, `waited`
        learning_rate: learning rate of the first stage that has one
        learning_rates: learning rate of each stage's first parameter group
        loss_scale: with `[loss_scaling]`: what the loss was multiplied by
        is_skipped: with `[loss_scaling]`: whether the step updated nothing
        skipped_steps: with `[loss_scaling]`: steps skipped so far
        group_learning_rates: of each stage with several parameter groups: the learning rate of each
    """

    step: int
    epoch: int
    loss: float
    samples_per_s: float
    step_s: float
    data_share: float
    busy: dict[str, float]
    busy_seconds: dict[str, dict[str, float]]
    learning_rate: float | None
    learning_rates: dict[str, float | None]
    core_seconds: dict[str, dict[str, float]] | None = None
    loss_scale: float | None = None
    is_skipped: bool | None = None
    skipped_steps: int | None = None
    group_learning_rates: dict[str, list[float]] | None = None


@event_type("schedule")
class ScheduleEvent(Event):
    """With options that are `"auto"`: the fastest that were tried, or those that it starts with.

    Attributes:
        step: the last step before
        chosen: what it goes on with, in words; at the start: what is predicted to be the fastest
            with a measured balance, or was found before, or the config's own after a fault that may
            be due to others
        schedule: the schedule of it
        max_in_flight: micro-batches of which a stage may hold activations; missing: as many as the
            schedule needs
        microbatches_per_message: micro-batches in one message
        measured: seconds of a step under all that were tried, in words; what had turns with the
            fastest by then, by its ratio to that; empty at the start
    """

    step: int
    chosen: str
    schedule: str
    max_in_flight: int | None = None
    microbatches_per_message: int
    measured: dict[str, float]

    @property
    def options(self) -> dict[str, Any]:
        """The keys of a config that it goes on with, and their values."""
        keys = ("schedule", "max_in_flight", "microbatches_per_message")
        return {key: getattr(self, key) for key in keys}


@event_type("eval", flat="values")
class EvalEvent(Event):
    """After each evaluation.

    Attributes:
        step: the step that it followed
        epoch: epoch of that step
        values: the `loss`, and each metric, by its name
    """

    step: int
    epoch: int
    values: dict[str, float]


@event_type("early_stop")
class EarlyStopEvent(Event):
    """`[early_stopping]` ends the run.

    Attributes:
        metric: the metric that is watched
        mode: `min` or `max`: which values of it are better
        best: its best value; `null` if no evaluation gave a number
        best_step: the step with the best value
        waited: evaluations since then, none of which was better
        step: the last step of the run
    """

    metric: str
    mode: Literal["min", "max"]
    best: float | None
    best_step: int
    waited: int
    step: int


@event_type("report")
class ReportEvent(Event):
    """The config's `report` has returned.

    Attributes:
        text: what it returned
    """

    text: str


@event_type("checkpoint")
class CheckpointEvent(Event):
    """A checkpoint is complete on the disks.

    Attributes:
        step: its step
        path: its folder
        seconds: how long saving it took
        bytes: size of its files
    """

    step: int
    path: str
    seconds: float
    bytes: int


@event_type("best")
class BestEvent(Event):
    """With `checkpoint.best`: a checkpoint is the best so far.

    Attributes:
        step: its step
        metric: the metric that decides
        value: value of the metric
    """

    step: int
    metric: str
    value: float


@event_type("summary")
class SummaryEvent(Event):
    """Training has ended.

    Attributes:
        steps: optimizer steps of the whole run
        is_cut_short: whether it was stopped before its end
        loss: loss of the last step
        metrics: the last evaluation
        loss_scale: with `[loss_scaling]`: the scale at the end
        skipped_steps: with `[loss_scaling]`: steps that were skipped
        parameters_sha256: hash of all parameters and buffers
        hosts: what decides the bits of the results on each stage's host
        memory: bytes of each stage's process: `idle` when its model was built, and `peak`; on a
            GPU, what torch has allocated there
        best: with `checkpoint.best`: `step`, `metric`, `value` and `path` of the best checkpoint
        plan: with a measured balance, unless layers have moved: `balance`, `predicted_step_s` and
            `measured_step_s`, a median, under the options at the end; `wrong`: what was predicted
            worst, in words, or ""
    """

    steps: int
    is_cut_short: bool
    loss: float
    metrics: dict[str, float]
    loss_scale: float | None = None
    skipped_steps: int | None = None
    parameters_sha256: str
    hosts: dict[str, dict[str, str]]
    memory: dict[str, Memory]
    best: BestStep | None = None
    plan: PlanOutcome | None = None


STEPS_KEPT = 100

LOSSES_KEPT = 64
"""Losses that are kept, to compare them with the losses of a replay."""


class EventStream:
    """Stamps the events of a run with `time` and `generation` and passes them on.

    Args:
        report: called with the stamped events.
        generation: returns the number of the current generation.

    Attributes:
        step: the last step that was reported.
        recent_steps: the newest steps that were reported.
        chosen: the options that the run goes on with; None: the config's own.
    """

    def __init__(self, report: Callable[[Event], None], generation: Callable[[], int]) -> None:
        self._report = report
        self._generation = generation
        self._reported_once: set[str] = set()
        self._losses: dict[int, float] = {}
        self._evaluated_step = -1
        self.step = 0
        self.recent_steps: deque[StepEvent] = deque(maxlen=STEPS_KEPT)
        self.chosen: ScheduleEvent | None = None

    def emit(self, event: Event) -> None:
        """Pass on an event."""
        if isinstance(event, ScheduleEvent):
            self.chosen = event
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
        self.recent_steps.append(event)
        self._losses[step] = loss
        self._losses.pop(step - LOSSES_KEPT, None)
        self.emit(event)
