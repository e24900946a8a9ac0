"""A small GPT that learns to write Python from the source of Python's own standard library.

The text is on every machine that has Python, so nothing is downloaded. The model reads it character
by character: a vocabulary of 96 symbols needs no tokenizer, and what the model has learned can be
read straight from its samples. It has 3.2 million parameters in layers of equal cost, which divide
evenly over 2 or 4 stages.
"""

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

ALPHABET = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))  # a character's index: its token
VOCABULARY = len(ALPHABET)
CONTEXT = 64  # characters the model looks at, itself included
MAX_CHARACTERS = 4_000_000
HELD_OUT = 0.1  # of the text, at its end


# The model


class Embedding(nn.Module):
    """Tokens `(N, T)` int64 to vectors `(N, T, width)` float32, each a character and its place."""

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        vectors: Tensor = self.dropout(self.characters(tokens) + self.positions(places))
        return vectors


class SelfAttention(nn.Module):
    """Vectors `(N, T, width)` to the same shape, each a mixture of itself and those before it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        separate = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = separate.transpose(1, 3).unbind(2)  # each (N, heads, T, width / heads)
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    """Vectors `(N, T, width)` to the same shape: attention, then an MLP on every position."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = nn.Sequential(
            nn.LayerNorm(width), SelfAttention(width, heads, dropout), nn.Dropout(dropout)
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        x = x + self.mlp(x)
        return x
