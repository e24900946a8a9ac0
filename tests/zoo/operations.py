"""One kind of operation in a small model, without random numbers: devices can be compared."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from zoo import FEATURES, First, Layers  # type: ignore[import-not-found]

HALF = FEATURES // 2


class Lookup(nn.Module):
    """Adds the row of a table that the largest feature stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.argmax(dim=1))  # type: ignore[no-any-return]


def _in_two_rows(*modules: nn.Module) -> nn.Module:
    """Return modules for (samples, 2, features / 2)."""
    return nn.Sequential(nn.Unflatten(1, (2, HALF)), *modules, nn.Flatten())


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(FEATURES, FEATURES),
    "activation": lambda: nn.Sequential(nn.GELU(), nn.LogSoftmax(dim=1), nn.Tanh(), nn.SiLU()),
    "batch norm": lambda: nn.BatchNorm1d(FEATURES),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(FEATURES), nn.GroupNorm(2, FEATURES)),
    "embedding": Lookup,
    "pooling": lambda: _in_two_rows(nn.AvgPool1d(3, 1, 1), nn.MaxPool1d(3, 1, 1)),
    "attention": lambda: _in_two_rows(
        nn.TransformerEncoderLayer(HALF, 2, FEATURES, dropout=0.0, batch_first=True)
    ),
    "convolution": lambda: _in_two_rows(nn.Conv1d(2, 2, 3, padding=1)),
    "LSTM": lambda: _in_two_rows(First(nn.LSTM(HALF, HALF, batch_first=True))),
}
"""What lies between two linear layers; from and to (samples, features)."""


def layers(kind: str) -> Layers:
    """Return a model from (samples, 8) to (samples, 1)."""
    return [
        ("first", lambda: nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())),
        ("operation", KINDS[kind]),
        ("head", lambda: nn.Linear(FEATURES, 1)),
    ]
