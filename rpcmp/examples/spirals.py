"""A model and its data: a small network that classifies points on three spirals in the plane.

`rpcmp` calls the functions that the config beside this file names. Replace them by your own.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_CLASSES = 3


def layers(width: int = 64, dropout: float = 0.1) -> list[tuple[str, Callable[[], nn.Module]]]:
    """Return the layers in order, each a name and a factory; `[model] kwargs` are the arguments.

    The model may be cut into stages between any two layers. A stage calls the factories of its own
    layers only. A layer gets what the one before it returns: a tensor, or any tree of tuples, lists
    and dicts of tensors. The names of parameters start with the layer's name, in every file.

    Input: points `(N, 2)` float32. Output: logits `(N, 3)` float32.
    """
    return [
        ("embed", lambda: nn.Linear(2, width)),
        ("hidden1", lambda: hidden(width, dropout)),
        ("hidden2", lambda: hidden(width, dropout)),
        ("head", lambda: nn.Linear(width, NUM_CLASSES)),
    ]


def hidden(width: int, dropout: float) -> nn.Sequential:
    """Return a block from `(N, width)` to `(N, width)`, float32."""
    return nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout))


def dataset(split: str, points: int) -> TensorDataset:
    """Return a map-style dataset of pairs (input, target); the driver's process loads it.

    Each item is a point `(2,)` float32 and the number of its spiral, a scalar int64.
    """
    seeds = {"train": 0, "test": 1}
    if split not in seeds:
        raise ValueError(f"no split {split!r}: choose one of {', '.join(seeds)}")
    generator = torch.Generator().manual_seed(seeds[split])
    spirals = torch.arange(points) % NUM_CLASSES
    radii = torch.rand(points, generator=generator)
    angles = 4 * radii + 2 * torch.pi * spirals / NUM_CLASSES
    return TensorDataset(on_plane(radii, angles + noise(points, generator)), spirals)


def noise(points: int, generator: torch.Generator) -> Tensor:
    """Return a little noise, `(points,)` float32."""
    return 0.2 * torch.randn(points, generator=generator)


def on_plane(radii: Tensor, angles: Tensor) -> Tensor:
    """Return points `(N, 2)` by their polar coordinates."""
    return torch.stack([radii * angles.cos(), radii * angles.sin()], dim=1)
