"""Mini-batches of samples that draw random numbers, in a form that compares by bits."""

from __future__ import annotations

import os
import random
import resource
import time
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from rpcmp.config.job_sections import DataConfig
from rpcmp.config.types import Factory
from rpcmp.data.batches import Batches, create_dataset, map_batches


def load_batches(
    source: Factory, what: str, data: DataConfig, seed: int, training: bool
) -> Batches:
    """Build a map-style dataset, and return its mini-batches."""
    dataset = create_dataset(source, what, seed)
    return map_batches(dataset, what, data, seed, training)


class Transformed(Dataset[tuple[Tensor, int]]):
    """A dataset of ten samples, whose random transform draws from every generator."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        drawn = [torch.rand(()).item(), random.random(), numpy.random.rand()]
        return torch.tensor(drawn, dtype=torch.float64), index


class AllAtOnce(Transformed):
    """A dataset that loads all samples of a mini-batch in one call."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, int]]:
        return [super(AllAtOnce, self).__getitem__(index) for index in indices]


class Unpicklable(Dataset[dict[str, Tensor]]):
    """A dataset whose mini-batches hold a function that cannot leave its process."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return defaultdict(lambda: torch.zeros(()), number=torch.tensor(index))


class WithoutDescriptors(Dataset[tuple[int, int]]):
    """A dataset whose loader process may open no more files.

    Its samples are numbers: tensors would fail earlier, when they are put together.
    """

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, int]:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
        return index, index


def batches_of(dataset: Dataset[Any], **options: Any) -> Batches:
    """Return the mini-batches of a dataset for training."""
    unused = Factory(callable="tests.zoo.models:numbers")
    section = DataConfig(train=unused, **{"batch_size": 3, **options})
    return Batches(dataset, section, seed=0, training=True)


def values(batches: Batches, epoch: int, first: int = 0) -> list[tuple[Any, Any]]:
    """Return the mini-batches in a form that compares by bits."""
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in batches.epoch(epoch, first)]


def require_tails(num_workers: int, shuffle: bool) -> None:
    """Compare every resumed epoch with the tail of the whole epoch."""
    options = {"num_workers": num_workers, "shuffle": shuffle}
    with closing(batches_of(Transformed(), **options)) as batches:
        whole = values(batches, 2)
    with closing(batches_of(Transformed(), **options)) as batches:
        next(batches.epoch(1))  # abandoned while other mini-batches load
        for first in (3, 1, 4, 0):
            assert values(batches, 2, first) == whole[first:]


class StartsAfterItsParent(Dataset[int]):
    """A dataset whose loader process takes longer to start than its parent lives.

    Args:
        pid_file: gets the loader's process id.
    """

    def __init__(self, pid_file: str) -> None:
        self._pid_file = Path(pid_file)

    def __getstate__(self) -> str:
        return str(self._pid_file)

    def __setstate__(self, pid_file: str) -> None:
        """Arrive in a loader process, which has no loop yet that could miss its parent."""
        self.__init__(pid_file)  # type: ignore[misc]
        parent = os.getppid()
        unfinished = self._pid_file.with_suffix(".part")
        unfinished.write_text(f"{os.getpid()}")
        unfinished.rename(self._pid_file)
        ends = time.monotonic() + 60
        while os.getppid() == parent and time.monotonic() < ends:
            time.sleep(0.01)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        return index
