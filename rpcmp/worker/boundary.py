"""The edge between a stage's own autograd graph and the distributed one.

    distributed tape   upstream ══ received ──[Boundary]── outputs, one a (reader, input) ══ readers
                                                  │
    local tape                     leaves ── the stage's modules ── local outputs

Inside a stage the forward runs under an ordinary local tape; distributed autograd sees one node.
Its backward hands the work to the stage's compute thread and waits. That is what lets a schedule
decide when a backward runs, and what makes everything else local: gradients accumulate in `.grad`,
so any torch optimizer works, and the stage may use any device, since boundary tensors are on the
host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rpcmp import tree
from rpcmp.work import Outputs

Gradients = Sequence[Tensor | None]


class LocalTape:
    """The part of one micro-batch's graph that lies inside a stage.

    Args:
        received: what the stage has received, in the order of its inputs; float tensors that
            require grad get a gradient.
        device: where the stage computes.
    """

    def __init__(self, received: Sequence[Outputs], device: torch.device) -> None:
        self._device = device
        self._leaves: list[Tensor] = []
        self._leaves_of: list[tuple[int, int, bool]] = []
        self._outputs: list[Tensor] = []
        self.inputs = [self._enter(outputs) for outputs in received]

    def _enter(self, outputs: Outputs) -> Any:
        start = len(self._leaves)
        value = tree.map_tensors(self._leaf, outputs.value)
        self._leaves_of.append((start, len(self._leaves), outputs.presence is not None))
        return value

    def _leaf(self, received: Tensor) -> Tensor:
        leaf = received.detach().to(self._device)
        self._leaves.append(leaf)
        if not received.requires_grad:
            return leaf
        # A clone, because the user's first layer may work in place and a leaf must not change.
        return leaf.requires_grad_().clone()

    def leave(self, outputs: Any) -> list[Tensor]:
        """Note what the stage has computed; returns its tensors, still on the local tape."""
        self._outputs = tree.tensors(outputs)
        return self._outputs

    def backward(self, gradients: Gradients) -> list[Tensor | None]:
        """Differentiate the stage.

        Args:
            gradients: for each tensor of the outputs, its gradient or None.

        Returns:
            For each input, the gradients of its tensors (host, contiguous, or None) and, where it
            came with a presence, that one's gradient.
        """
        pairs = [
            (output, gradient.to(self._device))
            for output, gradient in zip(self._outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        result: list[Tensor | None] = []
        for start, end, has_presence in self._leaves_of:
            grads = [_to_host(leaf.grad) for leaf in self._leaves[start:end]]
            result += grads
            if has_presence:
                result.append(torch.tensor([float(grad is not None) for grad in grads]))
        self.free()
        return result

    def free(self) -> None:
        """Let go of all activations."""
        self._leaves.clear()
        self._outputs.clear()
        self.inputs.clear()


class Boundary(torch.autograd.Function):
    """The one node of a stage in the distributed graph of a micro-batch."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        run_backward: Callable[[Gradients], list[Tensor | None]],
        outputs: list[Tensor],
        constants: Sequence[Tensor],
        anchor: Tensor,
        *received: Tensor,
    ) -> tuple[Tensor, ...]:
        """Returns `outputs`, connected to `received`.

        Args:
            run_backward: gets the gradients of `outputs`, returns those of `received`; blocks.
            outputs: host tensors of their own storage. In a list, which hides them from the tape.
            constants: those of `outputs` that depend on nothing that is trained.
            anchor: requires grad, so that there is a node even where nothing received does.
            received: all that came from other stages.
        """
        ctx.run_backward = run_backward  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        run_backward, ctx.run_backward = ctx.run_backward, None
        return (None, None, None, None, *run_backward(gradients))


def connect(
    run_backward: Callable[[Gradients], list[Tensor | None]],
    outputs: list[Tensor],
    received: Sequence[Outputs],
    constants: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """`outputs` as the distributed tape shall see them: results of all that was `received`.

    `constants`, a part of them, get no gradient, so their readers need not compute one.
    """
    edges: list[Tensor] = []
    for answer in received:
        edges += tree.tensors(answer.value)
        if answer.presence is not None:
            edges.append(answer.presence)
    anchor = torch.empty(0, requires_grad=True)
    with torch.enable_grad():
        apply: Callable[..., tuple[Tensor, ...]] = Boundary.apply
        return apply(run_backward, outputs, constants, anchor, *edges)


def sum_gradients(contributions: Sequence[Tensor | None]) -> Tensor | None:
    """The sum of the readers' gradients, latest reader first, whoever answered first.

    Addition of floats is not associative. Plain autograd visits the readers of a value in the
    reverse order of their creation, so this order gives the bits of one process.
    """
    total: Tensor | None = None
    for gradient in reversed(contributions):
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total


def _to_host(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.to("cpu").contiguous()
