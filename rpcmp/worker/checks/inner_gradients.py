"""Refuse a gradient within a forward that would have only a part of the derivative.

    input ──> stage a ──> h ──┐
      └───────────────────────┴─> stage b: autograd.grad(y, input), a gradient penalty

In one process the derivative of y by the input goes by way of h as well. Here h comes from another
stage, without its graph, and only the direct part would be there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rpcmp.config.topology import Graph, Reference
from rpcmp.errors import ConfigError
from rpcmp.pipelining import pytree


def on_two_ways(graph: Graph, stage: str) -> list[bool]:
    """Return for each input of a stage whether another one was computed from it elsewhere."""

    def reads(producer: str, one: Reference) -> bool:
        return any(
            (each.producer == one.producer and _overlap(each.path, one.path))
            or reads(each.producer, one)
            for each in graph.inputs.get(producer, ())
        )

    read = graph.inputs[stage]
    return [any(reads(other.producer, one) for other in read) for one in read]


def _overlap(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether one of two paths leads through the other: parts of a batch are independent."""
    return all(a == b for a, b in zip(one, other, strict=False))


@contextlib.contextmanager
def whole_derivatives(inputs: Sequence[Any], partial: Sequence[bool]) -> Iterator[None]:
    """Let `torch.autograd.grad` refuse the inputs of a stage that are `partial`, in this block.

    Raises:
        ConfigError: it was called for one of them.
    """
    pairs = zip(inputs, partial, strict=True)
    refused = {
        id(each) for value, is_partial in pairs if is_partial for each in pytree.tensors(value)
    }
    if not refused:
        yield
        return
    grad = torch.autograd.grad

    def checked(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        asked = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if any(id(each) in refused for each in asked):
            raise ConfigError(
                "the forward asks torch.autograd.grad for the derivative by an input of which "
                "another input was computed at another stage: it would lack that part; put both "
                "into one stage"
            )
        return grad(outputs, asked, *args, **kwargs)

    setattr(torch.autograd, "grad", checked)  # noqa: B010
    try:
        yield
    finally:
        setattr(torch.autograd, "grad", grad)  # noqa: B010
