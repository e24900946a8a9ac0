"""The best evaluation so far, whose step is kept among the checkpoints. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rpcmp.direction import Mode, is_better


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
