"""The cut of layers into stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcmp.errors import ConfigError
from rpcmp.pipelining import partition
from tests.support.examples import examples

LAYERS = ["embedding", "block0", "block1", "block2", "block3", "head"]


def test_a_balance_cuts_the_layers_as_drawn() -> None:
    assert partition.cut_layers(LAYERS, [2, 2, 2]) == [
        ["embedding", "block0"],
        ["block1", "block2"],
        ["block3", "head"],
    ]


@pytest.mark.parametrize("balance", [[], [2, 2], [6, 1]])
def test_a_balance_that_does_not_add_up_names_both_numbers(balance: list[int]) -> None:
    with pytest.raises(ConfigError, match=f"adds up to {sum(balance)}, but the model has 6 layers"):
        partition.cut_layers(LAYERS, balance)


@pytest.mark.parametrize(
    ("sizes", "num_stages", "balance"),
    [
        ([1, 1, 1, 1], 2, [2, 2]),
        ([9, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 9], 2, [3, 1]),
        ([5], 1, [1]),
        ([0, 0, 0], 3, [1, 1, 1]),
        ([9, 0, 0, 0], 3, [1, 1, 2]),  # would all fit into one stage, but each gets a layer
    ],
)
def test_sizes_give_the_expected_balance(
    sizes: list[int], num_stages: int, balance: list[int]
) -> None:
    assert partition.balance_by_size(sizes, num_stages) == balance


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 stages need at least as many layers, .* has 2"):
        partition.balance_by_size([1, 1], 3)


def largest_stage(sizes: list[int], balance: list[int]) -> int:
    starts = [sum(balance[:index]) for index in range(len(balance))]
    ranges = zip(starts, balance, strict=True)
    return max(sum(sizes[start : start + count]) for start, count in ranges)


def best_by_brute_force(sizes: list[int], num_stages: int) -> int:
    """Return the size of the largest stage, minimized over all balances."""
    cuts = combinations(range(1, len(sizes)), num_stages - 1)
    edges = ([0, *cut, len(sizes)] for cut in cuts)
    return min(
        largest_stage(sizes, [end - start for start, end in pairwise(edge)]) for edge in edges
    )


@examples(300)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_balance_has_a_smaller_largest_stage(sizes: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(sizes)))
    balance = partition.balance_by_size(sizes, num_stages)
    assert len(balance) == num_stages
    assert sum(balance) == len(sizes)
    assert min(balance) >= 1
    assert largest_stage(sizes, balance) == best_by_brute_force(sizes, num_stages)
