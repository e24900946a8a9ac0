"""Mini-batches from loader processes: resumed within an epoch, and several at once."""

from __future__ import annotations

from contextlib import closing
from multiprocessing import resource_tracker

import pytest

from tests.support.minibatches import AllAtOnce, Transformed, batches_of, require_tails, values


@pytest.fixture(scope="module", autouse=True)
def _tracker() -> None:
    """Start multiprocessing's resource tracker, which stays alive."""
    resource_tracker.ensure_running()


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_resumed_in_its_middle_is_the_tail_of_the_whole(shuffle: bool) -> None:
    require_tails(2, shuffle)


def test_batched_fetches_are_the_same_in_every_process() -> None:
    with closing(batches_of(AllAtOnce(), num_workers=2)) as there:
        for epoch in (1, 2):
            assert values(there, epoch) == values(batches_of(Transformed()), epoch)
