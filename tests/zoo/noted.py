"""Models that note what the streams of their device have done, which is a pretend one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo import Layers, mlp  # type: ignore[import-not-found]

WIDTH = 2**12
"""Numbers of a sample's activation: those of a micro-batch of 4 are worth sharing."""

LOST_IN = 10
"""The forward in which a device is lost: of four micro-batches a step, in the third one."""


class Notes(nn.Module):
    """The identity, which notes what its device has done; it may lose it, once."""

    def __init__(self, path: str, lost: str = "") -> None:
        super().__init__()
        self._path, self._lost = path, Path(lost or "/")
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._calls += 1
        if x.device.type != "pretend":
            return x
        accelerator: Any = torch.get_device_module(x.device)
        if self._path:
            with open(f"{self._path}-{x.device}", "a") as file:
                file.write(f"{json.dumps(accelerator.streams.noted())}\n")
        if self._calls == LOST_IN and not self._lost.exists():
            self._lost.touch()
            accelerator.lose()
        return x


def watched(path: str) -> Layers:
    """Return two blocks, each of which notes what its device and the host have done."""
    first, second, head = mlp(2)
    return [first, ("notes0", lambda: Notes(path)), second, ("notes1", lambda: Notes(path)), head]


def wide(path: str = "", lost: str = "") -> Layers:
    """Return layers with activations that are worth sharing, of which the third and seventh note.

    Args:
        path: the begin of the names of the files of notes, which end with the device.
        lost: a file that the third layer creates when it loses its device; empty: it loses none.
    """
    return [
        ("first", lambda: nn.Linear(4, WIDTH)),
        ("norm", lambda: nn.Tanh()),
        ("notes", lambda: Notes(path, lost)),
        ("second", lambda: nn.Linear(WIDTH, 8)),
        ("wide", lambda: nn.Linear(8, WIDTH)),
        ("inplace", lambda: nn.ReLU(inplace=True)),
        ("notes_too", lambda: Notes(path)),
        ("last", lambda: nn.Linear(WIDTH, 1)),
    ]


def samples() -> TensorDataset:
    torch.manual_seed(0)
    return TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
