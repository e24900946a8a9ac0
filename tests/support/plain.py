"""The truth: a loop of plain PyTorch over whole mini-batches, without a line of rpcmp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

STEPS, BATCH = 3, 8


def mini_batches(dataset: Any, size: int = BATCH, steps: int = STEPS) -> Iterator[tuple[Any, Any]]:
    for step in range(steps):
        rows = [(step * size + row) % len(dataset) for row in range(size)]
        inputs, targets = default_collate([dataset[row] for row in rows])
        yield inputs, targets


def train(
    net: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    batches: Iterator[tuple[Any, Any]],
    learning_rate: float = 0.05,
    evaluated: Sequence[tuple[Any, Any]] = (),
) -> list[float]:
    """Return the losses of SGD over all that the model and the loss train.

    Args:
        evaluated: mini-batches that the model is called with, in evaluation, after each step.
    """
    trained = [each for each in net.parameters() if each.requires_grad]
    trained += list(loss.parameters()) if isinstance(loss, nn.Module) else []
    optimizer = torch.optim.SGD(trained, lr=learning_rate)
    losses = []
    for inputs, targets in batches:
        net.train()
        optimizer.zero_grad()
        value = loss(call(net, inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        with torch.no_grad():
            net.eval()
            for each, _ in evaluated:
                call(net, each)
    return losses


def call(net: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return net(**inputs)
    return net(*inputs) if isinstance(inputs, list | tuple) else net(inputs)


def close(one: Sequence[float], other: Sequence[float], limit: float = 1e-9) -> bool:
    """Whether numbers of float64 are equal but for rounding."""
    pairs = zip(one, other, strict=True)
    return all(abs(a - b) <= limit * max(abs(a), abs(b), 1e-12) for a, b in pairs)


def furthest(state: dict[str, Tensor], net: nn.Module) -> float:
    """Return the largest difference of a module's parameters and buffers to a state."""
    pairs = [(state[name].double(), value.double()) for name, value in net.state_dict().items()]
    apart = [(one - other).abs() for one, other in pairs]
    return max(float(each.max()) for each in apart if each.numel())
