"""A model and its data: a small network that classifies points on three spirals in the plane.

The config beside this file names what is here. Replace it by your own.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

NUM_CLASSES = 3


class Net(nn.Module):
    """An ordinary module; `[model] kwargs` are its arguments.

    It may be cut into stages before and after each of its `blocks`: `rpcmp explain` shows where.
    Parameters have their names here in every file.

    Input: points `(N, 2)` float32. Output: logits `(N, 3)` float32.
    """

    def __init__(self, width: int = 64, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Linear(2, width)
        self.blocks = nn.ModuleList(block(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, points: Tensor) -> Tensor:
        hidden: Tensor = self.embed(points)
        for part in self.blocks:
            hidden = part(hidden)
        logits: Tensor = self.head(hidden)
        return logits


def block(width: int, dropout: float) -> nn.Sequential:
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
