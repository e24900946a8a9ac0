"""Which gradients of a round are final, before the round is over.

One hears when something has been added to a gradient, not whether that was the last time. How often
that happens in a micro-batch is learned from the round before: a parameter is ready when it has
been added to as often as that in all of the micro-batches. Where a model does as it likes, with
layers that it sometimes leaves out, nothing is early, and nothing is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import nn

from rpcmp.worker.weight_grad import AccumulateGradHook


class GradientReadyTracker:
    """Watches the gradients of some parameters; on the compute thread.

    Args:
        parameters: which.
        groups: indices of parameters that are of use only together.
        ready: called with the number of a group when all of it is final.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: Sequence[Sequence[int]],
        ready: Callable[[int], None],
    ) -> None:
        self._groups = groups
        self._ready = ready
        self._group_of = {index: n for n, group in enumerate(groups) for index in group}
        self._per_microbatch: dict[int, int] = {}
        self._counts = [0] * len(parameters)
        self._expected = [0] * len(parameters)
        self._left: list[int] = []
        self._microbatches = 0
        self._is_early = False
        self.told: set[int] = set()
        self._additions = [
            AccumulateGradHook(parameter, functools.partial(self._added, index))
            for index, parameter in enumerate(parameters)
        ]

    def begin(self, num_microbatches: int, is_early: bool) -> None:
        """A round begins.

        Args:
            num_microbatches: that this worker computes of it.
            is_early: whether anybody wants to know what is ready before its end.
        """
        self._microbatches, self._is_early = num_microbatches, is_early
        for additions in self._additions:
            additions.reset()
        self._counts = [0] * len(self._counts)
        self._expected = [
            num_microbatches * self._per_microbatch.get(index, 0)
            for index in range(len(self._counts))
        ]
        self._left = [len(group) for group in self._groups]
        self.told = set()

    def end(self) -> list[int]:
        """The round is over: all that is left is final. Returns the groups that nobody was told of.

        Raises:
            RuntimeError: something that was said to be final has changed.
        """
        for index, (count, expected) in enumerate(zip(self._counts, self._expected, strict=True)):
            if self._group_of[index] in self.told and count != expected:
                raise RuntimeError(
                    "a parameter got more gradients than in the step before, when they had been "
                    "summed already; checkpoints with use_reentrant=True do so: take "
                    "recompute = true, or use_reentrant=False"
                )
        if self._microbatches:
            self._per_microbatch = {
                index: count // self._microbatches
                for index, count in enumerate(self._counts)
                if count and count % self._microbatches == 0
            }
        return [number for number in range(len(self._groups)) if number not in self.told]

    def _added(self, index: int) -> None:
        self._counts[index] += 1
        if not self._is_early or self._counts[index] != self._expected[index]:
            return
        group = self._group_of[index]
        self._left[group] -= 1
        if not self._left[group]:
            self.told.add(group)
            self._ready(group)
