"""Metrics for `[metrics]`: what comes with rpcmp, and the two kinds that there are.

a function of (outputs, targets)           a mean over samples: computed at the sink, where both
                                           are, micro-batch by micro-batch
a class with update, compute and reset     anything at all (F1, AUROC, a correlation): computed
                                           on the driver, which is sent the outputs for it
"""

from __future__ import annotations

from typing import Any

import torch

METHODS = ("update", "compute", "reset")
"""What a metric with a state has; as torchmetrics calls them."""


def keeps_state(metric: Any) -> bool:
    """Whether a metric, or the class of one, is of the second kind.

    One without `reset` is meant to be: that it lacks something is for others to say.
    """
    return hasattr(metric, "update") and hasattr(metric, "compute")


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Share of samples whose largest output is the target.

    Args:
        outputs: scores, of shape (samples, classes) or (samples, ..., classes).
        targets: class indices, int64, of shape (samples,) or (samples, ...).

    Returns:
        A float32 scalar between 0 and 1.
    """
    return (outputs.argmax(dim=-1) == targets).float().mean()
