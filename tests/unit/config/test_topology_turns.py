"""The replica that computes each bundle, and the shares of unequal replicas."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcmp.config.topology import ReplicaAssignment, ReplicaShare, shares_by_speed


@pytest.mark.parametrize(
    ("shares", "owners"),
    [
        ([1], [0, 0, 0, 0]),
        ([1, 1], [0, 1, 0, 1]),
        ([4, 4, 4], [0, 1, 2, 0, 1, 2]),
        ([2, 1], [0, 1, 0, 0, 1, 0]),
        ([1, 3], [1, 0, 1, 1, 1, 0]),
    ],
)
def test_turns_of_replicas_are_spread_evenly(shares: list[int], owners: list[int]) -> None:
    turns = ReplicaAssignment(shares)
    assert [turns.owner(bundle) for bundle in range(len(owners))] == owners


@settings(deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(1, 40))
def test_every_bundle_has_one_owner_and_every_member_a_share(shares: list[int], count: int) -> None:
    turns = ReplicaAssignment(shares)
    numbers = [ReplicaShare(turns, replica).numbers(count) for replica in range(len(shares))]
    assert sorted(number for mine in numbers for number in mine) == list(range(count))
    assert turns.largest_part(count) == max(map(len, numbers))
    whole = turns.numbers(0, sum(shares) * 3)
    assert len(whole) == 3 * shares[0]


@pytest.mark.parametrize(
    ("seconds", "count", "shares"),
    [
        ([1.0, 1.0], 8, [4, 4]),
        ([1.0, 3.0], 8, [6, 2]),
        ([1.0, 100.0], 4, [4, 1]),  # every replica takes part
        ([1.0, 1.0, 1.0], 4, [2, 1, 1]),
        ([0.0, 0.0], 4, [4, 1]),
    ],
)
def test_shares_by_speed_minimize_the_round(
    seconds: list[float], count: int, shares: list[int]
) -> None:
    assert shares_by_speed(seconds, count) == shares
