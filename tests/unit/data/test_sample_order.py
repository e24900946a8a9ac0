"""The order of an epoch: samplers from the config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import RandomSampler

from rpcmp.data.sample_order import OwnSampler
from rpcmp.errors import ConfigError


def sampled(sampler: Any, samples: int = 10) -> list[list[int]]:
    """Return the indices of the first three epochs."""
    own, found = OwnSampler(sampler, samples, seed=0), []
    for epoch in range(3):
        own.set_epoch(epoch)
        found.append(list(own))
    return found


def test_a_samplers_own_generator_is_seeded_for_each_epoch() -> None:
    generator = torch.Generator().manual_seed(5)
    first = sampled(RandomSampler(range(10), generator=generator))
    torch.rand(3, generator=generator)
    assert sampled(RandomSampler(range(10), generator=generator)) == first
    assert first[0] != first[1] != first[2]
    assert all(sorted(epoch) == list(range(10)) for epoch in first)


@pytest.mark.parametrize("wrong", [[0, 10], [-1, 0], [0, 1.0], ["a", 0], [torch.ones(2), 0]])
def test_a_sampler_yields_indices(wrong: list[Any]) -> None:
    with pytest.raises(ConfigError, match="has to yield indices of samples, here from 0 to 9"):
        sampled(wrong)
    assert sampled([torch.tensor(3), 4])[0] == [3, 4]
