"""Requests for a bundle: it is computed once, and kept until all its readers have the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from rpcmp.config.topology import ReplicaAssignment, ReplicaShare
from rpcmp.errors import JobError, StageError, from_wire
from rpcmp.rpc.messages import Bundle, MicrobatchMeta, RoundHeader, StageOutputs
from rpcmp.rpc.shared_memory import Sharing
from rpcmp.rpc.transport import Raised
from rpcmp.worker.backward import Failures
from rpcmp.worker.forward import Computed
from rpcmp.worker.requests import ForwardRequests
from tests.support.rounds import header

NUM_READERS = 2


class _Around:
    """A stand-in for the inputs, compute thread and execution around ForwardRequests."""

    def __init__(self) -> None:
        self.asked: list[Callable[[list[Any]], None]] = []
        self.begun: list[RoundHeader] = []
        self.computed: list[MicrobatchMeta] = []
        self.sharing: list[Mapping[int, Sharing]] = []
        self.tasks: list[Any] = []
        self.error: BaseException | None = None
        self.exchange = ForwardRequests(
            "stage1",
            cast(Any, self),
            NUM_READERS,
            ReplicaShare(ReplicaAssignment([1]), 0),
            cast(Any, self),
            cast(Any, self),
            Failures(),
            lambda: None,
        )

    # Inputs

    def ask(self, _: Bundle, arrived: Callable[[list[Any]], None]) -> None:
        self.asked.append(arrived)

    def forget(self, last: int) -> None:
        self.asked.clear()

    # Compute thread

    def start_round(self, header: RoundHeader) -> None:
        self.begun.append(header)

    def submit(self, round_number: int, action: object, number: int, task: Any) -> None:
        self.tasks.append(task)

    # Execution

    def receive(self, answers: list[StageOutputs]) -> list[StageOutputs]:
        return answers

    def forward(
        self, meta: MicrobatchMeta, received: list[StageOutputs], sharing: Mapping[int, Sharing]
    ) -> Computed:
        self.computed.append(meta)
        self.sharing.append(sharing)
        return Computed(received, [meta.number])

    def answer(
        self,
        _: Bundle,
        computed: list[Computed],
        send: Callable[[list[list[StageOutputs]]], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        if self.error is not None:
            failed(self.error)
            return
        values = [one.answers[0] for one in computed]
        send([[StageOutputs((port, value)) for value in values] for port in range(NUM_READERS)])

    # All together

    def arrive(self) -> None:
        """Let the requested inputs arrive, and compute the bundle."""
        self.asked.pop(0)([[StageOutputs("input")] * 2])
        for part in self.tasks.pop(0).parts:
            part()


@pytest.fixture
def around() -> _Around:
    return _Around()


def bundle(round_number: int = 1) -> Bundle:
    """Return a bundle of two micro-batches."""
    return Bundle(header(round_number, 2, per_message=2), 0)


def answer_to(port: int) -> list[StageOutputs]:
    return [StageOutputs((port, microbatch)) for microbatch in range(2)]


def test_tensors_are_shared_with_the_readers_that_have_asked_for_it(around: _Around) -> None:
    around.exchange.ask(bundle(), 1, Sharing.HOST)
    around.arrive()
    late = around.exchange.ask(bundle(), 0, Sharing.DEVICE)
    assert around.sharing == [{1: Sharing.HOST}, {1: Sharing.HOST}]
    assert late.value() == answer_to(0)  # which torch RPC sends


@pytest.mark.parametrize("arrives_after", [1, 2])
def test_a_late_reader_gets_the_answer_computed_for_the_first(
    around: _Around, arrives_after: int
) -> None:
    answers = []
    for port in range(NUM_READERS):
        answers.append(around.exchange.ask(bundle(), port))
        if len(answers) == arrives_after:
            around.arrive()
    assert [answer.value() for answer in answers] == [answer_to(0), answer_to(1)]
    assert (len(around.begun), len(around.computed), around.asked) == (1, 2, [])


def test_a_request_is_kept_until_computed_and_asked_by_all_readers(around: _Around) -> None:
    around.exchange.ask(bundle(), 0)
    around.arrive()
    assert len(around.exchange) == 1
    around.exchange.ask(bundle(), 1)
    assert len(around.exchange) == 0
    for port in range(NUM_READERS):
        around.exchange.ask(bundle(2), port)
    assert len(around.exchange) == 1
    around.arrive()
    assert len(around.exchange) == 0


def test_a_failed_input_is_the_answer_to_all_readers(around: _Around) -> None:
    failed = Raised("what it was")
    first = around.exchange.ask(bundle(), 0)
    around.asked.pop()([failed])
    assert [first.value(), around.exchange.ask(bundle(), 1).value()] == [failed] * 2
    assert around.tasks == []


def test_a_device_that_fails_to_copy_what_was_computed_is_the_answer_to_all_readers(
    around: _Around,
) -> None:
    around.error = RuntimeError("the copy has failed")
    answers = [around.exchange.ask(bundle(), port) for port in range(NUM_READERS)]
    around.arrive()
    for answer in answers:
        with pytest.raises(StageError, match=r"'stage1' failed in forward .* the copy has failed"):
            raise from_wire(answer.value().error)
    assert len(around.exchange) == 0


def test_memory_that_cannot_be_opened_is_the_answer_to_all_readers(
    around: _Around, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: StageOutputs) -> StageOutputs:
        raise RuntimeError("pretend:1 is lost")

    monkeypatch.setattr(StageOutputs, "opened", refuse)
    answers = [around.exchange.ask(bundle(), port) for port in range(NUM_READERS)]
    around.asked.pop(0)([[StageOutputs("input")] * 2])
    for raised in [answer.value() for answer in answers]:
        assert isinstance(raised, Raised)
        assert "failed in forward of micro-batch 0" in str(from_wire(raised.error))
        assert "pretend:1 is lost" in str(from_wire(raised.error))
    assert around.tasks == []


def test_requests_before_and_after_an_abort_get_an_error(
    around: _Around,
) -> None:
    before = around.exchange.ask(bundle(), 0)
    around.asked.pop()([[StageOutputs("input")] * 2])
    around.exchange.refuse(1)
    around.tasks.pop().cancel()
    for answer in (before, around.exchange.ask(bundle(), 1)):
        with pytest.raises(JobError, match="step 1 was aborted at stage 'stage1'"):
            raise from_wire(answer.value().error)
    around.exchange.clear()
    assert len(around.exchange) == 0
