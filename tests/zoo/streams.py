"""Streams of (input, target) pairs for `zoo.mlp`, of every kind that a job may be given."""

from __future__ import annotations

import platform
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

Pair = tuple[Tensor, Tensor]


def _pair(number: int) -> Pair:
    """Return a sample that depends on its number, and on what is drawn for it."""
    x = torch.linspace(-1, 1, 8) * (1 + number % 7) + torch.rand(8) * random.random()
    return x, x[:1].sin() + number / 100


class Plain(IterableDataset[Pair]):
    """A stream that knows nothing of processes, and has no state.

    Args:
        samples: of a pass.
        unequal_on: hosts on which it yields other samples.
    """

    def __init__(self, samples: int = 50, unequal_on: str = "") -> None:
        self._samples = samples
        self._first = 100 if platform.node() == unequal_on else 0

    def __iter__(self) -> Iterator[Pair]:
        return (_pair(self._first + number) for number in range(self._samples))


class Shared(Plain):
    """A stream that divides itself: a process reads numbers of its own."""

    def __iter__(self) -> Iterator[Pair]:
        info = get_worker_info()
        own, all_ = (0, 1) if info is None else (info.id, info.num_workers)
        yield from (_pair(10_000 * own + n) for n in range(self._samples // all_))


class Kept(IterableDataset[Pair]):
    """A stream with a state: it draws the numbers of a pass from a generator of its own."""

    def __init__(self, samples: int = 50, log: str = "") -> None:
        self._samples, self._log = samples, log
        self._epoch = self._read = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch, self._read = epoch, 0

    def __iter__(self) -> Iterator[Pair]:
        order = list(range(self._samples))
        random.Random(self._epoch).shuffle(order)
        while self._read < self._samples:
            number = order[self._read]
            self._read += 1
            if self._log:
                with Path(self._log).open("a") as file:
                    file.write(f"{self._epoch} {number}\n")
            yield _pair(number)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "read": self._read, "pair": (1, 2.5)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["pair"] == (1, 2.5)
        self._epoch, self._read = state["epoch"], state["read"]


class Shuffled(Plain):
    """A stream without a state that draws the order of a pass where it begins."""

    def __iter__(self) -> Iterator[Pair]:
        return map(_pair, torch.randperm(self._samples).tolist())


class Failing(Plain):
    """A stream that fails at its first sample."""

    def __iter__(self) -> Iterator[Pair]:
        yield from ()
        raise ValueError("a broken file")


class Iterated(IterableDataset[Pair]):
    """A stream whose iterator has the state."""

    def __iter__(self) -> Iterator[Pair]:
        return _Numbers()


class _Numbers(Iterator[Pair]):
    def __init__(self) -> None:
        self._read = 0

    def __next__(self) -> Pair:
        if self._read == 50:
            raise StopIteration
        self._read += 1
        return _pair(self._read)

    def state_dict(self) -> dict[str, Any]:
        return {"read": self._read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._read = state["read"]


class Unkept(Plain):
    """A stream whose state is of no type that can be kept."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Long(Unkept):
    """A stream with a long state."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(range(10_000))}


class Unsteady(IterableDataset[Pair]):
    """A stream that is never the same again, and has no state."""

    def __iter__(self) -> Iterator[Pair]:
        system = random.SystemRandom()
        while True:
            yield _pair(system.randrange(1000))


def nothing(samples: list[Pair]) -> None:
    """Make no mini-batch."""


def once() -> Iterator[Pair]:
    """Return a generator, over which there is one pass only."""
    return (_pair(number) for number in range(20))


def of_datasets(files: int = 4) -> Any:
    """Return a stream of the package `datasets`, of several shards of 20 samples."""
    import datasets

    def rows(shards: list[int]) -> Iterator[dict[str, int]]:
        for shard in shards:
            for number in range(20):
                yield {"number": 20 * shard + number}

    made = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(files))})
    return made.map(_row, remove_columns="number").with_format("torch")


def _row(row: dict[str, int]) -> dict[str, Any]:
    x, y = _pair(row["number"])
    return {"x": x.tolist(), "y": y.tolist()}


def columns(samples: list[dict[str, Tensor]]) -> Pair:
    """Return inputs and targets of rows."""
    x, y = ([torch.as_tensor(row[key]) for row in samples] for key in ("x", "y"))
    return torch.stack(x), torch.stack(y)


def of_webdataset(folder: str) -> Any:
    """Return a stream of the package `webdataset`, of the tar files in a folder."""
    import webdataset

    shards = sorted(str(path) for path in Path(folder).glob("*.tar"))
    return webdataset.WebDataset(shards, shardshuffle=False).decode().to_tuple("x.pth", "y.pth")


def of_torchdata(samples: int = 40) -> Any:
    """Return a stream of torchdata's nodes, whose state is the iterator's."""
    from torchdata import nodes

    numbers = nodes.IterableWrapper(range(samples))
    return Nodes(lambda: nodes.Loader(nodes.Mapper(numbers, _pair)))


class Nodes(IterableDataset[Pair]):
    """A graph of torchdata's nodes as a dataset."""

    def __init__(self, make: Any) -> None:
        self._loader = make()

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._loader)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
