"""The cut of a mini-batch into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rpcmp.errors import ConfigError
from rpcmp.pipelining import microbatches


@pytest.mark.parametrize(
    ("num_samples", "num_microbatches", "sizes"),
    [
        (50, 7, [8, 7, 7, 7, 7, 7, 7]),  # as drawn in the module's docstring
        (2, 4, [1, 1]),
        (8, 4, [2, 2, 2, 2]),
        (1, 1, [1]),
    ],
)
def test_the_sizes_of_a_balance_are_as_drawn(
    num_samples: int, num_microbatches: int, sizes: list[int]
) -> None:
    assert microbatches.sizes(num_samples, num_microbatches) == sizes


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 1000), st.integers(1, 100))
def test_sizes_sum_up_and_differ_by_at_most_one(num_samples: int, num_microbatches: int) -> None:
    sizes = microbatches.sizes(num_samples, num_microbatches)
    assert sum(sizes) == num_samples
    assert len(sizes) == min(num_samples, num_microbatches)
    assert sizes == sorted(sizes, reverse=True)
    assert 1 <= sizes[-1] >= sizes[0] - 1


@settings(deadline=None, derandomize=True)
@given(st.integers(1, 60), st.integers(1, 20))
def test_slices_equal_tensor_split(num_samples: int, num_microbatches: int) -> None:
    batch = torch.arange(num_samples * 3).reshape(num_samples, 3)
    slices = microbatches.split(batch, num_microbatches)
    count = min(num_samples, num_microbatches)
    for ours, theirs in zip(slices, torch.tensor_split(batch, count), strict=True):
        assert torch.equal(ours, theirs)


@given(num_samples=st.integers(1, 200), num_microbatches=st.integers(1, 40))
def test_samples_of_the_micro_batches_follow_each_other(
    num_samples: int, num_microbatches: int
) -> None:
    sizes = microbatches.sizes(num_samples, num_microbatches)
    pieces = [
        microbatches.samples_of(index, num_samples, num_microbatches) for index in range(len(sizes))
    ]
    assert [sample for piece in pieces for sample in piece] == list(range(num_samples))
    assert list(map(len, pieces)) == sizes
    for index in (-1, len(sizes)):
        with pytest.raises(IndexError):
            microbatches.samples_of(index, num_samples, num_microbatches)


def test_every_tensor_of_a_tree_is_cut_alike() -> None:
    batch = {"image": torch.arange(5.0), "meta": (torch.arange(10).reshape(5, 2),)}
    first, second = microbatches.split(batch, 2)
    assert first["image"].tolist() == [0, 1, 2]
    assert second["meta"][0].tolist() == [[6, 7], [8, 9]]


def test_slices_are_contiguous_and_own_their_storage() -> None:
    batch = torch.zeros(4, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    for part in microbatches.split(batch, 2):
        assert part.is_contiguous()
        assert part.storage_offset() == 0
        part += 1
    assert batch.sum() == 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.empty(0, 3), "has no samples; is the dataset empty"),
        (torch.tensor(1.0), r"the batch is float32\[\]; a batch must be made of tensors"),
        ({"a": torch.ones(2), "b": [3]}, "b.0 is int; a batch must be made of tensors"),
        ((torch.ones(2), torch.ones(3)), "one number of samples, not 0: 2, 1: 3"),
        ({}, "one number of samples, not none"),
    ],
)
def test_a_value_that_is_not_a_batch_is_refused(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        microbatches.split(batch, 2)


@pytest.mark.parametrize(
    ("samples", "count", "smallest", "found"),
    [
        (8, 4, 1, [2, 2, 2, 2]),
        (3, 4, 1, [1, 1, 1]),
        (3, 4, 2, [3]),
        (7, 4, 2, [3, 2, 2]),
        (1, 4, 2, [1]),  # there are no more samples; the caller decides if that is enough
        (50, 7, 8, [9, 9, 8, 8, 8, 8]),
    ],
)
def test_micro_batches_are_merged_until_each_has_enough(
    samples: int, count: int, smallest: int, found: list[int]
) -> None:
    assert microbatches.sizes(samples, count, smallest) == found


def test_only_layers_trained_with_batch_statistics_need_two_samples() -> None:
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            super().train(False)
            return self

    needs: list[tuple[Callable[[], nn.Module], int]] = [
        (lambda: nn.Linear(1, 1), 1),
        (lambda: nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), 2),
        (lambda: nn.BatchNorm2d(1), 2),
        (lambda: nn.SyncBatchNorm(1), 2),
        (lambda: nn.LazyBatchNorm3d(), 2),
        (lambda: nn.BatchNorm1d(1, track_running_stats=False).eval(), 2),
        (lambda: nn.GroupNorm(1, 1), 1),
        (lambda: nn.InstanceNorm2d(1), 1),  # it normalizes each sample by itself
        (lambda: Frozen(1).train(), 1),
    ]
    for make, found in needs:
        assert microbatches.smallest_for([nn.Identity(), make()]) == found


def test_numbers_of_whole_micro_batches_are_one_or_have_a_mean() -> None:
    def part(aux: float, count: int) -> dict[str, object]:
        return {"logits": torch.ones(2), "aux": torch.tensor(aux), "count": count}

    joined = microbatches.join([part(math.nan, 1), part(math.nan, 1)])
    assert joined["logits"].shape == (4,)
    assert joined["count"] == 1
    more = {**part(4.0, 1), "logits": torch.ones(4)}
    assert float(microbatches.join([part(1.0, 1), more])["aux"]) == pytest.approx(3.0)
    with pytest.raises(ConfigError, match="count has no dimension of samples"):
        microbatches.join([part(1.0, 1), part(1.0, 2)])
