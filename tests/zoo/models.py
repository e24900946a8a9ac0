"""Small models and data that the configs of the unit tests name, as "tests.zoo.models:..."."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

Layers = list[tuple[str, Callable[[], nn.Module]]]

FEATURES = 4


def layers(width: int = 6, dropout: float = 0.0) -> Layers:
    """Three layers whose initial weights and dropout show every slip of the random state."""
    return [
        ("first", lambda: nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh())),
        ("middle", lambda: nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout), nn.Tanh())),
        ("last", lambda: nn.Linear(width, 1)),
    ]


def matrices() -> Layers:
    """Two layers whose parameters are all matrices; the first's gradients are sparse."""
    return [
        ("embed", lambda: nn.Embedding(FEATURES, 6, sparse=True)),
        ("head", lambda: nn.Linear(6, 4, bias=False)),
    ]


def as_dict() -> dict[str, Callable[[], nn.Module]]:
    """The same layers by name."""
    return dict(layers())


def as_modules() -> dict[str, nn.Module]:
    """The same layers, built."""
    return {name: build() for name, build in layers()}


def as_sequential() -> nn.Sequential:
    """Layers as one module; the activation is used twice."""
    activation = nn.Tanh()
    return nn.Sequential(
        nn.Linear(FEATURES, 6), activation, nn.Linear(6, 6), activation, nn.Linear(6, 1)
    )


def returned() -> Any:
    """What a test puts in its place returns whatever that test wants."""
    raise NotImplementedError


def raising(message: str = "out of order") -> Any:
    """A factory that fails."""
    raise ValueError(message)


def broken_layers() -> Layers:
    """The second layer cannot be built."""
    return [("good", lambda: nn.Linear(1, 1)), ("bad", raising)]


def lazy_layers() -> Layers:
    """A layer whose size only its first input tells."""
    return [("lazy", lambda: nn.LazyLinear(2))]


def no_modules() -> list[tuple[str, Callable[[], object]]]:
    """A factory that makes something else."""
    return [("number", lambda: 3)]


def dataset(samples: int = 10) -> TensorDataset:
    """Pairs of (FEATURES,) and (1,), float32."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def numbers(samples: int = 10) -> TensorDataset:
    """Pairs of an index and its tenfold, so that the order shows."""
    index = torch.arange(samples)
    return TensorDataset(index, index * 10)


def triples(samples: int = 4) -> TensorDataset:
    """Items that are no pairs."""
    index = torch.arange(samples)
    return TensorDataset(index, index, index)


class Noise(Dataset[tuple[Tensor, int]]):
    """A dataset with a random transform."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(3), index


def mean_absolute_error(outputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
    """A loss that is a function."""
    return scale * (outputs - targets).abs().mean()


class Sum(nn.Module):
    """Joins branches."""

    def forward(self, *branches: Tensor) -> Tensor:
        return torch.stack(branches).sum(dim=0)


class Split(nn.Module):
    """A linear layer whose output is given in two named halves."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        left, right = self.linear(inputs).chunk(2, dim=1)
        return {"left": left, "others": (right,)}


def tied_modules() -> dict[str, nn.Module]:
    """Two layers with one weight, built."""
    first, last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    last.weight = first.weight
    return {"first": first, "last": last}


def tied_factories() -> Layers:
    """Two layers with one weight, which shows only when both are built."""
    modules = tied_modules()
    return [(name, lambda name=name: modules[name]) for name in modules]  # type: ignore[misc]


def colliding_layers() -> Layers:
    """Layers whose parameters' names could be mixed up."""
    return [("a", lambda: nn.Linear(1, 1)), ("a.b", lambda: nn.Linear(1, 1))]


def complex_pairs() -> TensorDataset:
    """Pairs of a kind of tensors that cannot be handed from process to process."""
    return TensorDataset(torch.zeros(3, dtype=torch.complex128), torch.zeros(3))
