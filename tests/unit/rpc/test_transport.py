"""Leaving a group, and the results of calls; for torch RPC see test_torch_contract."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.futures import Future

from rpcmp.errors import JobError, WorkerDiedError
from rpcmp.rpc import transport
from rpcmp.rpc.transport import Raised, attempt, outcome, result, results, when_all

SECONDS = 30.0


class Meeting:
    """The store of a group; `get` blocks, as in a rendezvous."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._changed = threading.Condition()
        self.waiting = 0

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            self._values[key] = self._values.get(key, 0) + amount
            found: int = self._values[key]
            return found

    def set(self, key: str, value: str) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> Any:
        with self._changed:
            self.waiting += 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: key in self._values, SECONDS)
            return self._values[key]

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.waiting == count, SECONDS)


@pytest.fixture
def meeting(monkeypatch: pytest.MonkeyPatch) -> Meeting:
    made = Meeting()
    monkeypatch.setattr(transport, "_served", transport._Served(None, made, 3))
    return made


def test_leave_waits_for_all_members(meeting: Meeting) -> None:
    with ThreadPoolExecutor() as members:
        first = [members.submit(transport.leave, SECONDS) for _ in range(2)]
        meeting.wait_for(2)
        assert not any(each.done() for each in first)
        last = members.submit(transport.leave, SECONDS)
        for each in (*first, last):
            each.result(SECONDS)


def test_leave_returns_after_its_timeout(meeting: Meeting) -> None:
    transport.leave(0.01)
    meeting.wait_for(1)
    meeting.set("all have left", "")  # so that its thread ends


def test_leave_returns_if_the_store_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise JobError("the supervisor is gone")

    monkeypatch.setattr(transport, "_served", transport._Served(None, Gone(), 3))
    transport.leave(SECONDS)


def called(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def lost() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(RuntimeError("connection reset by peer\nin C++"))
    return future


def test_a_call_returns_its_value_or_raises_its_error() -> None:
    def refuse() -> None:
        raise JobError("no")

    assert result(called(3), "stage0") == 3
    with pytest.raises(JobError, match=r"^no$"):
        result(called(attempt(refuse)), "stage0")


def test_a_lost_connection_names_the_member() -> None:
    with pytest.raises(WorkerDiedError, match=r"lost .* 'stage1': .*connection reset"):
        result(lost(), "stage1")


def test_a_foreign_error_comes_with_its_traceback() -> None:
    raised = attempt(lambda: [][0])
    assert isinstance(raised, Raised)
    with pytest.raises(JobError, match=r"(?s)IndexError: list index.*Traceback"):
        result(called(raised), "stage0")


def test_results_come_in_order_and_the_failure_detection_ends_the_wait() -> None:
    futures: list[Future[Any]] = [Future() for _ in range(3)]
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(results, [(str(n), each) for n, each in enumerate(futures)])
        for number in (2, 0, 1):
            futures[number].set_result(number)
        assert waiting.result(SECONDS) == [0, 1, 2]
    never: Future[Any] = Future()
    with pytest.raises(WorkerDiedError, match="'b'"):
        results([("a", never), ("b", lost())])


def test_a_callback_gets_all_outcomes_once_all_have_ended() -> None:
    found: list[list[Any]] = []
    last: Future[Any] = Future()
    when_all([("a", last), ("b", lost())], found.append)
    assert found == []
    last.set_result(1)
    ((first, second),) = found
    assert first == 1
    assert isinstance(second, Raised)
    assert isinstance(outcome(lost(), "b"), Raised)
