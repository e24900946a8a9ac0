"""The metrics that come with rpcmp."""

from __future__ import annotations

import pytest
import torch

from rpcmp import metrics


@pytest.mark.parametrize(
    ("targets", "share"),
    [([0, 1, 1], 1.0), ([0, 0, 1], 2 / 3), ([1, 0, 0], 0.0)],
)
def test_accuracy_is_the_share_of_largest_outputs(targets: list[int], share: float) -> None:
    outputs = torch.tensor([[2.0, 1.0], [0.0, 5.0], [-2.0, -1.0]])
    found = metrics.accuracy(outputs, torch.tensor(targets))
    assert (found.dtype, found.shape) == (torch.float32, torch.Size([]))
    assert found.item() == pytest.approx(share)


def test_accuracy_counts_every_token_of_a_sequence() -> None:
    outputs = torch.eye(4).reshape(2, 2, 4)
    assert metrics.accuracy(outputs, torch.tensor([[0, 1], [2, 0]])) == 0.75
