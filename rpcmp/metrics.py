"""Metrics for `[metrics]`: means over the samples of a micro-batch."""

from __future__ import annotations

import torch


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Share of samples whose largest output is the target.

    Args:
        outputs: scores, of shape (samples, classes) or (samples, ..., classes).
        targets: class indices, int64, of shape (samples,) or (samples, ...).

    Returns:
        A float32 scalar between 0 and 1.
    """
    return (outputs.argmax(dim=-1) == targets).float().mean()
