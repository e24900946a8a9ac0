"""The parts of a mini-batch that a driver serves; stages fetch a few micro-batches at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
from torch.futures import Future

from rpcmp.config.topology import DRIVER, ReplicaAssignment, ReplicaShare
from rpcmp.data.batch_server import GROUP, BatchServer, SliceFetcher
from rpcmp.errors import ConfigError, JobError, to_wire
from rpcmp.rpc.messages import Bundle, LossWeight, StageOutputs
from rpcmp.rpc.transport import Raised, Transport
from tests.support.rounds import header

SECONDS = 30.0  # a test that hangs fails after this time
LAST = 99

ALL = ReplicaShare(ReplicaAssignment([1]), 0)
"""The share of a stage's only replica."""

SLICES = [{"x": index, "y": -index} for index in range(10)]


def loaded() -> BatchServer:
    source = BatchServer()
    source.load(1, SLICES, list(range(100, 110)))
    return source


def values(source: BatchServer, *request: Any) -> list[Any]:
    return [outputs.value for outputs in source.slices(*request)]


def test_slices_go_by_round_kind_path_and_micro_batch() -> None:
    source = loaded()
    source.load(2, [{"x": "other"}], None)
    assert values(source, 1, "input", (), [8, 9]) == SLICES[8:]
    assert values(source, 1, "input", ("y",), [0, 1, 2]) == [0, -1, -2]
    assert values(source, 1, "target", (), [4]) == [104]
    assert values(source, 2, "input", ("x",), [0]) == ["other"]


def test_targets_come_with_what_the_loss_counts_in_them() -> None:
    source = BatchServer()
    weights = [LossWeight(3.0, 4.0), LossWeight(1.0, 4.0)]
    source.load(1, [0, 1], [{"x": 2}, {"x": 3}], weights)
    assert source.slices(1, "target", ("x",), [1]) == [StageOutputs(3, weight=weights[1])]
    assert source.slices(1, "input", (), [1]) == [StageOutputs(1)]


def test_clear_drops_one_round_only() -> None:
    source = loaded()
    source.load(2, SLICES, None)
    source.clear(1)
    assert values(source, 2, "input", (), [0]) == SLICES[:1]
    for kind in ("input", "target"):
        with pytest.raises(ConfigError, match=f"the batch of round 1 has no {kind}s"):
            source.slices(1, kind, (), [0])


def test_a_missing_part_of_the_batch_is_named() -> None:
    with pytest.raises(ConfigError, match="the batch of round 1 has no inputs"):
        loaded().slices(1, "input", (), [9, 10])
    with pytest.raises(ConfigError, match=r"a stage reads 'input.z'"):
        loaded().slices(1, "input", ("z",), [0])


class Driver:
    """A driver that answers requests of the stages only if the test calls `answer`."""

    def __init__(self) -> None:
        self.source = loaded()
        self.asked: list[tuple[str, Any, tuple[Any, ...], Future[Any]]] = []
        self._heard = threading.Condition()

    def call(self, member: str, method: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._heard:
            self.asked.append((member, method, args, future))
            self._heard.notify_all()
        return future

    def shares_memory(self, member: str) -> bool:
        return False

    def reader(self) -> SliceFetcher:
        """Return the slices of a stage that sends its requests to this driver."""
        return SliceFetcher(ALL, cast(Transport, self))

    def questions(self, slices: SliceFetcher) -> list[tuple[Any, ...]]:
        """Return the arguments of all requests, after sending one more.

        Requests arrive from another thread in order, so that all earlier ones have arrived by then.
        """
        slices.get(bundle(0, number=LAST), "input", (), 0)
        with self._heard:
            assert self._heard.wait_for(lambda: self.asked[-1][2][0] == LAST, SECONDS)
        self.asked.pop()
        return [args[:-1] for _, _, args, _ in self.asked]

    def answer(self, index: int = -1) -> None:
        _, method, args, future = self.asked[index]
        future.set_result(method(self.source, *args))


@pytest.fixture
def driver() -> Driver:
    return Driver()


def bundle(microbatch: int, number: int = 1) -> Bundle:
    """Return a bundle of one micro-batch of round `number`."""
    return Bundle(header(number, len(SLICES)), microbatch)


def test_one_request_fetches_several_micro_batches(driver: Driver) -> None:
    slices = driver.reader()
    answers = [slices.get(bundle(index), "input", ("x",), 0) for index in range(len(SLICES))]
    assert driver.questions(slices) == [
        (1, "input", ("x",), list(range(GROUP))),
        (1, "input", ("x",), list(range(GROUP, len(SLICES)))),
    ]
    assert {(member, method) for member, method, _, _ in driver.asked} == {
        (DRIVER, BatchServer.slices)
    }
    assert not any(answer.done() for answer in answers)
    for index in range(2):
        driver.answer(index)
    assert [answer.value() for answer in answers] == [[StageOutputs(index)] for index in range(10)]


def test_a_group_is_fetched_only_when_it_is_needed(driver: Driver) -> None:
    slices = driver.reader()
    for index in range(GROUP):
        slices.get(bundle(index), "input", (), 0)
    assert driver.questions(slices) == [(1, "input", (), list(range(GROUP)))]


def test_kinds_paths_and_rounds_are_fetched_apart(driver: Driver) -> None:
    slices = driver.reader()
    slices.get(bundle(0), "input", ("x",), 0)
    slices.get(bundle(0), "input", ("y",), 0)
    slices.get(bundle(0), "target", (), 0)
    slices.get(bundle(0, number=2), "input", ("x",), 0)
    assert len(driver.questions(slices)) == 4


def test_each_input_gets_its_own_copy_of_a_slice(driver: Driver) -> None:
    slices = driver.reader()
    for reader in range(2):
        slices.get(bundle(0), "input", ("x",), reader)
    assert len(driver.questions(slices)) == 2


def test_a_slice_that_has_arrived_is_returned_at_once(driver: Driver) -> None:
    slices = driver.reader()
    slices.get(bundle(0), "input", ("x",), 0)
    assert len(driver.questions(slices)) == 1
    driver.answer()
    assert slices.get(bundle(1), "input", ("x",), 0).value() == [StageOutputs(1)]


def test_a_bundle_gets_its_slices_from_several_groups(driver: Driver) -> None:
    slices = driver.reader()
    halves = header(1, len(SLICES), per_message=len(SLICES) // 2, in_turns=True).bundles()
    answers = [slices.get(half, "target", (), 0) for half in halves]
    assert len(driver.questions(slices)) == 2
    driver.answer(0)
    assert [answer.done() for answer in answers] == [True, False]
    driver.answer(1)
    values = [outputs.value for answer in answers for outputs in answer.value()]
    assert values == list(range(100, 110))


def test_an_error_is_the_answer_for_the_whole_group(driver: Driver) -> None:
    slices = driver.reader()
    answers = [slices.get(bundle(index), "input", (), 0) for index in range(2)]
    raised = Raised(to_wire(JobError("no such batch")))
    assert len(driver.questions(slices)) == 1
    driver.asked[0][-1].set_result(raised)
    assert [answer.value() for answer in answers] == [raised, raised]


def test_after_an_abort_no_slice_of_earlier_rounds_is_returned(driver: Driver) -> None:
    slices = driver.reader()
    slices.get(bundle(0), "input", (), 0)
    slices.forget()
    slices.get(bundle(0), "input", (), 0)
    assert len(driver.questions(slices)) == 2
