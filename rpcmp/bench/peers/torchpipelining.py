"""One rank of torch.distributed.pipelining over Gloo.

Its best: one thread of compute a rank, mini-batches loaded before the clock starts, no outputs
merged, and the loss divided by the number of micro-batches instead of every gradient.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from rpcmp.bench.peers import part
from rpcmp.bench.peers.order import Order
from rpcmp.errors import UnfitError
from rpcmp.process.channel import Message

SINGLE = {"1f1b": Schedule1F1B}
"""Schedules with one stage a rank."""

DOUBLE = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
"""Schedules with two stages a rank. Each of them is half of one of our stages: each rank does the
same work as with one stage, in twice as many actions."""


class TorchRank:
    """The peer "torch.distributed.pipelining"; the ways are the schedules' names."""

    def __init__(self, order: Order) -> None:
        self._order = order
        dist.init_process_group(
            "gloo",
            init_method=f"file://{order.store}",
            rank=order.rank,
            world_size=order.world_size,
        )

    def build(self, way: str) -> None:
        """See Peer."""
        config = self._order.config if way in SINGLE else self._order.halves
        names = part.layer_names(config, 1 if way in SINGLE else 2)
        indices = self._indices(way)
        per_stage = len(names) // self._order.world_size
        self._parts = [part.build(config, i // per_stage, names[i]) for i in indices]
        stages = [
            PipelineStage(each.module, index, len(names), torch.device("cpu"))
            for each, index in zip(self._parts, indices, strict=True)
        ]
        self._is_first, self._is_last = 0 in indices, len(names) - 1 in indices
        inputs, _ = next(part.endless_batches(config))
        part.require_equal_microbatches(inputs, config.num_microbatches)
        self._batches = part.endless_batches(config)
        self._schedule = self._create(way, stages)

    def run(self, steps: int) -> Message:
        """See Peer. All ranks' clocks are this machine's; the barrier comes before they start."""
        batches = [next(self._batches) for _ in range(steps)]
        dist.barrier()
        begin = time.monotonic_ns()
        losses = [self._step(*batch) for batch in batches]
        end = time.monotonic_ns()
        found = [float(sum(each)) for each in losses] if self._is_last else []
        return {"begin": begin, "end": end, "losses": found}

    def _step(self, inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        self._schedule.step(
            *([inputs] if self._is_first else []),
            **({"target": targets, "losses": losses} if self._is_last else {}),
            return_outputs=False,
        )
        for each in self._parts:
            each.step()
        return [loss.detach() for loss in losses]

    def _indices(self, way: str) -> list[int]:
        """Which parts this rank has: its own, of a loop, or of a V that returns to rank 0."""
        rank, size = self._order.rank, self._order.world_size
        if way in SINGLE:
            return [rank]
        return [rank, 2 * size - 1 - rank] if way == "zbv" else [rank, size + rank]

    def _create(self, way: str, stages: list[Any]) -> Any:
        count = self._order.config.num_microbatches
        loss = part.slice_loss(self._order.config, count)
        try:
            if way in SINGLE:
                return SINGLE[way](stages[0], count, loss, scale_grads=False)
            return DOUBLE[way](stages, count, loss, scale_grads=False)
        except ValueError as error:  # how torch refuses a number of micro-batches
            raise UnfitError(str(error)) from error
