"""A dataset with random transforms that records where it is built; shipped beside a config."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
import zoo  # type: ignore[import-not-found]
from setproctitle import getproctitle
from torch import Tensor
from torch.utils.data import Dataset


class Views(NamedTuple):
    """The input of a sample."""

    x: Tensor
    views: dict[str, Tensor]


class Noisy(Dataset[tuple[Views, Tensor]]):
    """Samples that are drawn anew on each access; targets are as random as inputs.

    Args:
        witness: file that gets the titles of the processes in which it is built.
        samples: how many.
        path: file that has to exist.
        shrinks: only the first that is built has all samples.
        bad: index of a sample that cannot be loaded.
    """

    def __init__(
        self,
        witness: str,
        samples: int = 25,
        path: str = "",
        shrinks: bool = False,
        bad: int | None = None,
    ) -> None:
        if path:
            Path(path).read_bytes()
        with Path(witness).open("a") as file:
            file.write(f"{getproctitle()}\n")
        if shrinks:
            try:
                Path(f"{witness}-first").mkdir()
            except FileExistsError:
                samples -= 1
        self._samples, self._bad = samples, bad

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Views, Tensor]:
        if index == self._bad:
            raise ValueError(f"sample {index} is broken")
        x = torch.rand(zoo.FEATURES) + index / self._samples
        views = {"half": x.round(), "noise": torch.rand(zoo.FEATURES)}
        return Views(x, views), torch.rand(1) + x.mean()


class Worst:
    """A metric with state for the driver: the largest error of any sample."""

    def __init__(self) -> None:
        self._worst = 0.0

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self._worst = max(self._worst, (outputs - targets).abs().max().item())

    def compute(self) -> float:
        return self._worst

    def reset(self) -> None:
        self._worst = 0.0


class Mortal(zoo.Encoder):  # type: ignore[misc]
    """An encoder of two inputs whose process dies once in one of its forwards.

    Args:
        marker: a file that is written before it dies; empty: it does not die.
        forwards: number of forwards before.
    """

    def __init__(self, marker: str = "", forwards: int = 9) -> None:
        super().__init__(inputs=2)
        self._marker, self._left = marker, forwards

    def forward(self, *inputs: Tensor) -> Tensor:
        self._left -= 1
        if self._left < 0:
            zoo.die_once(self._marker)
        hidden: Tensor = super().forward(*inputs)
        return hidden


class Head(zoo.Join):  # type: ignore[misc]
    """A head that reads the whole sample."""

    def __init__(self) -> None:
        super().__init__(inputs=2)

    def forward(self, hidden: Tensor, whole: Views) -> Tensor:
        outputs: Tensor = super().forward(hidden, whole.x + whole.views["half"])
        return outputs
