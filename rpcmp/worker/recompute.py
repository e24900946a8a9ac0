"""Recompute activations in the backward instead of keeping them: `recompute = true`.

Also called activation checkpointing (arXiv:1604.06174). The first forward builds its graph as
usual, which tells which outputs are differentiable, but saves no tensor in it. The backward runs
the forward again. That draws the same random numbers, because every layer is seeded, and starts
from the same buffers and attributes: batch normalization must not count a micro-batch twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rpcmp.pipelining import pytree
from rpcmp.pipelining.devices import CPU
from rpcmp.rpc.messages import StageOutputs
from rpcmp.worker.boundary import Differentiated, Gradients, LocalTape
from rpcmp.worker.copies import Arriving, Copies, tensors_in
from rpcmp.worker.state.forward_state import ForwardState, StateCopy
from rpcmp.worker.weight_grad import Splitter, WeightGradients


class Replay:
    """A micro-batch whose activations are computed twice; otherwise like a LocalTape.

    Args:
        compute: the stage's forward, of its inputs.
        splitter, weights: collect the weight gradients of the second forward.
        arriving: see LocalTape; for the first one.
    """

    def __init__(
        self,
        compute: Callable[[list[Any]], Any],
        received: Sequence[StageOutputs],
        copies: Copies,
        state: ForwardState,
        splitter: Splitter,
        weights: WeightGradients,
        arriving: Arriving | None = None,
    ) -> None:
        self._compute = compute
        self._received = list(received)
        self._copies = copies
        self._arriving = arriving
        self._state = state
        self._splitter = splitter
        self._weights = weights
        self._before: list[StateCopy] = []

    def forward(self) -> Any:
        """Return the stage's outputs, on a graph that cannot be differentiated."""
        self._before = self._state.copy()
        tape = self._tape()
        with torch.autograd.graph.saved_tensors_hooks(_drop, _never):
            outputs = self._compute(tape.inputs)
        if not self._state.is_known:
            self._state.learn(self._before)
        return outputs

    def _tape(self) -> LocalTape:
        """Return a tape of inputs that the first layer may change, since they are needed again."""
        if self._copies.device != CPU:  # copies anyway
            arriving, self._arriving = self._arriving, None
            return LocalTape(self._received, self._copies, arriving)
        copies = [
            outputs._replace(value=pytree.map_tensors(_copy, outputs.value))
            for outputs in self._received
        ]
        return LocalTape(copies, self._copies)

    def prepare(self) -> None:
        """Start to copy the inputs again, for the second forward."""
        self._arriving = self._copies.to_device(tensors_in(self._received))

    def backward(self, gradients: Gradients) -> Differentiated:
        """Run the forward again, and then `LocalTape.backward`."""
        after = self._state.copy()
        self._state.put_back(self._before)
        try:
            tape = LocalTape(self._received, self._copies, self._arriving)
            self.free()
            with torch.enable_grad(), self._weights.watch():
                self._splitter.calibrate(tape.leave(self._compute(tape.inputs)))
            return tape.backward(gradients)
        finally:  # after the backward, to which batch normalization hands its buffers
            self._state.put_back(after)

    def free(self) -> None:
        self._received.clear()
        self._before.clear()
        self._arriving = None


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _drop(tensor: Tensor) -> None:
    return None


def _never(packed: None) -> Tensor:
    raise RuntimeError(
        "a layer differentiates inside of its forward, which does not go with recompute = true"
    )
