"""Two results are one if they are apart by rounding alone, and not by what they mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rpcmp.splitting.comparison import difference, first_difference, some_rows_differ


def exactly(dtype: torch.dtype) -> float:
    return {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 0.02)


ONE = torch.ones(4)


@pytest.mark.parametrize(
    ("ours", "theirs", "says"),
    [
        (ONE, ONE + 1e-7, ""),
        (ONE, ONE + 1e-4, "is up to 0.0001 apart, of numbers up to 1"),
        (ONE.double(), ONE.double() + 1e-7, "is up to 1e-07 apart"),
        (ONE.half(), ONE.half() * 1.01, ""),
        (ONE * torch.nan, ONE * torch.nan, ""),
        (ONE * torch.nan, ONE, "is up to nan apart"),
        (ONE, ONE[:2], "is torch.float32[4], and torch.float32[2] as it is"),
        (ONE.long(), ONE.long() + 1, "differs in 4 of 4 numbers"),
        (None, ONE, "is nothing in layers, and a tensor as it is"),
        (1, True, "is 1 in layers, and True as it is"),
        ("a", "a", ""),
        (ONE.to_sparse(), ONE.to_sparse(), ""),
    ],
)
def test_a_difference_is_told_beyond_rounding(ours: Any, theirs: Any, says: str) -> None:
    found = difference(ours, theirs, exactly, 1.0)
    assert found.startswith(says) if says else not found


def test_what_is_small_beside_all_results_is_noise() -> None:
    small = {"a large one": ONE * 1e6, "a small one": ONE * 1e-3}
    assert not first_difference({**small, "a small one": ONE * 2e-3}, small, exactly)
    assert first_difference({**small, "a small one": ONE}, small, exactly).startswith("a small one")


def test_a_few_samples_may_differ_where_a_decision_hangs_on_rounding() -> None:
    rows = torch.ones(9, 2)
    few, many = rows.clone(), rows.clone()
    few[0] += 1
    many[:4] += 1
    assert some_rows_differ(few, rows, exactly)
    assert not some_rows_differ(many, rows, exactly)
    assert not some_rows_differ(rows, rows, exactly)
