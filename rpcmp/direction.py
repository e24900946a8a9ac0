"""Which of two values of a metric is the better one."""

from __future__ import annotations

import math
import re
from typing import Literal, TypeAlias

Mode: TypeAlias = Literal["min", "max"]

LOWER = {"loss", "error", "mae", "mse", "rmse", "nll", "perplexity", "wer", "cer"}
"""Words in the name of a metric of which less is better."""

HIGHER = {"accuracy", "acc", "f1", "auroc", "auc", "precision", "recall", "score", "iou", "r2"}
"""Words in the name of a metric of which more is better."""


def guess(metric: str) -> Mode | None:
    """What a metric's name says; None where it says nothing.

    The last word decides: an "f1_loss" is a loss.
    """
    for word in reversed(re.split(r"[^a-z0-9]+", metric.lower())):
        if word in LOWER:
            return "min"
        if word in HIGHER:
            return "max"
    return None


def is_better(value: float, than: float | None, mode: Mode, by: float = 0.0) -> bool:
    """Whether `value` is better than another; one that is not a number never is.

    Args:
        than: None, where there is none yet.
        by: how much better it has to be, more than.
    """
    if math.isnan(value):
        return False
    if than is None:
        return True
    return value < than - by if mode == "min" else value > than + by
