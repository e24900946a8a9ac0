"""Refuse gradients that a Function adds of its own, if there is one addition per micro-batch.

    a mini-batch      ──> gradient g          g + a: that of an auxiliary loss is added
    4 micro-batches   ──> 4 times g/4         g + 4a, if that is a mean; g + a, if it is a sum

What it adds is what it gives for outputs whose gradients are zero. That of a whole micro-batch is
compared with that of two parts of it, where the first forward has called Functions of the user's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rpcmp.errors import ConfigError, some_of
from rpcmp.pipelining import pytree, random_streams
from rpcmp.worker.forward_state import ForwardState
from rpcmp.worker.objective import own_tape, rows

MOST_APART = 0.3
"""Of gradients of parts, in parts of the whole's: dropout differs, a mean is apart by 1 or more."""


def require_one_addition(
    functions: Sequence[str],
    forward: Callable[[list[Any]], Any],
    inputs: list[Any],
    samples: int,
    parameters: Iterable[Tensor],
    state: ForwardState,
) -> None:
    """Check what a stage's Functions add to gradients.

    Args:
        functions: names and places of those that it has called.
        forward: of the stage; it is called with all inputs, and with parts of them.
        samples: in the inputs, of a micro-batch.
        state: what a forward may change; it is put back.

    Raises:
        ConfigError: they add another sum if a mini-batch is cut otherwise.
    """
    if samples < 2:
        return
    trained = [each for each in parameters if each.requires_grad]
    half, before = samples // 2, state.copy()
    try:
        with random_streams.kept(), torch.enable_grad(), own_tape():
            whole = _added(forward, inputs, trained)
            if not any(map(_size, whole)):
                return
            parts = [
                _added(forward, rows(inputs, start, end, samples, samples), trained)
                for start, end in ((0, half), (half, samples))
            ]
    except (RuntimeError, ValueError, TypeError, LookupError):
        return  # it cannot do with fewer samples, or be differentiated so
    finally:
        state.put_back(before)
    count = len(trained)
    summed = [a + b for a, b in zip(parts[0][:count], parts[1][:count], strict=True)]
    joined = [torch.cat(each) for each in zip(parts[0][count:], parts[1][count:], strict=True)]
    pairs = list(zip([*summed, *joined], whole, strict=True))
    if any(ours.shape != theirs.shape for ours, theirs in pairs):
        return  # of inputs that are not cut by samples
    apart = math.hypot(*(_size(ours - theirs) for ours, theirs in pairs))
    if apart > MOST_APART * math.hypot(*map(_size, whole)):
        raise ConfigError(
            f"{some_of(functions)} adds a gradient of its own in each micro-batch, which is a mean "
            "over its samples, so it counts more the more micro-batches there are: return what it "
            "is the gradient of with the outputs, and add it in the loss; or divide it by their "
            'number and set loss_scope = "micro-batch"; or set num_microbatches = 1'
        )


def _added(
    forward: Callable[[list[Any]], Any], inputs: list[Any], trained: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of parameters and inputs for gradients of the outputs that are zero."""
    inputs = pytree.map_tensors(_leaf, inputs)
    outputs = [each for each in pytree.tensors(forward(inputs)) if each.requires_grad]
    leaves = [*trained, *(each for each in pytree.tensors(inputs) if each.requires_grad)]
    if not outputs or not leaves:
        return []
    zeros = [torch.zeros_like(each) for each in outputs]
    found = torch.autograd.grad(outputs, leaves, zeros, allow_unused=True)
    return [
        torch.zeros_like(leaf) if each is None else each
        for each, leaf in zip(found, leaves, strict=True)
    ]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _size(gradient: Tensor) -> float:
    return float(gradient.detach().to_dense().double().norm()) if gradient.numel() else 0.0
