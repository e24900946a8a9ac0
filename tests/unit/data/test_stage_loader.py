"""The mini-batches that a stage loads itself, ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from rpcmp.config.topology import Reference
from rpcmp.data.loader_pool import LoaderPool, Parts
from rpcmp.data.stage_loader import StageDataLoader
from rpcmp.errors import ConfigError, RpcmpError, StageError, WorkerDiedError, from_wire
from rpcmp.pipelining import microbatches
from rpcmp.rpc.messages import BatchIndices, Bundle, LossWeight, RoundHeader
from rpcmp.rpc.transport import Raised
from tests.support.rounds import header

INPUT, TARGET = Reference("input"), Reference("target")


def bundle(drawn: int, round_number: int, *microbatches: int) -> Bundle:
    """Return a bundle of a mini-batch of seven samples in three micro-batches."""
    keys = {"step": 5, "num_samples": 7, "batch_id": drawn}
    if len(microbatches) == 1:
        return Bundle(header(round_number, 3, **keys), microbatches[0])
    assert microbatches == (0, 1)
    return Bundle(header(round_number, 3, per_message=2, in_turns=True, **keys), 0)


def drawn(number: int) -> BatchIndices:
    """Return the indices of a mini-batch of seven samples."""
    return BatchIndices(number, "train", 1, number - 1, list(range(7)))


class Given:
    """A loader for which the test provides the results."""

    def __init__(self) -> None:
        self.asked: dict[int, Callable[[Parts | RpcmpError], None]] = {}
        self.weighed: list[int] = []

    def load(self, drawn: BatchIndices, done: Callable[[Parts | RpcmpError], None]) -> None:
        self.asked[drawn.batch_id] = done

    def weigh(self, targets: Any, header: RoundHeader) -> list[LossWeight]:
        self.weighed.append(header.num_microbatches)
        if header.step == 5 and header.num_samples == 6:
            raise ConfigError("it weighs nothing")
        return [LossWeight(1.0, 3.0)] * 3


@pytest.fixture
def given() -> Given:
    return Given()


@pytest.fixture
def feed(given: Given) -> StageDataLoader:
    return StageDataLoader(cast(LoaderPool, given))


PARTS = Parts({INPUT: {"x": torch.arange(14).reshape(7, 2)}, TARGET: torch.arange(7)}, [], "")


def values(answer: Any) -> list[Any]:
    return [outputs.value for outputs in answer.value()]


def test_slices_are_returned_once_the_mini_batch_is_loaded(
    given: Given, feed: StageDataLoader
) -> None:
    feed.prefetch([drawn(1), drawn(2)])
    early = feed.get(bundle(1, 1, 0, 1), INPUT)
    assert list(given.asked) == [1, 2]
    assert not early.done()
    given.asked[1](PARTS)
    late = feed.get(bundle(1, 1, 2), TARGET)
    sliced = microbatches.split(PARTS.trees[INPUT], 3)
    for found, expected in zip(values(early), sliced, strict=False):
        assert torch.equal(found["x"], expected["x"])
    assert values(late)[0].tolist() == [5, 6]


def test_a_request_may_overtake_the_announcement(given: Given, feed: StageDataLoader) -> None:
    answer = feed.get(bundle(1, 1, 0), TARGET)
    feed.prefetch([drawn(1)])
    given.asked[1](PARTS)
    assert values(answer)[0].tolist() == [0, 1, 2]


def test_announcements_that_overtake_each_other_are_loaded_in_order(
    given: Given, feed: StageDataLoader
) -> None:
    feed.prefetch([drawn(3)])
    feed.prefetch([drawn(2)])
    assert list(given.asked) == []
    feed.prefetch([drawn(1)])
    assert list(given.asked) == [1, 2, 3]
    feed.forget(1)
    feed.prefetch([drawn(4)])
    assert list(given.asked) == [1, 2, 3, 4]


def test_targets_come_with_what_the_loss_counts_in_them(
    given: Given, feed: StageDataLoader
) -> None:
    weights = [LossWeight(weight, 8.0) for weight in (5.0, 3.0, 0.0)]
    feed.prefetch([drawn(1)])
    given.asked[1](PARTS._replace(weights=weights))
    answers = {part: feed.get(bundle(1, 1, 0, 1), part).value() for part in (INPUT, TARGET)}
    assert [outputs.weight for outputs in answers[TARGET]] == weights[:2]
    assert [outputs.weight for outputs in answers[INPUT]] == [None, None]


def test_targets_are_weighed_again_if_there_are_other_micro_batches(
    given: Given, feed: StageDataLoader
) -> None:
    feed.prefetch([drawn(1)])
    given.asked[1](PARTS._replace(weights=[LossWeight(1.0, 2.0)] * 2))
    (outputs,) = feed.get(bundle(1, 1, 2), TARGET).value()
    assert (outputs.weight, given.weighed) == (LossWeight(1.0, 3.0), [3])
    (other,) = feed.get(bundle(1, 1, 2), INPUT).value()
    assert (other.weight, given.weighed) == (None, [3])
    fewer = Bundle(header(1, 3, step=5, num_samples=6, batch_id=1), 0)
    raised = feed.get(fewer, TARGET).value()
    assert str(from_wire(raised.error)) == "it weighs nothing"


def test_every_answer_is_its_own_copy(given: Given, feed: StageDataLoader) -> None:
    feed.prefetch([drawn(1)])
    given.asked[1](PARTS)
    first, second = (values(feed.get(bundle(1, 1, 0), TARGET))[0] for _ in range(2))
    first += 1
    assert second.tolist() == PARTS.trees[TARGET][:3].tolist() == [0, 1, 2]


def test_finished_mini_batches_are_dropped_and_announced_ones_kept(
    given: Given, feed: StageDataLoader
) -> None:
    feed.prefetch([drawn(number) for number in range(1, 7)])
    for number in range(1, 5):
        feed.get(bundle(number, number, 0), INPUT)
        assert len(feed) == 6 - max(0, number - 2)
    feed.forget(4)
    assert len(feed) == 0


def test_a_request_overtaken_by_an_abort_fails(given: Given, feed: StageDataLoader) -> None:
    """Otherwise its mini-batch would never be loaded, and the job would hang."""
    feed.prefetch([drawn(1)])
    feed.forget(1)
    raised = feed.get(bundle(1, 1, 0), INPUT).value()
    assert isinstance(raised, Raised)
    assert str(from_wire(raised.error)) == "step 5 was aborted"
    assert len(feed) == 0
    feed.prefetch([drawn(2)])
    answer = feed.get(bundle(2, 2, 0), TARGET)
    given.asked[2](PARTS)
    assert values(answer)[0].tolist() == [0, 1, 2]


def test_an_error_names_the_step(given: Given, feed: StageDataLoader) -> None:
    feed.prefetch([drawn(1), drawn(2)])
    given.asked[1](StageError("a", "data", "ValueError: x", "the traceback"))
    given.asked[2](WorkerDiedError("gone"))
    raised = [feed.get(bundle(number, number, 0), INPUT).value() for number in (1, 2)]
    assert all(isinstance(each, Raised) for each in raised)
    first, second = (from_wire(each.error) for each in raised)
    assert str(first) == "stage 'a' failed in data at step 5: ValueError: x"
    assert isinstance(first, StageError)
    assert first.traceback == "the traceback"
    assert isinstance(second, WorkerDiedError)
