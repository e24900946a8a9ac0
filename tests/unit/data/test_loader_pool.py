"""The processes that load mini-batches: the bits of a driver that loads them, and errors."""

from __future__ import annotations

import functools
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, cast

import pytest
import torch

from rpcmp.config.loader import parse_config
from rpcmp.config.schema import Config
from rpcmp.config.topology import Reference
from rpcmp.data import loader_pool
from rpcmp.data.loader_pool import LoaderPool, Parts
from rpcmp.data.sample_order import Key
from rpcmp.errors import ConfigError, RpcmpError, WorkerDiedError
from rpcmp.rpc.messages import BatchIndices
from tests.support.minibatches import load_batches
from tests.support.processes import no_more_files, poll_for

INPUT, TARGET = Reference("input"), Reference("target")


def job(**section: Any) -> Config:
    """Return a job of one stage that reads a part of the batch, and the targets for the loss."""
    stage = {"name": "only", "module": "m:Module", "inputs": section.pop("inputs", ["input"])}
    data = {"train": "tests.zoo.models:Noise", "at": "stage", **section}
    return parse_config({"loss": "torch.nn:MSELoss", "stages": [stage], "data": data})


@pytest.fixture
def loaders() -> Iterator[Callable[..., LoaderPool]]:
    """Create loaders of a `job`, and stop their processes at the end."""
    made: list[LoaderPool] = []

    def make(**section: Any) -> LoaderPool:
        made.append(LoaderPool(job(**section), "only"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def loaded(loaders: LoaderPool, key: Key, dataset: str = "train") -> Parts | RpcmpError:
    """Load a mini-batch, and return its samples or the error."""
    found: list[Parts | RpcmpError] = []
    epoch, index, samples = key
    loaders.load(BatchIndices(1, dataset, epoch, index, samples), found.append)
    poll_for(lambda: found, "a mini-batch")
    return found[0]


def test_loader_processes_load_the_same_bits_as_a_driver(
    loaders: Callable[..., LoaderPool],
) -> None:
    made = loaders(num_workers=2, test="tests.zoo.models:dataset")
    assert made.holding().sizes == {"train": 8, "test": 10}
    config = job().data
    assert config is not None
    with closing(load_batches(config.train, "data.train", config, 0, training=True)) as batches:
        for index, (inputs, targets) in enumerate(batches.epoch(2)):
            parts = loaded(made, (2, index, targets.tolist()))
            assert isinstance(parts, Parts)
            assert list(parts.trees) == [INPUT, TARGET]
            assert torch.equal(parts.trees[INPUT], inputs)
            assert torch.equal(parts.trees[TARGET], targets)


def test_a_dataset_that_counts_gives_the_same_in_every_run(
    loaders: Callable[..., LoaderPool],
) -> None:
    def first_samples() -> list[float]:
        made = loaders(num_workers=2, train="tests.zoo.models:Counting")
        made.holding()
        found: dict[int, Parts | RpcmpError] = {}
        for number in range(1, 7):
            done = functools.partial(found.__setitem__, number)
            made.load(BatchIndices(number, "train", 1, number - 1, [0, 1]), done)
        poll_for(lambda: len(found) == 6, "all mini-batches")
        parts = [cast(Parts, found[number]) for number in range(1, 7)]
        return [part.trees[INPUT][0].item() for part in parts]

    assert first_samples() == [1, 1, 3, 3, 5, 5]  # each of two processes counts by itself


def test_an_error_of_a_dataset_names_the_host(
    loaders: Callable[..., LoaderPool],
) -> None:
    with pytest.raises(
        ConfigError, match=r"^on .*: data.train = 'tests.zoo.models:raising' failed"
    ):
        loaders(train="tests.zoo.models:raising").holding()
    with pytest.raises(ConfigError, match=r"^on .*: data.test = 'tests.zoo.models:Sum' is Sum"):
        loaders(test="tests.zoo.models:Sum").holding()


def test_an_error_of_a_mini_batch_is_the_answer(loaders: Callable[..., LoaderPool]) -> None:
    made = loaders(inputs=["input.0"], test="tests.zoo.models:triples")
    made.holding()
    error = loaded(made, (1, 0, [0]))
    assert str(error).startswith("a stage reads 'input.0': no part '0' in float32[1, 3]")
    error = loaded(made, (1, 0, [0]), "test")
    assert "the dataset's items must be (input, target) pairs" in str(error)
    error = loaded(made, (1, 0, [10]), "test")
    assert str(error).startswith("stage 'only' failed in data: IndexError")


@pytest.mark.parametrize(
    ("dataset", "why"),
    [("complex_pairs", r"KeyError: torch\.complex128$"), ("local_tuples", ".*Local")],
    ids=["a tensor", "a class"],
)
def test_what_cannot_be_handed_over_is_an_error(
    loaders: Callable[..., LoaderPool], dataset: str, why: str
) -> None:
    made = loaders(test=f"tests.zoo.models:{dataset}")
    made.holding()
    error = loaded(made, (1, 0, [0]), "test")
    assert re.match(f"stage 'only' failed in data: {why}", str(error))
    assert isinstance(loaded(made, (1, 0, [0])), Parts)  # the process continues


def test_a_batch_that_the_worker_cannot_read_is_an_error(
    loaders: Callable[..., LoaderPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpacked(*args: object) -> Parts:
        raise AttributeError("there is no class Given")

    made = loaders()
    made.holding()
    monkeypatch.setattr(loader_pool, "_unpacked", unpacked)
    error = loaded(made, (1, 0, [0]))
    expected = "stage 'only' failed in data: AttributeError: there is no class Given"
    assert str(error).startswith(expected)


def test_a_worker_that_may_open_no_more_files_is_lost(loaders: Callable[..., LoaderPool]) -> None:
    made = loaders()
    made.holding()
    with no_more_files():
        error = loaded(made, (1, 0, [0]))
    assert isinstance(error, WorkerDiedError)
    assert "cannot take the samples that were loaded for it: Too many open files" in str(error)


def test_a_loader_process_that_dies_is_an_error(loaders: Callable[..., LoaderPool]) -> None:
    made = loaders()
    made.holding()
    (pid,) = made.pids
    os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        error = loaded(made, (1, 0, [0]))
        assert isinstance(error, WorkerDiedError)
        assert f"(pid {pid}) was ended by signal 9" in str(error)
