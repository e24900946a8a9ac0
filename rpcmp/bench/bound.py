"""How short a step could be at best, given how long each stage computes when it is alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from rpcmp.simulation import Times

Bound = Callable[[Sequence[Times], int], float]
"""Seconds of a step, of the stages' times in order and the number of micro-batches."""


def fill_then_no_bubble(stages: Sequence[Times], num_microbatches: int) -> float:
    """A stage waits until the first micro-batch reaches it and then never again.

    The slowest stage decides. With equal stages this is what zero-bubble schedules reach:
    (stages - 1) x F + micro-batches x (F + B + W). Transfers and the optimizer take no time.

    It is that of one step by itself, with one stage a process. Where the first stage begins the
    next step while the last one still works, the mean over many steps may fall below it, and so
    may schedules with two half stages a process, whose pipeline fills in half the time.
    """
    arrivals = accumulate((stage.forward for stage in stages), initial=0.0)
    return max(
        arrival + num_microbatches * stage.total
        for arrival, stage in zip(arrivals, stages, strict=False)
    )
