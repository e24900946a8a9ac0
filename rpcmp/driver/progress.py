"""The progress of a run: the driver's state after a step, and when that state is saved.

The state includes the best evaluation so far, whose checkpoint is kept, and the counter of early
stopping, which ends a run whose evaluations do not improve any more:

    value     0.50   0.40   0.41   nan    0.39   0.40   0.395  0.42        mode = "min"
    waited       0      0      1     2       0      1       2     3        patience = 3: over

Whether a step is saved is decided before it starts, since every stage copies its own state right
after the step. Checkpoints are written while later steps are computed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from pydantic import TypeAdapter

from rpcmp.config.run_sections import EarlyStoppingConfig, Mode, is_better
from rpcmp.config.schema import Config
from rpcmp.driver.loss_scaler import ScalerState


@dataclass(frozen=True)
class Best:
    """The best evaluation so far; `step` is the optimizer step before it."""

    metric: str
    mode: Mode
    value: float
    step: int

    def better_of(self, before: Self | None) -> Self | None:
        """Return the better of this evaluation and `before`; of equal ones, the earlier.

        NaN is never better; if this is NaN and `before` is None, there is no best.
        """
        best_value = None if before is None else before.value
        return self if is_better(self.value, best_value, self.mode) else before


@dataclass(frozen=True)
class EarlyStopping:
    """The state of early stopping.

    Attributes:
        best: the best value so far; None before the first.
        best_step: the step with the best value.
        waited: evaluations since then without an improvement by more than `min_delta`.
        step: the step of the last evaluation that was counted.
    """

    metric: str
    mode: Mode
    best: float | None = None
    best_step: int = 0
    waited: int = 0
    step: int = 0

    @classmethod
    def resume(cls, section: EarlyStoppingConfig, before: Self | None) -> Self:
        """Continue from the state `before`, unless the config watches another metric now."""
        fresh = cls(section.metric, section.direction)
        if before is None or (before.metric, before.mode) != (fresh.metric, fresh.mode):
            return fresh
        return before

    def after(self, step: int, value: float, min_delta: float) -> Self:
        """Return the state after one more evaluation; one that a fault repeats counts once."""
        if step <= self.step:
            return self
        if is_better(value, self.best, self.mode, min_delta):
            return replace(self, best=value, best_step=step, waited=0, step=step)
        return replace(self, waited=self.waited + 1, step=step)

    def is_over(self, patience: int) -> bool:
        return self.waited >= patience


@dataclass(frozen=True)
class TrainingProgress:
    """The driver's state right after an optimizer step.

    Attributes:
        epoch: epoch of the last step, from 1.
        batch: mini-batches done in that epoch.
        epoch_loss: sum of the losses of that epoch's steps, for schedulers that watch it.
        metrics: results of the last evaluation.
        stopping: state of early stopping; None: it is off.
        best: the best evaluation; None: there is no evaluation yet, or the best is not kept.
        is_saved: whether a checkpoint of this step exists.
        since_saved: seconds since the run's last checkpoint, when the run resumed here.
        has_ended_epoch: whether the schedulers have stepped for the end of the epoch.
        evaluated_after: the step before the last evaluation; 0: there was none.
        scaler: state of the loss scaler; None: the loss is not scaled.
        stream: the Position of a `data.train` that is a stream, as text.
        options: the fastest ScheduleOptions so far, as plain data, and those that are on trial, or
            were when a group was lost.
    """

    step: int = 0
    epoch: int = 1
    batch: int = 0
    loss: float = math.nan
    epoch_loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    stopping: EarlyStopping | None = None
    best: Best | None = None
    is_saved: bool = False
    since_saved: float = 0.0
    has_ended_epoch: bool = False
    evaluated_after: int = 0
    scaler: ScalerState | None = None
    stream: str = ""
    options: list[dict[str, Any]] = field(default_factory=list)

    def after(
        self,
        step: int,
        epoch: int,
        loss: float,
        scaler: ScalerState | None = None,
        stream: str = "",
    ) -> Self:
        """Return the progress after one more step."""
        is_same_epoch = epoch == self.epoch
        return replace(
            self,
            step=step,
            epoch=epoch,
            batch=self.batch + 1 if is_same_epoch else 1,
            loss=loss,
            epoch_loss=self.epoch_loss + loss if is_same_epoch else loss,
            is_saved=False,
            has_ended_epoch=False,
            scaler=scaler,
            stream=stream,
        )

    def for_config(self, config: Config) -> Self:
        """Return the progress under a config that may differ; it drops state of other metrics."""
        stopping, best = None, self.best
        if (section := config.early_stopping) is not None:
            stopping = EarlyStopping.resume(section, self.stopping)
        saved = config.checkpoint
        if best is not None and (
            saved is None
            or saved.best is None
            or (best.metric, best.mode) != (saved.best, saved.best_direction)
        ):
            best = None
        return replace(self, stopping=stopping, best=best)

    def evaluated(self, config: Config, values: dict[str, float]) -> Self:
        """Return the progress after an evaluation."""
        stopping, best = self.stopping, self.best
        if (section := config.early_stopping) is not None and stopping is not None:
            stopping = stopping.after(self.step, values[section.metric], section.min_delta)
        if (saved := config.checkpoint) is not None and saved.best is not None:
            this = Best(saved.best, saved.best_direction, values[saved.best], self.step)
            best = this.better_of(best)
        return replace(
            self, metrics=values, stopping=stopping, best=best, evaluated_after=self.step
        )

    @property
    def mean_loss(self) -> float:
        """The mean loss of the epoch's steps so far."""
        return self.epoch_loss / self.batch

    @classmethod
    def from_order(cls, order: Mapping[str, Any]) -> Self:
        """Return the progress that an order to train is to start from.

        Its options are those of the order, which may be predicted, or leave those of the progress.
        """
        before = cls.from_message(order["progress"]) if order["progress"] else cls()
        return replace(before, options=order["options"])

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Return the progress whose `asdict` is in `message`; other keys are ignored."""
        return TypeAdapter(cls).validate_python(dict(message))


MAX_IN_PROGRESS = 2
"""Checkpoints in progress at most; more would need more memory for the data to be written. The next
one that is due waits, so that slow disks slow down training."""

DEFAULT_SECONDS = 300.0
"""Seconds between checkpoints if the config sets no interval."""


class CheckpointCadence:
    """When the checkpoints of one generation are due, and those in progress.

    Args:
        last: the run's last step, which is always saved.
        saved: the step of the checkpoint from which the run resumes; 0: none.
        since: seconds since the run's last checkpoint, or since its start.
    """

    def __init__(self, config: Config, last: int, saved: int = 0, since: float = 0.0) -> None:
        section = config.checkpoint
        self._is_on = section is not None
        self._every_steps = section.every_steps if section else None
        self._every_seconds = section.every_seconds if section else None
        if self._every_steps is None and self._every_seconds is None:
            self._every_seconds = DEFAULT_SECONDS
        self._last = last
        self._changed = threading.Condition()
        self._started_at = time.monotonic() - since
        self._in_progress: set[int] = set()
        self._failed: set[int] = set()
        self._saved = saved

    def start_if_due(self, step: int) -> bool:
        """Start the checkpoint of `step`, the next one, if it is due; return whether it is."""
        if not self._is_due(step):
            return False
        self.start(step)
        return True

    def would_wait(self, step: int) -> bool:
        """Return whether `start_if_due` would wait for a checkpoint that is in progress."""
        return self._is_due(step) and len(self._in_progress) >= MAX_IN_PROGRESS

    def _is_due(self, step: int) -> bool:
        return self._is_on and (self._is_due_by_steps(step) or self._is_due_by_time())

    def start(self, step: int) -> None:
        """Add the checkpoint of `step`; waits while too many are in progress."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._in_progress) < MAX_IN_PROGRESS)
            self._in_progress.add(step)
            self._saved = step
        self._started_at = time.monotonic()

    def includes(self, step: int) -> bool:
        """Return whether the checkpoint of `step` is in progress, or was the last to be started."""
        return step in self._in_progress or self._saved == step

    def finish(self, step: int, failed: bool = False) -> None:
        """Remove the checkpoint of `step`, which is on the disks, or has failed."""
        with self._changed:
            self._in_progress.discard(step)
            if failed:
                self._failed.add(step)
            self._changed.notify_all()

    def has_failed(self, step: int) -> bool:
        return step in self._failed

    def wait(self) -> None:
        """Wait until no checkpoint is in progress."""
        with self._changed:
            self._changed.wait_for(lambda: not self._in_progress)

    def _is_due_by_steps(self, step: int) -> bool:
        return step == self._last or bool(self._every_steps and step % self._every_steps == 0)

    def _is_due_by_time(self) -> bool:
        if self._every_seconds is None:
            return False
        return time.monotonic() - self._started_at >= self._every_seconds
