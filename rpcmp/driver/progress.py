"""How far a run has come: all that the driver itself has to know to go on from a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self


@dataclass(frozen=True)
class Progress:
    """What the driver is right after an optimizer step.

    Attributes:
        step: how many are done.
        epoch: of the last of them, counted from 1.
        batch: mini-batches done in that epoch.
        loss: the last step's.
        epoch_loss: the sum of the losses of that epoch's steps, for schedulers that watch it.
        metrics: of the last evaluation before.
        is_saved: whether a checkpoint has all this already.
        since_saved: seconds since the run's last checkpoint, when it went on from here.
        has_ended_epoch: whether what follows an epoch's last step has been done as well.
    """

    step: int = 0
    epoch: int = 1
    batch: int = 0
    loss: float = math.nan
    epoch_loss: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    is_saved: bool = False
    since_saved: float = 0.0
    has_ended_epoch: bool = False

    def after(self, step: int, epoch: int, loss: float) -> Self:
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
        return cls(**{name: value for name, value in message.items() if name in names})
