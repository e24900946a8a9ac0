"""Recompute activations in the backward instead of keeping them: `recompute = true`.

Also called activation checkpointing (arXiv:1604.06174). The first forward builds its graph as
usual, which tells which outputs are differentiable, but saves no tensor in it. The backward runs
the forward again. That draws the same random numbers, because every layer is seeded, and starts
from the same buffers: batch normalization must not count a micro-batch twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rpcmp.pipelining import pytree
from rpcmp.pipelining.devices import CPU
from rpcmp.rpc.messages import StageOutputs
from rpcmp.worker.boundary import Differentiated, Gradients, LocalTape
from rpcmp.worker.copies import Arriving, Copies, tensors_in
from rpcmp.worker.weight_grad import Splitter, WeightGradients


class Copy(NamedTuple):
    """A module's buffer and its earlier value."""

    owner: dict[str, Tensor | None]
    name: str
    buffer: Tensor | None
    value: Tensor | None

    @property
    def has_changed(self) -> bool:
        if self.owner[self.name] is not self.buffer:
            return True
        if self.buffer is None or self.value is None:
            return False
        return not torch.equal(self.buffer, self.value)


class Buffers:
    """The buffers of a stage that change in a forward, in place or by assignment.

    The first micro-batch shows by value which ones do: batch normalization does not increase the
    version of its buffers. Large constants, such as masks, are only copied then.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._candidates = [
            (module._buffers, name) for module in modules for name in module._buffers
        ]
        self._is_known = False

    def copy(self) -> list[Copy]:
        buffers = [(owner, name, owner[name]) for owner, name in self._candidates]
        return [Copy(*one, None if one[-1] is None else one[-1].clone()) for one in buffers]

    def learn(self, before: list[Copy]) -> None:
        if not self._is_known:
            self._candidates = [(copy.owner, copy.name) for copy in before if copy.has_changed]
            self._is_known = True


def _restore(copies: list[Copy]) -> None:
    """Restore the buffers of `Buffers.copy` and their values."""
    with torch.no_grad():
        for owner, name, buffer, value in copies:
            owner[name] = buffer
            if buffer is not None and value is not None:
                buffer.copy_(value)


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
        buffers: Buffers,
        splitter: Splitter,
        weights: WeightGradients,
        arriving: Arriving | None = None,
    ) -> None:
        self._compute = compute
        self._received = list(received)
        self._copies = copies
        self._arriving = arriving
        self._buffers = buffers
        self._splitter = splitter
        self._weights = weights
        self._before: list[Copy] = []

    def forward(self) -> Any:
        """Return the stage's outputs, on a graph that cannot be differentiated."""
        self._before = self._buffers.copy()
        tape = self._tape()
        with torch.autograd.graph.saved_tensors_hooks(_drop, _never):
            outputs = self._compute(tape.inputs)
        self._buffers.learn(self._before)
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
        after = self._buffers.copy()
        _restore(self._before)
        try:
            tape = LocalTape(self._received, self._copies, self._arriving)
            self.free()
            with torch.enable_grad(), self._weights.watch():
                self._splitter.calibrate(tape.leave(self._compute(tape.inputs)))
            return tape.backward(gradients)
        finally:  # after the backward, to which batch normalization hands its buffers
            _restore(after)

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
