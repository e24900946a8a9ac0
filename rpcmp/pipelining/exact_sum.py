"""The sum of losses and of means, which may be of any size, and not finite. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable


def exact_sum(values: Iterable[float]) -> float:
    """The sum, rounded once whatever the order; where that does not exist what torch's would be.

    That is NaN for infinities of both signs, and infinite where it grows too large on the way:
    `math.fsum` raises there.
    """
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return sum(values)
