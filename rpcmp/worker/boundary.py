"""The edge between a stage's own autograd graph and the distributed one.

    distributed tape   upstream ══ received ──[Boundary]── outputs, one a (reader, input) ══ readers
                                                  │
    local tape                     leaves ── the stage's modules ── local outputs

Inside a stage the forward runs under an ordinary local tape; distributed autograd sees one node.
Its backward hands the work to the stage's compute thread and waits. That is what lets a schedule
decide when a backward runs, and what makes everything else local: gradients accumulate in `.grad`,
so any torch optimizer works, and the stage may use any device, since what others read of it is
copied: see `copies`.

A stage that recomputes its activations has a Replay in place of the local tape; see `recompute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from rpcmp.pipelining import pytree
from rpcmp.rpc.messages import StageOutputs
from rpcmp.worker.copies import Arriving, Copies, from_wire_dtype, tensors_in

Gradients = Sequence[Tensor | None]

Differentiated = tuple[list[Tensor | None], dict[int, list[int]]]
"""Gradients of all inputs, and which do not exist; see `LocalTape.backward`."""


class LocalTape:
    """The part of one micro-batch's graph inside a stage.

    Attributes:
        inputs: `received` on the stage's device, at the start of the local tape.

    Args:
        arriving: their tensors, if copies have been started.
    """

    def __init__(
        self, received: Sequence[StageOutputs], copies: Copies, arriving: Arriving | None = None
    ) -> None:
        self._copies = copies
        self._gradients: list[Tensor | None] = []
        self._outputs: list[Tensor] = []
        self._received = [pytree.tensors(outputs.value) for outputs in received]
        self._has_token = [outputs.token is not None for outputs in received]
        self._shared = [outputs.shared for outputs in received]
        arriving = arriving or copies.to_device(tensors_in(received))
        tensors = from_wire_dtype(received, arriving())
        needed = [tensor.requires_grad for of_input in self._received for tensor in of_input]
        entered = iter(self._enter(tensors, needed))
        self.inputs: list[Any] = [
            pytree.map_tensors(lambda _: next(entered), outputs.value) for outputs in received
        ]

    def leave(self, outputs: Any) -> list[Tensor]:
        """Record the stage's outputs; return their tensors, still on the local tape."""
        self._gradients.clear()  # of a layer that differentiates in its forward
        self._outputs = pytree.tensors(outputs)
        return self._outputs

    def prepare(self) -> None:
        """Start what the backward needs."""

    def backward(self, gradients: Gradients) -> Differentiated:
        """Differentiate the stage, and write the gradients of inputs in shared memory there.

        The results are there once `Copies.when_made` says so.

        Returns:
            The gradient of each other received tensor, tokens included, contiguous on the host, or
            None. And for each input of those, by its index, which of its tensors should have got a
            gradient and did not.
        """
        pairs = [
            (output, gradient.to(self._copies.device))
            for output, gradient in zip(self._outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            outputs, wanted = zip(*pairs, strict=True)
            apply: Callable[..., Tensor] = Root.apply
            with torch.enable_grad():
                root = apply(wanted, *outputs)
            torch.autograd.backward(root)  # stage.py [10]
        arrived = iter(self._gradients)
        result: list[Tensor | None] = []
        none: dict[int, list[int]] = {}
        for index, (received, has_token, shared) in enumerate(
            zip(self._received, self._has_token, self._shared, strict=True)
        ):
            for place in shared:
                if place.requires_grad:
                    place.give_gradient(next(arrived, None), self._copies.write)
            if shared:
                received = []
            grads = [
                self._to_host(next(arrived, None), tensor.dtype) if tensor.requires_grad else None
                for tensor in received
            ]
            without = [
                i for i, grad in enumerate(grads) if grad is None and received[i].requires_grad
            ]
            if without:
                none[index] = without
            result += [*grads, *([None] if has_token else [])]
        self.free()
        return result, none

    def free(self) -> None:
        self._received.clear()
        self._shared.clear()
        self._gradients.clear()
        self._outputs.clear()
        self.inputs.clear()

    def _to_host(self, gradient: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if gradient is None else self._copies.to_host(gradient, dtype)

    def _enter(self, tensors: list[Tensor], needed: list[bool]) -> list[Tensor]:
        """Make the tensors that need a gradient results of an Entry."""
        if not any(needed):
            return tensors
        apply: Callable[..., tuple[Tensor, ...]] = Entry.apply
        inner = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
        anchor = torch.empty(0, requires_grad=True)
        entered = iter(apply(self._gradients.extend, inner, anchor))
        return [next(entered) if need else t for t, need in zip(tensors, needed, strict=True)]


class Root(torch.autograd.Function):
    """The last node of a stage's local tape: where its backward starts.

    `torch.autograd.backward(outputs, gradients)` would do without, but imports sympy to compare
    shapes: 500 modules and 0.3 s in every worker's first backward. Here the engine compares them.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, gradients: Sequence[Tensor], *outputs: Tensor) -> Tensor:
        ctx.gradients = gradients  # type: ignore[attr-defined]
        return torch.zeros((), device=outputs[0].device)

    @staticmethod
    def backward(ctx: Any, *of_scalar: Tensor | None) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return (None, *gradients)


class Entry(torch.autograd.Function):
    """The first node of a stage's local tape, at which the gradients of its inputs arrive."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        set_gradients: Callable[[Gradients], None],
        tensors: list[Tensor],
        anchor: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return `tensors` as results of this node, which the first layer may change in place.

        Args:
            tensors: in a list, which hides them from the tape: nothing is copied.
            anchor: requires grad, so that they do.
        """
        ctx.set_gradients = set_gradients  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.set_gradients(gradients)
        return (None, None, None)


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
        """Return `outputs`, connected to `received`.

        Args:
            run_backward: turns gradients of `outputs` into gradients of `received`; blocks.
            outputs: host tensors of their own storage. In a list, which hides them from the tape.
            constants: the outputs that depend on nothing that is trained.
            anchor: requires grad, so that there is a node even if nothing received does.
            received: all tensors from other stages.
        """
        ctx.run_backward = run_backward  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*constants)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        run_backward, ctx.run_backward = ctx.run_backward, None
        return (None, None, None, None, *run_backward(gradients))  # stage.py [9]


def connect(
    run_backward: Callable[[Gradients], list[Tensor | None]],
    outputs: list[Tensor],
    received: Sequence[Tensor],
    constants: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Return `outputs` as results of `received` on the distributed tape.

    The outputs in `constants` get no gradient, so that their readers need not compute one.
    """
    anchor = torch.empty(0, requires_grad=True)
    with torch.enable_grad():
        apply: Callable[..., tuple[Tensor, ...]] = Boundary.apply
        return apply(run_backward, outputs, constants, anchor, *received)  # stage.py [8]


def tensors_of(answers: Iterable[StageOutputs]) -> list[Tensor]:
    """Return the tensors of some answers that torch RPC carries, with each one's token last."""
    return [
        tensor
        for outputs in answers
        for tensor in (
            *(() if outputs.shared else pytree.tensors(outputs.value)),
            *(() if outputs.token is None else (outputs.token,)),
        )
    ]


def sum_gradients(contributions: Sequence[Tensor | None]) -> Tensor | None:
    """Sum the readers' gradients, latest reader first, in whatever order they arrived.

    Addition of floats is not associative. Plain autograd visits the readers of a value in the
    reverse order of their creation, so this order gives the bits of one process.
    """
    total: Tensor | None = None
    for gradient in reversed(contributions):
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total
