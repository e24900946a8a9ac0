"""Tokens with padding, and mappings that are not dicts, as from transformers' tokenizers."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset, default_collate


class Encoding(UserDict[str, Any]):
    """The mapping of a sample or a mini-batch."""


def collate(samples: list[Any]) -> Encoding:
    """A mapping in a mapping."""
    return Encoding(more=Encoding(default_collate(samples)))


def loss(outputs: Tensor, batch: Any) -> Tensor:
    """Compute the loss with the targets in the mapping."""
    return nn.functional.mse_loss(outputs, batch["more"]["y"])


def tagger(channels: bool = False) -> list[tuple[str, Callable[[], nn.Module]]]:
    """Return layers of (samples, length) without dropout or statistics: a mean is all they need.

    Args:
        channels: scores are (samples, 11, length), as torch's losses want them.
    """
    return [
        ("embed", lambda: nn.Embedding(11, 16)),
        ("hidden", lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())),
        ("head", lambda: nn.Sequential(nn.Linear(16, 11), Turned() if channels else nn.Identity())),
    ]


class Turned(nn.Module):
    """Swaps length and channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def padded(samples: int = 40, length: int = 8, empty: int = 5, shift: int = 0) -> TensorDataset:
    """Return `zoo:tokens` of 2 to `length` tokens; the rest of their targets is -100.

    Args:
        empty: how many samples of the first ten have no target that counts.
        shift: 1: the targets are the inputs themselves.
    """
    generator = torch.Generator().manual_seed(3)
    text = torch.randint(11, (samples, length + 1), generator=generator)
    lengths = torch.randint(2, length + 1, (samples, 1), generator=generator)
    lengths[:empty] = 0
    targets = text[:, :-1] if shift else text[:, 1:]
    counts = torch.arange(length) < lengths
    return TensorDataset(text[:, :-1], torch.where(counts, targets, -100))


def token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute what fails where nothing counts, unlike torch's, which is NaN."""
    counts = targets != -100
    assert counts.any(), "no target counts"
    return nn.functional.cross_entropy(outputs[counts], targets[counts])


def failing(targets: Tensor) -> float:
    """Weigh nothing, but fail."""
    raise RuntimeError(f"cannot weigh {len(targets)}")


def negative(targets: Tensor) -> float:
    """Weigh less than nothing."""
    return -1.0


class Total(nn.CrossEntropyLoss):
    """Add up over samples."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")
