"""Mini-batches of indices, in the same order as loaded ones."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.futures import Future

from rpcmp.config.job_sections import DataConfig
from rpcmp.config.schema import Config
from rpcmp.config.types import Factory
from rpcmp.data.batches import Batches, Loaded
from rpcmp.data.sample_order import SampleOrder
from rpcmp.driver.datasets import Datasets, IndexBatches
from rpcmp.driver.stage_group import StageGroup
from rpcmp.errors import ConfigError
from rpcmp.rpc.messages import BatchIndices, DatasetInfo
from tests.support.graphs import chain_of
from tests.zoo import models

SAMPLES = 10
AHEAD = 2


def section(**options: Any) -> DataConfig:
    """Return a `[data]` section."""
    train = Factory(callable="tests.zoo.models:numbers")
    return DataConfig(train=train, **{"batch_size": 4, "at": "stage", **options})


class RecordedMessages:
    """A recorder of the announcements to the stages."""

    def __init__(self) -> None:
        self.drawn: list[BatchIndices] = []
        self.messages: list[list[BatchIndices]] = []

    def announce(self, drawn: Sequence[BatchIndices]) -> list[tuple[str, Future[Any]]]:
        self.drawn += drawn
        self.messages.append(list(drawn))
        return []

    def draws(self, dataset: str = "train", total: int = 0, **options: Any) -> IndexBatches:
        order = SampleOrder(range(SAMPLES), section(**options), 0, dataset == "train")
        return IndexBatches(dataset, order, self.announce, AHEAD, itertools.count(1), total)


@given(
    batch_size=st.integers(1, 11),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    training=st.booleans(),
    data=st.data(),
)
def test_indices_equal_the_loading_order_of_a_driver(
    batch_size: int, shuffle: bool, drop_last: bool, training: bool, data: st.DataObject
) -> None:
    options = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    loaded = Batches(models.numbers(SAMPLES), section(**options), 0, training)
    draws = RecordedMessages().draws("train" if training else "test", **options)
    assert len(draws) == len(loaded)
    for epoch in (1, 2):
        first = data.draw(st.integers(0, len(loaded)))
        expected = [inputs.tolist() for inputs, _ in loaded.epoch(epoch, first)]
        drawn = list(draws.epoch(epoch, first))
        assert [each.samples for each in drawn] == expected
        assert [each.position for each in drawn] == [
            (epoch, index) for index in range(first, len(loaded))
        ]


def test_mini_batches_are_announced_before_they_are_needed_and_once() -> None:
    reported = RecordedMessages()
    draws, asked = reported.draws(total=7), []
    for epoch, first in ((1, 1), (2, 0), (3, 0)):
        for each in draws.epoch(epoch, first):
            asked.append(each)
            ahead = min(
                AHEAD, 6 - len(asked)
            )  # continues in the next epoch, and stops at the last step
            assert reported.drawn[: len(asked) + ahead] == reported.drawn
            assert len(reported.drawn) == len(asked) + ahead
            if len(asked) == 6:
                break
    assert asked == reported.drawn
    assert [each.batch_id for each in asked] == list(range(1, 7))
    assert [each.position for each in asked] == [(1, 1), (1, 2), (2, 0), (2, 1), (2, 2), (3, 0)]


def test_an_evaluation_announces_only_its_own_mini_batches() -> None:
    reported = RecordedMessages()
    draws = reported.draws("test")
    for times in (1, 2):  # the same epoch may be evaluated twice
        assert len(list(draws.epoch(1))) == 3
        assert len(reported.drawn) == 3 * times


def test_an_abandoned_epoch_is_announced_again() -> None:
    reported = RecordedMessages()
    draws = reported.draws(total=9)
    next(draws.epoch(1))
    assert [each.position for each in draws.epoch(2)] == [(2, 0), (2, 1), (2, 2)]


def test_announcements_have_indices_only() -> None:
    reported = RecordedMessages()
    list(reported.draws(batch_size=5).epoch(1))
    for message in reported.messages:
        for each in message:
            assert all(type(sample) is int for sample in each.samples)
    assert max(len(pickle.dumps(message)) for message in reported.messages) < 400


class Stages:
    """Stages that have built their datasets."""

    def __init__(self, **holdings: DatasetInfo) -> None:
        self._holdings = holdings

    def dataset_infos(self) -> dict[str, DatasetInfo]:
        return self._holdings

    def prefetch(self, drawn: Sequence[BatchIndices]) -> None:
        """Ignore the announcement."""


def job(**more: Any) -> Config:
    data = {"train": "m:train", "test": "m:test", "at": "stage", "batch_size": 4, **more}
    return chain_of(2, data=data, epochs=2)


def datasets(config: Config, *sizes: dict[str, int]) -> Datasets:
    """Return the datasets of stages "a", "b", ... on hosts "host-a", "host-b", ..."""
    stages = Stages(
        **{
            name: DatasetInfo(f"host-{name}", size, [])
            for name, size in zip("ab", sizes, strict=False)
        }
    )
    return Datasets.at_stages(config, cast(StageGroup, stages))


def test_the_driver_takes_dataset_sizes_from_the_stages() -> None:
    size = {"train": 10, "test": 5}
    found = datasets(job(), size, size)
    assert len(found.train) == 3
    assert found.test is not None
    assert [each.num_samples for each in found.test.epoch(1)] == [4, 1]
    found.close()


def test_both_hosts_with_different_data_are_named() -> None:
    with pytest.raises(
        ConfigError,
        match=r"data.test has 5 samples for stage 'a' on host-a and 6 for stage 'b' on host-b",
    ):
        datasets(job(), {"train": 10, "test": 5}, {"train": 10, "test": 6})


def test_a_dataset_at_the_stages_without_a_mini_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"data.train: 3 samples make no mini-batch"):
        datasets(job(drop_last=True), {"train": 3, "test": 1})
    with pytest.raises(ConfigError, match=r"data.test: 0 samples make no mini-batch"):
        datasets(job(), {"train": 3, "test": 0})


def test_a_mini_batch_knows_how_many_samples_it_has() -> None:
    inputs, targets = models.dataset(6).tensors
    assert Loaded(inputs, targets).num_samples == Loaded(inputs).num_samples == 6
    with pytest.raises(ConfigError, match="6 inputs and 5 targets do not make a mini-batch"):
        _ = Loaded(inputs, targets[:5]).num_samples
