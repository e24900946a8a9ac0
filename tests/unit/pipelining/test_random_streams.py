"""Seeds of random numbers. If these literal values change, the results of all jobs change."""

from __future__ import annotations

import pytest
import torch

from rpcmp.pipelining import random_streams


@pytest.mark.parametrize(
    ("parts", "seed"),
    [
        ((0, "init", "conv1"), 7361864643485589056),
        ((0, "train", 1, 0, "conv1"), 7523081163700751720),
        ((7, "epoch", 3), 384584223700166415),
        ((-1,), 4960275749795939132),
    ],
)
def test_the_derivation_has_not_changed(parts: tuple[int | str, ...], seed: int) -> None:
    assert random_streams.derive_seed(*parts) == seed


def test_all_of_torch_is_seeded_with_it() -> None:
    random_streams.seed_all(7, "epoch", 3)
    seeded = torch.get_rng_state()
    torch.manual_seed(random_streams.derive_seed(7, "epoch", 3))
    assert torch.equal(torch.get_rng_state(), seeded)


def test_a_seed_fits_into_63_bits() -> None:
    assert all(0 <= random_streams.derive_seed(index) < 2**63 for index in range(1000))


def test_different_uses_have_different_seeds() -> None:
    uses: list[tuple[int | str, ...]] = [
        (1, 2),
        (12,),
        ("1", 2),
        (1, "2"),
        ("1\0", 2),
        (2, 1),
        (1, 2, ""),
        (-1, 2),
    ]
    assert len({random_streams.derive_seed(*use) for use in uses}) == len(uses)
