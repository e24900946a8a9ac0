"""Models and data that print and log in all the ways of Python and C++."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from zoo import FEATURES, Layers, regression  # type: ignore[import-not-found]

log = logging.getLogger("talkative")


def dataset(samples: int = 50) -> TensorDataset:
    """Print the number of samples and the process that builds it."""
    print(f"a dataset of {samples} samples")
    found: TensorDataset = regression(samples)
    return found


def warn_in_cpp() -> None:
    """Make torch's C++ code warn by TORCH_WARN."""
    array = np.zeros(3, dtype=np.float32)
    array.setflags(write=False)
    torch.from_numpy(array)


class Talker(nn.Linear):
    """Prints or logs its text in the forward of one step, counted by its calls.

    Args:
        says: "" nothing, "everything", "lines" (many similar ones) or "last words".
        at: number of the call.
        marker: a file that is written before it dies.
    """

    def __init__(self, says: str, at: int, marker: str) -> None:
        super().__init__(FEATURES, FEATURES)
        self.says, self.at, self.marker = says, at, marker
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at and self.training:
            self.say()
        return super().forward(x)

    def say(self) -> None:
        """Print or log the text."""
        if self.says == "everything":
            print("printed")
            log.warning("logged %d", 3)
            warnings.warn("deprecated by its author", stacklevel=2)
            warn_in_cpp()
            os.write(2, b"written by C\n")
            print("x" * 3_000_000)
        if self.says == "lines":
            for number in range(500):
                print(f"sample {number} of 500")
        if self.says == "last words" and not Path(self.marker).exists():
            Path(self.marker).touch()
            for number in range(300):
                print(f"dividing by {300 - number}")
            os.kill(os.getpid(), signal.SIGKILL)


def layers(says: dict[str, str] | None = None, at: int = 3, marker: str = "") -> Layers:
    """Return three talkers and a head; `says` by name."""
    names = ("first", "second", "third")
    message = {name: (says or {}).get(name, "") for name in names}
    talkers: Layers = [
        (name, lambda name=name: Talker(message[name], at, marker)) for name in names
    ]
    return [*talkers, ("head", lambda: nn.Linear(FEATURES, 1))]
