"""How far a run has come: all that the driver itself has to know to go on from a step.

The best evaluation so far, whose step is kept among the checkpoints. Pure.

When a run ends because evaluations do not get better any more. Pure.

value     0.50   0.40   0.41   nan    0.39   0.40   0.395  0.42        mode = "min"
waited       0      0      1     2       0      1       2     3        patience = 3: over
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from rpcmp.config.run_sections import EarlyStoppingConfig, Mode, is_better
from rpcmp.config.schema import Config
from rpcmp.driver.loss_scaler import ScalerState


@dataclass(frozen=True)
class Best:
    """The best evaluation so far.

    Attributes:
        metric: by which it is the best.
        mode: whether less or more of it is better.
        value: of the metric.
        step: the optimizer step that it follows.
    """

    metric: str
    mode: Mode
    value: float
    step: int

    def against(self, before: Self | None) -> Self | None:
        """The better of this one and `before`, by the same metric, if any is; NaN never is.

        Of equal ones the earlier stays.
        """
        than = None if before is None else before.value
        return self if is_better(self.value, than, self.mode) else before


@dataclass(frozen=True)
class EarlyStopping:
    """What has come of the evaluations so far.

    Attributes:
        metric: that is watched.
        mode: whether less or more of it is better.
        best: the best value; None before there is one.
        best_step: the step that it is of.
        waited: evaluations since then, none of which was better by more than `min_delta`.
        step: the one of the last evaluation that was counted.
    """

    metric: str
    mode: Mode
    best: float | None = None
    best_step: int = 0
    waited: int = 0
    step: int = 0

    @classmethod
    def begin(cls, section: EarlyStoppingConfig, before: Self | None) -> Self:
        """Where a run begins: from what it was before, unless something else is watched now."""
        fresh = cls(section.metric, section.direction)
        if before is None or (before.metric, before.mode) != (fresh.metric, fresh.mode):
            return fresh
        return before

    def after(self, step: int, value: float, min_delta: float) -> Self:
        """After one more evaluation; one that is done again, since a fault, counts once.

        Args:
            step: the optimizer step that it follows.
            value: of the metric; NaN is no improvement.
            min_delta: what an improvement has to be more than.
        """
        if step <= self.step:
            return self
        if is_better(value, self.best, self.mode, min_delta):
            return replace(self, best=value, best_step=step, waited=0, step=step)
        return replace(self, waited=self.waited + 1, step=step)

    def is_over(self, patience: int) -> bool:
        """Whether the run has waited long enough."""
        return self.waited >= patience


@dataclass(frozen=True)
class TrainingProgress:
    """What the driver is right after an optimizer step.

    Attributes:
        step: how many are done.
        epoch: of the last of them, counted from 1.
        batch: mini-batches done in that epoch.
        loss: the last step's.
        epoch_loss: the sum of the losses of that epoch's steps, for schedulers that watch it.
        metrics: of the last evaluation before.
        stopping: what early stopping makes of all of them; None: it is off.
        best: which of them was the best; None: no step is kept for it, or there was none.
        is_saved: whether a checkpoint has all this already.
        since_saved: seconds since the run's last checkpoint, when it went on from here.
        has_ended_epoch: whether the schedulers have had the epoch's last step as well.
        evaluated_after: the step that the last evaluation followed; 0: there was none.
        scaler: the loss scaler's state; None: the loss is not scaled.
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

    def after(self, step: int, epoch: int, loss: float, scaler: ScalerState | None = None) -> Self:
        """After one more step."""
        goes_on = epoch == self.epoch
        return replace(
            self,
            step=step,
            epoch=epoch,
            batch=self.batch + 1 if goes_on else 1,
            loss=loss,
            epoch_loss=self.epoch_loss + loss if goes_on else loss,
            is_saved=False,
            has_ended_epoch=False,
            scaler=scaler,
        )

    def under(self, config: Config) -> Self:
        """The same under a config that may be another: what was decided by other rules is void."""
        stopping, best = None, self.best
        if (section := config.early_stopping) is not None:
            stopping = EarlyStopping.begin(section, self.stopping)
        saved = config.checkpoint
        if best is not None and (
            saved is None
            or saved.best is None
            or (best.metric, best.mode) != (saved.best, saved.best_direction)
        ):
            best = None
        return replace(self, stopping=stopping, best=best)

    def evaluated(self, config: Config, values: dict[str, float]) -> Self:
        """After an evaluation: what it gave, and what follows from it."""
        stopping, best = self.stopping, self.best
        if (section := config.early_stopping) is not None and stopping is not None:
            stopping = stopping.after(self.step, values[section.metric], section.min_delta)
        if (saved := config.checkpoint) is not None and saved.best is not None:
            found = Best(saved.best, saved.best_direction, values[saved.best], self.step)
            best = found.against(best)
        return replace(
            self, metrics=values, stopping=stopping, best=best, evaluated_after=self.step
        )

    @property
    def mean_loss(self) -> float:
        """Of the epoch's steps."""
        return self.epoch_loss / self.batch

    def message(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """What `message` gave, whatever else the other end has added."""
        names = {field.name for field in fields(cls)}
        found = {name: value for name, value in message.items() if name in names}
        kinds = (("stopping", EarlyStopping), ("best", Best), ("scaler", ScalerState))
        for name, kind in kinds:
            if found.get(name) is not None:
                found[name] = kind(**found[name])
        return cls(**found)
