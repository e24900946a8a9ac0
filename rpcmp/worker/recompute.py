"""Activation recompute: keep what a stage received, and run its forward again in the backward.

Also called activation checkpointing (arXiv:1604.06174). The first forward builds its graph as
always, so that it is known which outputs are differentiable, but saves no tensor in it. The second
draws the same random numbers, because every layer is seeded, and finds the buffers as the first one
found them: batch normalization must not count a micro-batch twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rpcmp import tree
from rpcmp.split import Splitter, WeightGradients
from rpcmp.work import Outputs
from rpcmp.worker.boundary import Differentiated, Gradients, LocalTape

Forward = Callable[[list[Any]], Any]

Copies = list[tuple[Tensor, Tensor]]
"""Buffers and values that they had."""


class Buffers:
    """A stage's buffers, of which some change in a forward.

    The first micro-batch shows which, by value: batch normalization does not count up the version
    of what it changes. Large constants, such as masks, are copied only then.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._candidates = list(buffers)
        self._is_known = False

    def copy(self) -> Copies:
        """The buffers that may change, with their values now."""
        return [(buffer, buffer.clone()) for buffer in self._candidates]

    def learn(self, before: Copies) -> None:
        """Find out what a forward has changed, the first time."""
        if not self._is_known:
            self._candidates = [buffer for buffer, old in before if not torch.equal(buffer, old)]
            self._is_known = True


def restore(copies: Copies) -> None:
    """Give buffers the values of `Buffers.copy` back."""
    with torch.no_grad():
        for buffer, value in copies:
            buffer.copy_(value)


class Replay:
    """A micro-batch whose activations are computed twice; otherwise like a LocalTape.

    Args:
        compute: the stage's forward, of its inputs.
        received: what the stage has received.
        device: where it computes.
        buffers: the stage's.
        splitter, weights: collect the weight gradients of the second forward.
    """

    def __init__(
        self,
        compute: Forward,
        received: Sequence[Outputs],
        device: torch.device,
        buffers: Buffers,
        splitter: Splitter,
        weights: WeightGradients,
    ) -> None:
        self._compute = compute
        self._received = list(received)
        self._device = device
        self._buffers = buffers
        self._splitter = splitter
        self._weights = weights
        self._before: Copies = []

    def forward(self) -> Any:
        """The stage's outputs; on a graph that cannot be differentiated."""
        self._before = self._buffers.copy()
        # The first layer may work in place, and the second forward needs what the first one got.
        copies = [
            outputs._replace(value=tree.map_tensors(_copy, outputs.value))
            for outputs in self._received
        ]
        tape = LocalTape(copies, self._device)
        with torch.autograd.graph.saved_tensors_hooks(_drop, _never):
            outputs = self._compute(tape.inputs)
        self._buffers.learn(self._before)
        return outputs

    def backward(self, gradients: Gradients) -> Differentiated:
        """The second forward, and then what `LocalTape.backward` does."""
        after = self._buffers.copy()
        restore(self._before)
        try:
            tape = LocalTape(self._received, self._device)
            self.free()
            with torch.enable_grad(), self._weights.watch():
                self._splitter.calibrate(tape.leave(self._compute(tape.inputs)))
            return tape.backward(gradients)
        finally:  # after the backward, to which batch normalization hands its buffers
            restore(after)

    def free(self) -> None:
        """Let go of what was received."""
        self._received.clear()
        self._before.clear()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _drop(tensor: Tensor) -> None:
    return None


def _never(packed: None) -> Tensor:
    raise RuntimeError(
        "a layer differentiates inside of its forward, which does not go with recompute = true"
    )
