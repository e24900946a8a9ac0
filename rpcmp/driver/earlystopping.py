"""When a run ends because evaluations do not get better any more. Pure.

value     0.50   0.40   0.41   nan    0.39   0.40   0.395  0.42        mode = "min"
waited       0      0      1     2       0      1       2     3        patience = 3: over
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from rpcmp.direction import Mode, is_better
from rpcmp.sections import EarlyStoppingConfig


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
