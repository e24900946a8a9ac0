"""Refuse gradients that a Function adds of its own, if there is one addition per micro-batch.

    a mini-batch      ──> gradient g          g + a: that of an auxiliary loss is added
    4 micro-batches   ──> 4 times g/4         g + 4a, if that is a mean; g + a, if it is a sum

What it adds is what it gives for outputs whose gradients are zero. That of some samples is compared
with that of two parts of them, where the first forward has called Functions of the user's.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rpcmp.errors import ConfigError, one_line, some_of
from rpcmp.pipelining import pytree
from rpcmp.worker.checks.objective import joined
from rpcmp.worker.checks.training_check import isolated
from rpcmp.worker.state.forward_state import ForwardState

MOST_APART = 0.3
"""Of gradients of parts, in parts of the whole's: dropout differs, a mean is apart by 1 or more."""


def require_one_addition(
    functions: Sequence[str],
    forward: Callable[[list[Any]], Any],
    parts: Sequence[list[Any]],
    parameters: Iterable[Tensor],
    state: ForwardState,
) -> None:
    """Check what a stage's Functions add to gradients; warns if that cannot be told.

    Args:
        functions: names and places of those that it has called.
        forward: of the stage; it is called with both parts, and with all of their samples.
        parts: inputs of the stage, of some samples and of some more.
        state: what a forward may change; it is put back.

    Raises:
        ConfigError: they add another sum if a mini-batch is cut otherwise.
    """
    trained = [each for each in parameters if each.requires_grad]
    gradients, before = [each.grad for each in trained], state.copy()
    try:
        with isolated():
            reason = _difference(forward, parts, trained)
    except Exception as error:  # it cannot do with fewer samples, or be differentiated so
        warnings.warn(
            f"{some_of(functions)}: what it adds to gradients cannot be compared for micro-batches "
            f"and the mini-batch of them ({one_line(error)})",
            stacklevel=1,
        )
        return
    finally:
        state.put_back(before)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
    if reason:
        raise ConfigError(
            f"{some_of(functions)} adds a gradient of its own in each micro-batch, which is no sum "
            f"over its samples ({reason}), so it counts more the more micro-batches there are: "
            "return what it is the gradient of with the outputs, and add it in the loss; or divide "
            'it by their number and set loss_scope = "micro-batch"; or set num_microbatches = 1'
        )


def _difference(
    forward: Callable[[list[Any]], Any], parts: Sequence[list[Any]], trained: list[Tensor]
) -> str:
    """Say how what is added for all samples differs from that for both parts; empty if not.

    Raises:
        ValueError: it differs from call to call.
    """
    inputs = joined(*parts)
    whole, again = (_added(forward, inputs, trained) for _ in range(2))
    if not (size := _size(whole)):
        return ""
    if _apart(whole, again) > MOST_APART * size:
        raise ValueError("it differs from call to call")
    one, other = (_added(forward, part, trained) for part in parts)
    count = len(trained)
    summed = [
        # Of inputs that both parts have as they are, such as a table, there is one gradient.
        torch.cat([mine, its]) if index >= count and mine.shape != all_.shape else mine + its
        for index, (mine, its, all_) in enumerate(zip(one, other, whole, strict=True))
    ]
    if _apart(whole, summed) <= MOST_APART * size:
        return ""
    return f"its size is {size:.3g} for some samples, and {_size(summed):.3g} for two parts of them"


def _added(
    forward: Callable[[list[Any]], Any], inputs: list[Any], trained: list[Tensor]
) -> list[Tensor]:
    """Return the gradients of parameters and inputs for gradients of the outputs that are zero."""
    leaves = pytree.map_tensors(_leaf, inputs)
    entered = pytree.map_tensors(Tensor.clone, leaves)  # no leaf may be changed in place
    for parameter in trained:
        parameter.grad = None
    outputs = [each for each in pytree.tensors(forward(entered)) if each.requires_grad]
    wanted = [*trained, *(each for each in pytree.tensors(leaves) if each.requires_grad)]
    if not outputs or not wanted:
        return []
    zeros = [torch.zeros_like(each) for each in outputs]
    found = torch.autograd.grad(outputs, wanted, zeros, allow_unused=True)
    # A backward that differentiates by itself leaves its gradients there.
    parts = [(each, leaf, leaf.grad) for each, leaf in zip(found, wanted, strict=True)]
    return [
        sum((each for each in (found, left) if each is not None), torch.zeros_like(leaf)).to_dense()
        for found, leaf, left in parts
    ]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _size(gradients: Sequence[Tensor]) -> float:
    return math.hypot(*(float(each.detach().double().norm()) for each in gradients))


def _apart(gradients: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return _size([a - b for a, b in zip(gradients, others, strict=True)])
