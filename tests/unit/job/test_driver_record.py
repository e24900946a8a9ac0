"""What a driver records at stage servers, signed, and what the next one believes of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpcmp.job import driver_record
from rpcmp.job.driver_record import DriverRecord, proven
from rpcmp.net.security import Security
from rpcmp.server.driver_memory import DriverMemory
from rpcmp.v1 import control_pb2 as pb
from tests.support.lan import cli, issue

Change = Callable[[pb.RecallResponse], None]


def state(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 0.5, **more}


def made() -> DriverRecord:
    return DriverRecord("job", "a", "", Security())


def requests_of(record: DriverRecord, changes: list[Any]) -> list[pb.RecordRequest]:
    """Return the first request of a stream, and the one after each change."""

    async def collect() -> list[pb.RecordRequest]:
        stream = record.requests(3)
        found = [await anext(stream)]
        for change in changes:
            change()
            found.append(await anext(stream))
        await stream.aclose()  # type: ignore[attr-defined]
        return found

    return asyncio.run(collect())


def test_every_state_is_sent_once_and_again_if_it_changes() -> None:
    record = made()
    record.add(state(1), from_step=1)

    def about() -> None:
        record.about = "about"
        record.add(state(2), from_step=1)

    found = requests_of(
        record,
        [
            about,
            lambda: record.add(state(2, metrics={}), from_step=2),
            lambda: record.add(state(3), from_step=2),
        ],
    )
    assert [(each.job_id, each.generation) for each in found] == [("a", 3)] * 4
    assert [each.about for each in found] == ["", "about", "", ""]
    assert [[each.step for each in one.states] for one in found] == [[1], [2], [2], [3]]
    assert [each.from_step for each in found] == [1, 1, 2, 2]


def test_a_server_of_a_new_generation_gets_all_states_that_are_left() -> None:
    record = made()
    for step in range(1, 6):
        record.add(state(step), from_step=step - 2)
    (first,) = requests_of(record, [])
    assert [each.step for each in first.states] == [3, 4, 5]


def test_a_driver_that_has_nothing_to_record_sends_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_record, "BEAT_SECONDS", 0.01)
    found = requests_of(made(), [lambda: None, lambda: None])
    assert found == [pb.RecordRequest(job_id="a", generation=3)] * 3


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Issue certificates for a driver, a stage and a spare."""
    folder = issue(tmp_path_factory.mktemp("certs"), "127.0.0.1")
    cli(folder, "issue", "--spare", "--host", "127.0.0.1")
    return folder


def recalled(security: Security) -> pb.RecallResponse:
    """Return what a server answers that a driver with this certificate has told everything."""
    record = DriverRecord("job", "a", "", security)
    record.about = "about"
    record.add(state(1), from_step=1)

    def change() -> None:
        record.add(state(2), from_step=1)
        record._summary, record._identity = "{}", "identity"

    memory = DriverMemory()
    memory.claim(pb.PrepareRequest(job="job", job_id="a", generation=3, keep_s=60.0))
    first, last = requests_of(record, [change])
    memory.record(first)
    states = memory.recall(is_claimed=True).states
    memory.record(last)
    memory.claim(pb.PrepareRequest(job="other", job_id="b", generation=3, keep_s=60.0))
    answer = memory.recall(is_claimed=True)
    answer.job, answer.job_id = "job", "a"
    answer.about, answer.about_generation = first.about, 3
    answer.about_signature.CopyFrom(first.about_signature)
    answer.states.extend([*states, *last.states])
    return answer


def verified(answer: pb.RecallResponse, certs: Path) -> pb.RecallResponse:
    credentials = Security(certs / "driver").credentials
    assert credentials is not None
    return proven(answer, credentials.verifier(), "here:1")


def test_what_a_driver_has_signed_is_believed(
    certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answer = recalled(Security(certs / "driver"))
    assert (answer.about, len(answer.states), len(answer.ended)) == ("about", 2, 1)
    assert answer.completed.summary
    assert verified(answer, certs) == answer
    assert caplog.text == ""


@pytest.mark.parametrize("name", ["stage0", "spare", ""])
def test_what_others_have_signed_or_nobody_is_not(
    certs: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = verified(recalled(Security(certs / name if name else None)), certs)
    assert (found.about, len(found.states), len(found.ended)) == ("", 0, 0)
    assert not found.HasField("completed")
    assert (found.job, found.job_id) == ("job", "a")
    reason = {
        "stage0": "it is signed by stage 0, and not by a driver",
        "spare": "it is signed by spare, and not by a driver",
        "": "no driver has signed it",
    }
    for what in ("about", "state", "ended", "completed"):
        text = f"the server at here:1 holds of a job is not used ({what}): {reason[name]}"
        assert text in caplog.text


def test_a_signature_is_of_one_statement(certs: Path, caplog: pytest.LogCaptureFixture) -> None:
    security = Security(certs / "driver")
    of_about: list[Change] = [
        lambda answer: setattr(answer, "job_id", "b"),
        lambda answer: setattr(answer, "about_generation", 99),
        lambda answer: setattr(answer, "about", "forged"),
        lambda answer: setattr(answer, "job", "other"),
    ]
    for change in of_about:
        answer = recalled(security)
        change(answer)
        assert verified(answer, certs).about == ""
    of_state: list[Change] = [
        lambda answer: setattr(answer.states[0], "state", "forged"),
        lambda answer: setattr(answer.states[0], "step", 9),
        lambda answer: setattr(answer.states[0], "number", 9),
        lambda answer: answer.states[0].signature.CopyFrom(answer.about_signature),
    ]
    for change in of_state:
        answer = recalled(security)
        change(answer)
        assert [each.step for each in verified(answer, certs).states] == [2]
    answer = recalled(security)
    answer.ended[0].job_id = "b"
    answer.completed.summary = "forged"
    found = verified(answer, certs)
    assert not found.ended
    assert not found.HasField("completed")
    assert "its signature is of something else" in caplog.text


@pytest.mark.parametrize("broken", [b"", b"x", b"x" * 10_000])
def test_a_signature_that_cannot_be_read_is_none(
    certs: Path, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    answer = recalled(Security(certs / "driver"))
    answer.about_signature.certificate = broken
    answer.states[0].signature.value = broken
    found = verified(answer, certs)
    assert (found.about, len(found.states)) == ("", 1)


def test_a_renewed_certificate_signs_what_servers_have(certs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "driver"
    shutil.copytree(certs / "driver", folder)
    record = DriverRecord("job", "a", "", Security(folder))
    record.about = "about"

    def renew() -> None:
        cli(certs, "issue", "--driver", "--name", "again")
        for name in ("tls.crt", "tls.key"):
            shutil.copy(certs / "again" / name, folder / name)
        record.add(state(1), from_step=1)

    first, second, third = requests_of(record, [renew, lambda: record.add(state(2), 1)])
    assert [each.about for each in (first, second, third)] == ["about", "about", ""]
    assert first.about_signature.certificate != second.about_signature.certificate
