"""Metrics with state for the driver, and one for the last stage, with faults in them."""

from __future__ import annotations

from typing import Any

import torch
import zoo  # type: ignore[import-not-found]
from torch import Tensor


def error(outputs: Tensor, targets: Tensor, marker: str = "") -> Tensor:
    """Compute `zoo.error`; the first process that does so dies, and leaves a marker."""
    zoo.die_once(marker)
    found: Tensor = zoo.error(outputs, targets)
    return found


class Fit:
    """Coefficient of determination, which is not the mean over micro-batches.

    Args:
        strikes_in: number of the evaluation in which its process dies, from 1; 0: never.
        marker: a file that is written before its process dies.
    """

    def __init__(self, strikes_in: int = 0, marker: str = "") -> None:
        self._strikes_in = strikes_in
        self._marker = marker
        self._evaluation = 0
        self._seen: list[tuple[Tensor, Tensor]] = []

    def update(self, preds: Tensor, target: Tensor) -> None:
        self._seen.append((preds, target))

    def compute(self) -> dict[str, Any]:
        if self._evaluation == self._strikes_in:
            zoo.die_once(self._marker)
        outputs, targets = (torch.cat(column) for column in zip(*self._seen, strict=True))
        error = (outputs - targets).square().sum()
        spread = (targets - targets.mean()).square().sum()
        return {"r2": 1 - error / spread, "samples": len(targets)}

    def reset(self) -> None:
        self._evaluation += 1
        self._seen.clear()
