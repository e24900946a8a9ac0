"""Which driver may claim a server, and what the server holds of one that is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rpcmp.errors import BusyError, TakenOverError
from rpcmp.server import driver_memory
from rpcmp.server.driver_memory import MAX_STATE, MAX_STATES, SILENT_SECONDS, DriverMemory
from rpcmp.v1 import control_pb2 as pb


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(driver_memory, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


SIGNED = pb.Signature(certificate=b"a driver's", value=b"by it")
ENDED = pb.EndedJob(job_id="a", driver_id="two", signature=SIGNED)


def prepare(**more: Any) -> pb.PrepareRequest:
    fields = {"job": "job", "job_id": "a", "generation": 3, "driver_id": "one", "keep_s": 60.0}
    return pb.PrepareRequest(**{**fields, **more})


def recorded(*steps: int, from_step: int = 0) -> pb.RecordRequest:
    states = [pb.DriverState(step=step, state=f"state of {step}") for step in steps]
    return pb.RecordRequest(about="about", states=states, from_step=from_step)


@pytest.fixture
def memory(clock: SimpleNamespace) -> DriverMemory:
    """The memory of a job whose driver has recorded some steps."""
    memory = DriverMemory()
    memory.claim(prepare())
    memory.record(recorded(7, 8))
    return memory


NEXT = prepare(generation=4, driver_id="two", supersedes=["one"])


def test_a_driver_claims_its_next_generation(memory: DriverMemory) -> None:
    memory.require_may_claim(prepare(generation=4), is_claimed=True)
    memory.hold()
    memory.require_may_claim(prepare(generation=4), is_claimed=False)


def test_a_job_is_held_against_others_until_its_time_is_over(
    memory: DriverMemory, clock: SimpleNamespace
) -> None:
    other = prepare(job_id="b")
    memory.require_may_claim(other, is_claimed=False)  # nothing is lost yet
    assert memory.hold() == memory.holds_seconds == 60.0
    with pytest.raises(BusyError, match="up to step 8, whose driver was lost, for another 60 s"):
        memory.require_may_claim(other, is_claimed=False)
    memory.require_may_claim(prepare(job_id="b", drops_held=True), is_claimed=False)
    clock.now += 60.0
    memory.require_may_claim(other, is_claimed=False)
    assert memory.holds_seconds == 0.0


def test_a_driver_that_has_recorded_nothing_is_not_waited_for() -> None:
    memory = DriverMemory()
    memory.claim(prepare())
    assert memory.hold() == memory.holds_seconds == 0.0


def test_the_next_driver_gets_what_the_last_one_has_recorded(memory: DriverMemory) -> None:
    memory.hold()
    found = memory.recall(is_claimed=False)
    assert (found.job, found.job_id, found.generation, found.driver_id) == ("job", "a", 3, "one")
    assert [(each.step, each.state) for each in found.states] == [
        (7, "state of 7"),
        (8, "state of 8"),
    ]
    memory.require_may_claim(NEXT, is_claimed=False)
    memory.claim(NEXT)
    assert list(memory.states) == [7, 8]
    assert memory.holds_seconds == 0.0


def test_a_driver_that_was_taken_over_from_is_refused(memory: DriverMemory) -> None:
    memory.claim(NEXT)
    for is_claimed in (True, False):
        with pytest.raises(TakenOverError, match="as generation 4"):
            memory.require_may_claim(prepare(generation=9), is_claimed)
    assert memory.is_of("two")
    assert not memory.is_of("one")


def test_a_job_that_another_driver_has_ended_does_not_begin_anew(memory: DriverMemory) -> None:
    memory.claim(NEXT)
    memory.end(SIGNED)
    assert memory.recall(is_claimed=False) == pb.RecallResponse(
        ended=[ENDED], about_signature=pb.Signature()
    )
    with pytest.raises(TakenOverError, match="was ended meanwhile"):
        memory.require_may_claim(prepare(generation=9), is_claimed=False)
    memory.require_may_claim(prepare(job_id="b", generation=1), is_claimed=False)


def test_a_driver_that_still_speaks_cannot_be_superseded(
    memory: DriverMemory, clock: SimpleNamespace
) -> None:
    clock.now += SILENT_SECONDS - 0.1
    with pytest.raises(BusyError, match="whose driver is at work"):
        memory.require_may_claim(NEXT, is_claimed=True)
    memory.record(pb.RecordRequest())  # a beat
    clock.now += SILENT_SECONDS - 0.1
    with pytest.raises(BusyError, match="whose driver is at work"):
        memory.require_may_claim(NEXT, is_claimed=True)
    clock.now += 0.1
    memory.require_may_claim(NEXT, is_claimed=True)


def test_of_two_that_want_to_take_over_the_second_is_refused(memory: DriverMemory) -> None:
    memory.hold()
    memory.claim(NEXT)
    third = prepare(generation=4, driver_id="three", supersedes=["one"])
    with pytest.raises(TakenOverError):
        memory.require_may_claim(third, is_claimed=True)


def test_a_generation_does_not_come_twice(memory: DriverMemory) -> None:
    memory.hold()
    again = prepare(generation=3, driver_id="two", supersedes=["one"])
    with pytest.raises(BusyError, match="was here already"):
        memory.require_may_claim(again, is_claimed=False)


def test_states_are_forgotten_that_are_no_longer_needed(memory: DriverMemory) -> None:
    memory.record(recorded(9, from_step=8))
    assert list(memory.states) == [8, 9]
    memory.record(pb.RecordRequest(states=[pb.DriverState(step=10, state="x" * (MAX_STATE + 1))]))
    assert list(memory.states) == [8, 9]
    memory.record(recorded(*range(5000)))
    assert len(memory.states) == MAX_STATES
    assert max(memory.states) == 4999


def test_another_job_leaves_nothing_of_the_last_one(memory: DriverMemory) -> None:
    memory.claim(prepare(job_id="b", driver_id="two"))
    found = memory.recall(is_claimed=False)
    assert (found.job_id, found.driver_id) == ("b", "two")
    assert (found.about, list(found.states)) == ("", [])


def test_a_driver_counts_as_alive_while_it_claims_the_server_and_speaks(
    memory: DriverMemory, clock: SimpleNamespace
) -> None:
    assert memory.recall(is_claimed=True).has_driver
    assert not memory.recall(is_claimed=False).has_driver
    clock.now += SILENT_SECONDS
    assert not memory.recall(is_claimed=True).has_driver


def test_a_run_that_was_completed_is_remembered_for_as_long_as_a_lost_one(
    memory: DriverMemory, clock: SimpleNamespace
) -> None:
    last: dict[str, Any] = {"about": "later", "summary": "summary"}
    memory.record(pb.RecordRequest(has_ended=True, completed_signature=SIGNED, **last))
    run = pb.CompletedRun(job="job", job_id="a", signature=SIGNED, **last)
    assert memory.hold() == 0.0
    assert memory.recall(is_claimed=False).completed == run
    memory.end(SIGNED)
    clock.now += 59.0
    memory.claim(prepare(job="other", job_id="b"))
    assert memory.recall(is_claimed=True).completed == run
    clock.now += 1.0
    assert not memory.recall(is_claimed=True).HasField("completed")


def test_a_job_that_has_begun_anew_is_not_remembered_as_complete(memory: DriverMemory) -> None:
    memory.record(pb.RecordRequest(has_ended=True, summary="summary"))
    memory.end(SIGNED)
    memory.claim(prepare(job_id="b"))
    assert not memory.recall(is_claimed=True).HasField("completed")
