"""Small models and data that the configs of the unit tests name, as "tests.zoo.models:..."."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

Layers = list[tuple[str, Callable[[], nn.Module]]]

FEATURES = 4


def layers(width: int = 6, dropout: float = 0.0) -> Layers:
    """Return three layers whose initial weights and dropout expose errors in the random state."""
    return [
        ("first", lambda: nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh())),
        ("middle", lambda: nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout), nn.Tanh())),
        ("last", lambda: nn.Linear(width, 1)),
    ]


def matrices() -> Layers:
    """Return two layers with only matrices as parameters; the first's gradients are sparse."""
    return [
        ("embed", lambda: nn.Embedding(FEATURES, 6, sparse=True)),
        ("head", lambda: nn.Linear(6, 4, bias=False)),
    ]


def as_dict() -> dict[str, Callable[[], nn.Module]]:
    """Return the same layers by name."""
    return dict(layers())


def as_modules() -> dict[str, nn.Module]:
    """Return the same layers, built."""
    return {name: build() for name, build in layers()}


def as_sequential() -> nn.Sequential:
    """Return the layers as one module, which uses the activation twice."""
    activation = nn.Tanh()
    return nn.Sequential(
        nn.Linear(FEATURES, 6), activation, nn.Linear(6, 6), activation, nn.Linear(6, 1)
    )


def returned() -> Any:
    """Placeholder that tests replace."""
    raise NotImplementedError


def raising(message: str = "out of order") -> Any:
    """A factory that fails."""
    raise ValueError(message)


def broken_layers() -> Layers:
    """The second layer cannot be built."""
    return [("good", lambda: nn.Linear(1, 1)), ("bad", raising)]


def lazy_layers() -> Layers:
    """Return a layer whose first input determines its size."""
    return [("lazy", lambda: nn.LazyLinear(2))]


def no_modules() -> list[tuple[str, Callable[[], object]]]:
    """Return something that is not a list of layers."""
    return [("number", lambda: 3)]


def dataset(samples: int = 10) -> TensorDataset:
    """Return pairs of shapes (FEATURES,) and (1,), float32."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def numbers(samples: int = 10) -> TensorDataset:
    """Return pairs of an index and ten times it, which expose the order."""
    index = torch.arange(samples)
    return TensorDataset(index, index * 10)


def triples(samples: int = 4) -> TensorDataset:
    """Return items that are not pairs."""
    index = torch.arange(samples)
    return TensorDataset(index, index, index)


class Noise(Dataset[tuple[Tensor, int]]):
    """A dataset with a random transform."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(3), index


class Counting(Dataset[tuple[Tensor, int]]):
    """A dataset that remembers how many samples it has given."""

    def __init__(self) -> None:
        self.given = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.given += 1
        return torch.tensor(float(self.given)), index


def mean_absolute_error(outputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
    """A loss that is a function."""
    return scale * (outputs - targets).abs().mean()


class Sum(nn.Module):
    """Joins branches."""

    def forward(self, *branches: Tensor) -> Tensor:
        return torch.stack(branches).sum(dim=0)


class Split(nn.Module):
    """A linear layer that returns its output in two named halves."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        left, right = self.linear(inputs).chunk(2, dim=1)
        return {"left": left, "others": (right,)}


def tied_modules() -> dict[str, nn.Module]:
    """Return two built layers with one weight."""
    first, last = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
    last.weight = first.weight
    return {"first": first, "last": last}


def tied_factories() -> Layers:
    """Return two factories with one weight, which is visible only once both are built."""
    modules = tied_modules()
    return [(name, lambda name=name: modules[name]) for name in modules]  # type: ignore[misc]


def colliding_layers() -> Layers:
    """Return layers whose parameter names could collide."""
    return [("a", lambda: nn.Linear(1, 1)), ("a.b", lambda: nn.Linear(1, 1))]


def local_tuples() -> list[tuple[Any, Tensor]]:
    """Return pairs whose inputs are named tuples of a class that cannot be pickled."""
    Local = NamedTuple("Local", [("x", Tensor)])  # noqa: UP014
    return [(Local(torch.zeros(3)), torch.zeros(1)) for _ in range(3)]


def complex_pairs() -> TensorDataset:
    """Return pairs with a kind of tensor that cannot be sent between processes."""
    return TensorDataset(torch.zeros(3, dtype=torch.complex128), torch.zeros(3))
