"""Mini-batches: the order and bits of an epoch depend only on the seed and the epoch."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import threading
from collections import UserDict
from contextlib import closing
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, cast

import numpy
import psutil
import pytest
import torch
from torch import Tensor, multiprocessing
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    TensorDataset,
)

from rpcmp.config.job_sections import DataConfig
from rpcmp.config.types import Factory
from rpcmp.data.batches import Batches, Loaded, Samples, received
from rpcmp.errors import ConfigError, JobError
from rpcmp.pipelining import random_streams
from tests.support.forkedcall import in_a_fork
from tests.support.minibatches import (
    AllAtOnce,
    Transformed,
    Unpicklable,
    WithoutDescriptors,
    batches_of,
    load_batches,
    require_tails,
    values,
)
from tests.support.places import TESTS
from tests.support.processes import DEADLINE, poll_for
from tests.zoo import models


def load(
    name: str = "numbers", seed: int = 0, training: bool = True, samples: int = 10, **options: Any
) -> Batches:
    """Load a dataset of tests.zoo.models."""
    kwargs = {} if name == "Noise" else {"samples": samples}
    train = Factory(callable=f"tests.zoo.models:{name}", kwargs=kwargs)
    section = DataConfig(train=train, **{"batch_size": 4, **options})
    return load_batches(train, "data.train", section, seed, training)


def order(batches: Batches, epoch: int = 1) -> list[list[int]]:
    """Return the indices in each mini-batch."""
    return [inputs.tolist() for inputs, _ in batches.epoch(epoch)]


def test_inputs_and_targets_stay_together() -> None:
    for inputs, targets in load().epoch(1):
        assert torch.equal(targets, inputs * 10)


def test_an_epochs_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    used = load()
    first, second = order(used, 1), order(used, 2)
    assert first != second
    torch.rand(5)  # random numbers that a model draws do not matter
    assert order(used, 1) == order(load(), 1) == first
    assert order(load(), 2) == second
    assert order(load(seed=1), 1) != first


def test_mini_batches_equal_ranks_with_distributed_samplers() -> None:
    here = order(load(seed=5, samples=16), epoch=3)
    ranks = []
    for rank in range(2):  # each rank with half of the batch
        sampler: DistributedSampler[Any] = DistributedSampler(models.numbers(16), 2, rank, seed=5)
        sampler.set_epoch(2)
        ranks.append(list(BatchSampler(sampler, 2, drop_last=False)))
    assert list(map(sorted, here)) == [sorted(a + b) for a, b in zip(*ranks, strict=True)]


@pytest.fixture(scope="module")
def tracker() -> None:
    """Start the resource tracker of multiprocessing before a test looks for its own processes."""
    resource_tracker.ensure_running()


def test_without_shuffling_and_in_evaluation_samples_come_in_order() -> None:
    in_order = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert order(load(shuffle=False), 3) == in_order
    assert order(load(training=False), 3) == in_order


def test_an_incomplete_mini_batch_is_dropped_in_training_only() -> None:
    dropping = load(drop_last=True)
    assert len(dropping) == len(order(dropping)) == 2
    assert len(load(drop_last=True, training=False)) == 3
    assert len(load(samples=8, drop_last=True)) == 2


def test_random_transforms_are_the_same_in_every_run_and_differ_between_epochs() -> None:
    def drawn(epoch: int, seed: int = 0) -> torch.Tensor:
        return torch.cat([inputs for inputs, _ in load("Noise", seed).epoch(epoch)])

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert not torch.equal(drawn(1), drawn(1, seed=1))


def test_a_random_transform_does_not_depend_on_what_happens_between_mini_batches() -> None:
    fault_free = [inputs for inputs, _ in load("Noise").epoch(1)]
    disturbed = []
    for inputs, _ in load("Noise").epoch(1):
        disturbed.append(inputs)
        random_streams.seed_all("a training step")
    assert torch.equal(torch.cat(fault_free), torch.cat(disturbed))


class Counted(Transformed):
    """A dataset that records the samples that were loaded."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.loaded.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_epoch_is_the_tail_of_the_whole(shuffle: bool) -> None:
    require_tails(0, shuffle)


@pytest.mark.usefixtures("tracker")
def test_a_loader_process_changes_no_order_no_random_transform_and_no_generator_here() -> None:
    """The generators belong to the process that iterates over the mini-batches.

    Each loader process imports torch; tests/long/test_data.py tests several at once.
    """

    def drawn() -> list[float]:
        return [torch.rand(()).item(), random.random(), numpy.random.rand()]

    here = [values(batches_of(Transformed()), epoch) for epoch in (1, 2)]
    random_streams.seed_all("a test")
    fault_free = drawn()
    random_streams.seed_all("a test")
    with closing(batches_of(Transformed(), num_workers=1)) as there:
        assert [values(there, epoch) for epoch in (1, 2)] == here
    assert drawn() == fault_free


def test_a_mini_batch_that_no_loader_can_send_is_an_error() -> None:
    in_a_fork(require_errors)


def require_errors() -> None:
    """Loaders are forks here, of a process with one thread: spawned ones would import torch."""
    plain = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: plain("fork")  # type: ignore[assignment]
    for dataset in (Unpicklable(), WithoutDescriptors()):
        with (
            closing(batches_of(dataset, num_workers=1)) as batches,
            pytest.raises(JobError, match=r"a loader process cannot send a mini-batch: \w+: .+"),
        ):
            next(batches.epoch(1))


def test_a_loader_process_ends_with_a_parent_that_died_before_it_had_started(
    tmp_path: Path,
) -> None:
    """torch's own loop would never notice, and the process hold the terminal for ever."""
    pid_file = tmp_path / "pid"
    code = f"""
from tests.support.minibatches import StartsAfterItsParent, batches_of
next(batches_of(StartsAfterItsParent({str(pid_file)!r}), num_workers=1).epoch(1))
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=TESTS.parent) as parent:
        try:
            poll_for(pid_file.exists, "a loader process")
            loader = psutil.Process(int(pid_file.read_text()))
        finally:
            parent.kill()
    try:
        loader.wait(DEADLINE)
    except psutil.TimeoutExpired:
        loader.kill()
        raise


def test_skipped_samples_are_not_loaded() -> None:
    dataset = Counted()
    tail = values(batches_of(dataset), 1, first=2)
    assert dataset.loaded == [index for _, targets in tail for index in targets]
    assert len(dataset.loaded) == 4
    assert values(batches_of(dataset), 1, first=4) == []
    assert len(dataset.loaded) == 4


def test_a_dataset_may_load_the_samples_of_a_mini_batch_at_once() -> None:
    assert values(batches_of(AllAtOnce()), 1) == values(batches_of(Transformed()), 1)


def test_a_dataset_that_stops_early_does_not_end_the_epoch_in_silence() -> None:
    class Stopping(Transformed):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            raise StopIteration

    with pytest.raises(RuntimeError, match="StopIteration"):
        values(batches_of(Stopping()), 1)


def test_items_that_are_not_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be \(input, target\) pairs"):
        next(load("triples").epoch(1))


@pytest.mark.parametrize(
    ("options", "samples"), [({}, 0), ({"drop_last": True}, 3), ({"drop_last": True}, 0)]
)
def test_a_dataset_without_a_mini_batch_is_refused(options: dict[str, Any], samples: int) -> None:
    with pytest.raises(ConfigError, match=f"data.train: {samples} samples make no mini-batch"):
        load(samples=samples, **options)


def load_returned(monkeypatch: pytest.MonkeyPatch, dataset: object) -> Batches:
    """Return the mini-batches of `dataset`, which may be any object."""
    monkeypatch.setattr(models, "returned", lambda: dataset)
    train = Factory(callable="tests.zoo.models:returned")
    return load_batches(train, "data.train", DataConfig(train=train), 0, training=False)


def test_what_is_no_dataset_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'tests.zoo.models:returned' is int, and no dataset"):
        load_returned(monkeypatch, 3)
    with pytest.raises(ConfigError, match="is a DataLoader: return its dataset"):
        load_returned(monkeypatch, DataLoader(TensorDataset(torch.ones(4))))


def test_a_list_of_pairs_is_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [({"image": torch.ones(2)}, index) for index in range(3)]
    ((inputs, targets),) = load_returned(monkeypatch, pairs).epoch(1)
    assert inputs["image"].shape == (3, 2)
    assert targets.tolist() == [0, 1, 2]


def test_an_item_that_is_not_a_tensor_is_named_with_its_part_of_the_batch() -> None:
    batch = Loaded(torch.ones(2, 3), {"same": torch.ones(2), "name": ["a", "b"]})
    with pytest.raises(ConfigError, match=r"^target\.name\.0 is str; a batch must be made of tens"):
        _ = batch.num_samples


def test_mappings_of_every_kind_become_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [UserDict(tokens=UserDict(ids=torch.ones(2)), label=index) for index in range(3)]
    ((inputs, targets),) = load_returned(monkeypatch, pairs).epoch(1)
    assert inputs is targets
    assert (type(inputs), type(inputs["tokens"])) == (dict, dict)
    assert inputs["tokens"]["ids"].shape == (3, 2)
    assert inputs["label"].tolist() == [0, 1, 2]


# The config's own sampler and collate function


def test_a_mini_batch_that_is_not_a_pair_is_described() -> None:
    section = DataConfig(train="a:b", collate="tests.unit.data.test_batches:_triple")  # type: ignore[arg-type]
    batches = Batches([(1, 2)] * 4, section, 0, training=True)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"a mini-batch is \(int64\[4\], .*data.collate"):
        next(batches.epoch(1))


def _triple(samples: list[Any]) -> tuple[Any, ...]:
    return (torch.arange(len(samples)),) * 3


class HasLock:
    def __iter__(self) -> Any:
        return iter(pickle.dumps(threading.Lock()))


def test_a_dataset_that_cannot_be_sent_to_loaders_is_an_error_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"num_workers processes \(TypeError: cannot pickle"):
        next(received(cast(Any, HasLock())))


class ByEpoch(Dataset[Any]):
    """Samples that change from epoch to epoch."""

    epoch = -1

    def __len__(self) -> int:
        return 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor(self.epoch), index


def test_a_dataset_is_told_the_epoch() -> None:
    samples = Samples(ByEpoch(), 0)
    found = [samples.load((epoch, 0, [0, 1])).inputs.tolist() for epoch in (1, 1, 2, 1)]
    assert found == [[0, 0], [0, 0], [1, 1], [0, 0]]
