"""The unsplit model in one process: the whole mini-batch at once, or micro-batch by micro-batch.

Small slices stay in the caches, a whole mini-batch calls each kernel once: which of the two is
faster depends on the model, so the benchmark tries both.
"""

from __future__ import annotations

import time

from torch import Tensor

from rpcmp.bench.peers import part
from rpcmp.bench.peers.order import WHOLE_BATCH, Order
from rpcmp.process.channel import Message


class OneProcess:
    """The peer "one process"; the number of threads is set by its environment."""

    def __init__(self, order: Order) -> None:
        self._config = order.config

    def build(self, way: str) -> None:
        """See Peer; the ways are ONE_PROCESS_WAYS."""
        names = part.layer_names(self._config)
        self._parts = [part.build(self._config, i, layers) for i, layers in enumerate(names)]
        self._batches = part.endless_batches(self._config)
        self._num_slices = 1 if way == WHOLE_BATCH else self._config.num_microbatches
        self._loss = part.slice_loss(self._config, self._num_slices)
        inputs, _ = next(part.endless_batches(self._config))
        part.require_equal_microbatches(inputs, self._num_slices)

    def run(self, steps: int) -> Message:
        """See Peer. The mini-batches are loaded before the clock starts."""
        batches = [next(self._batches) for _ in range(steps)]
        begin = time.monotonic_ns()
        losses = [self._step(*batch) for batch in batches]
        return {"begin": begin, "end": time.monotonic_ns(), "losses": losses}

    def _step(self, inputs: Tensor, targets: Tensor) -> float:
        count = self._num_slices
        slices = zip(inputs.chunk(count), targets.chunk(count), strict=True)
        loss = sum(self._slice(x, y) for x, y in slices)
        for each in self._parts:
            each.step()
        return loss

    def _slice(self, x: Tensor, y: Tensor) -> float:
        for each in self._parts:
            x = each.module(x)
        loss = self._loss(x, y)
        loss.backward()
        return loss.item()
