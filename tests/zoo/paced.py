"""Layers that take as long as their host is slow, which a file says; shipped beside a config.

FOLDER/stage1:0     holds 2.0: each layer of that worker sleeps for twice as long
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zoo  # type: ignore[import-not-found]
from torch import Tensor, nn
from torch.distributed import rpc
from torch.utils.data import TensorDataset

FEATURES = 4

Layers = list[tuple[str, Callable[[], nn.Module]]]


def layers(folder: str, count: int = 6, milliseconds: float = 2.0) -> Layers:
    """Return equal layers; each sleeps so long in a forward, and in a backward."""
    make = functools.partial(Paced, Path(folder), milliseconds / 1e3)
    return [(f"paced{i}", make) for i in range(count)]


def samples() -> TensorDataset:
    inputs = torch.linspace(-1, 1, 50 * FEATURES).reshape(50, FEATURES)
    return TensorDataset(inputs, inputs.sin())


class Paced(nn.Module):
    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.folder, self.seconds = folder, seconds

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = zoo.in_backward(self._sleep(self.inner(x).tanh()), self._sleep)
        return outputs

    def _sleep(self, passing: Tensor) -> Tensor:
        time.sleep(self.seconds * self._slowness())
        return passing

    def _slowness(self) -> float:
        try:
            return float((self.folder / rpc.get_worker_info().name).read_text())
        except (OSError, RuntimeError):  # not slow, or in no group
            return 1.0
