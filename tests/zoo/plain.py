"""A plain model, and the same cut by hand into stages that keep its names."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WORDS, WIDTH = 11, 8


class Plain(nn.Module):
    """A user's existing model: an embedding, an encoder, and a head that shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        found: Tensor = self.head(x + torch.tanh(self.encoder(x)))
        return found


class Words(nn.Module):
    """The first stage: prefix = ""."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        return x


def encoder() -> nn.Module:
    """The second: prefix = "encoder"."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))


class Head(nn.Module):
    """The last, which reads both: prefix = ""."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor, encoded: Tensor) -> Tensor:
        found: Tensor = self.head(x + torch.tanh(encoded))
        return found
