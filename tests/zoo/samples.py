"""Samples that are not pairs of equal size: dicts, texts of any length, weighted ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import zoo  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler, WeightedRandomSampler


class Mapped(Dataset[dict[str, Tensor]]):
    """The samples of `zoo.regression` as dicts, without targets of their own."""

    def __init__(self, samples: int = 50) -> None:
        self._pairs = zoo.regression(samples)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self._pairs[index]
        return {"x": x, "y": y}


def mapped_loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Compute the loss with the targets in the dict."""
    return nn.functional.mse_loss(outputs, batch["y"])


class Texts(Dataset[Tensor]):
    """Texts of 3 to 12 words, int64."""

    def __init__(self, samples: int = 40) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(3, 13, (samples,), generator=generator).tolist()
        self.texts = [torch.randint(1, 11, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> Tensor:
        return self.texts[index]


def padded(samples: list[Tensor], value: int = 0) -> tuple[Tensor, Tensor]:
    """Pad to inputs and targets of shape (samples, longest text - 1), int64."""
    whole = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=value)
    return whole[:, :-1], whole[:, 1:]


def weighted(dataset: Any, samples: int = 33) -> WeightedRandomSampler:
    """Sample the end of the dataset more often; draws from torch's generator."""
    return WeightedRandomSampler([1.0 + index for index in range(len(dataset))], samples)


class ByLength(Sampler[int]):
    """Group texts of similar length, otherwise in a random order, as transformers does."""

    def __init__(self, dataset: Texts, group: int = 10) -> None:
        self._lengths, self._group = [len(text) for text in dataset.texts], group

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self)).tolist()
        random.shuffle(order)
        for at in range(0, len(order), self._group):
            yield from sorted(order[at : at + self._group], key=lambda i: self._lengths[i])


class Forgetful:
    """A sampler whose order depends on the earlier orders."""

    def __init__(self, dataset: Any) -> None:
        self._random, self._count = random.Random(0), len(dataset)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        order = list(range(self._count))
        self._random.shuffle(order)
        return iter(order)


def whole_batches(dataset: Any) -> list[list[int]]:
    """Return a batch sampler, which is not a sampler."""
    return [[0, 1], [2, 3]]


def reading(width: int = 8) -> Any:
    """Return a small language model over texts of any length."""
    return [
        ("embed", lambda: nn.Embedding(11, width, padding_idx=0)),
        ("mix", lambda: nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(0.1))),
        ("head", lambda: nn.Linear(width, 11)),
    ]
