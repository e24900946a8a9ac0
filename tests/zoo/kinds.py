"""Models of different kinds, for benchmarks: what crosses a cut, and how much a layer computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Layers = list[tuple[str, Callable[[], nn.Module]]]

CLASSES = 10


def convolutions(channels: Sequence[int] = (16, 32, 64, 128), per_size: int = 3) -> Layers:
    """Return layers that compute about as much each, and whose outputs shrink: the first are large.

    float32[samples, 3, 32, 32] becomes [samples, CLASSES].
    """
    sizes = [3, *(size for size in channels for _ in range(per_size))]
    pairs = list(itertools.pairwise(sizes))
    ends = [here != there for here, there in pairs[1:]]  # the next layer has more channels
    layers: Layers = [
        (f"convolution{index}", partial(_convolution, *pair, pools))
        for index, (pair, pools) in enumerate(zip(pairs, [*ends, False], strict=True))
    ]
    return [*layers, ("classes", partial(_classes, sizes[-1]))]


def _convolution(received: int, returned: int, pools: bool) -> nn.Module:
    pooling = [nn.MaxPool2d(2)] if pools else []
    return nn.Sequential(nn.Conv2d(received, returned, 3, padding=1), nn.ReLU(), *pooling)


def _classes(received: int) -> nn.Module:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(received, CLASSES))


def pictures(samples: int) -> TensorDataset:
    """Random pictures, with classes as targets."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 3, 32, 32, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def small(count: int = 64, features: int = 64) -> Layers:
    """Return many layers of little work each; float32[samples, features] in and out."""
    return [(f"small{index}", partial(Small, features)) for index in range(count)]


class Small(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(features), nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.gelu(self.inner(self.norm(x)))
