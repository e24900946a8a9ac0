"""How long each stage computes for one micro-batch, alone on the machine: what the bound is of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from rpcmp.bench.peers import part
from rpcmp.bench.peers.order import Order
from rpcmp.process.channel import Message
from rpcmp.simulation import Times

Stage = Callable[[Tensor], Tensor]
Result = TypeVar("Result")


class StageClock:
    """Measures the stages one after the other; the loss belongs to the last one."""

    def __init__(self, order: Order) -> None:
        self._config = order.config

    def build(self, way: str) -> None:
        """See Peer; there is one way."""
        names = part.layer_names(self._config)
        self._parts = [part.build(self._config, i, layers) for i, layers in enumerate(names)]
        inputs, targets = next(part.endless_batches(self._config))
        count = self._config.num_microbatches
        self._loss = part.slice_loss(self._config, count)
        part.require_equal_microbatches(inputs, count)
        self._inputs, self._targets = inputs.chunk(count)[0], targets.chunk(count)[0]

    def run(self, steps: int) -> Message:
        """The medians of `steps` measurements of each stage."""
        x, times = self._inputs, []
        *first, last = (each.module for each in self._parts)
        for module in first:
            times.append(_measure(module, x, steps))
            x = module(x).detach().requires_grad_()
        times.append(_measure(lambda value: self._loss(last(value), self._targets), x, steps))
        return {"stages": times}


def _measure(stage: Stage, x: Tensor, repeats: int) -> Times:
    found = [_measure_once(stage, x) for _ in range(repeats + 1)][1:]  # the first one warms up
    return Times(*(statistics.median(column) for column in zip(*found, strict=True)))


def _measure_once(stage: Stage, x: Tensor) -> tuple[float, float, float]:
    """Seconds of the forward, of the input gradient alone, and of the rest of a whole backward."""
    forward, y = _timed(lambda: stage(x))
    gradient = torch.ones_like(y)
    to_input = 0.0
    if x.requires_grad:
        to_input, _ = _timed(lambda: torch.autograd.grad(y, x, gradient, retain_graph=True))
    whole, _ = _timed(lambda: torch.autograd.backward(y, gradient))
    return forward, to_input, max(0.0, whole - to_input)


def _timed(action: Callable[[], Result]) -> tuple[float, Result]:
    begin = time.perf_counter()
    result = action()
    return time.perf_counter() - begin, result
