"""What a driver records at stage servers, and how another one reads it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcmp.config.schema import Config
from rpcmp.driver.progress import TrainingProgress
from rpcmp.errors import BusyError, UnreachableError
from rpcmp.job import takeover
from rpcmp.job.server_pool import ServerPool
from rpcmp.job.takeover import About, CompletedRun, LostJob
from rpcmp.net.security import Security
from rpcmp.observability.events import SummaryEvent
from rpcmp.observability.events.event import dumps
from rpcmp.v1 import control_pb2 as pb
from tests.support.graphs import chain_of
from tests.support.places import ZOO

ABOUT = About(
    run="a",
    run_folder="",
    addresses=["127.0.0.1:1", "127.0.0.1:2"],
    numbers=[0, 1],
    layers={"stage0": ["x", "y"], "stage1": ["z"]},
    shares={},
    config={},
)


def small_job(**more: Any) -> Config:
    return chain_of(2, **more).with_folder(ZOO)


def state(step: int, **more: Any) -> dict[str, Any]:
    return asdict(TrainingProgress(**{"step": step, "loss": 0.5, **more}))


def answer(*states: dict[str, Any], **more: Any) -> pb.RecallResponse:
    fields: dict[str, Any] = {
        "job": "job",
        "job_id": "a",
        "generation": 3,
        "driver_id": "one",
        "about": ABOUT.model_dump_json(),
        "about_generation": more.get("generation", 3),
        "states": [pb.DriverState(step=s["step"], state=json.dumps(s)) for s in states],
    }
    return pb.RecallResponse(**{**fields, **more})


def find(
    *answers: pb.RecallResponse | Exception, stopped: list[Any] | None = None
) -> LostJob | None:
    """Return the lost job of a config, which the servers hold; see `recalled`."""
    found = recalled(small_job(), *answers, stopped=stopped)
    assert not isinstance(found, CompletedRun)
    return found


def recalled(
    config: Config, *answers: pb.RecallResponse | Exception, stopped: list[Any] | None = None
) -> LostJob | CompletedRun | None:
    """Let servers answer; an exception is what asking one raises.

    Args:
        stopped: gets each server's address, and what it was told to end.
    """

    @contextlib.asynccontextmanager
    async def client(address: str) -> Any:
        found = answers[int(address)]

        async def recall() -> pb.RecallResponse:
            if isinstance(found, Exception):
                raise found
            return found

        async def connect(*args: Any, **kwargs: Any) -> None:
            pass

        async def stop(request: pb.StopRequest) -> None:
            assert stopped is not None
            stopped.append((address, request.job_id, request.generation, request.driver_id))

        yield SimpleNamespace(recall=recall, connect=connect, stop=stop)

    addresses = [str(index) for index in range(len(answers))]
    dialer = SimpleNamespace(security=Security())
    pool = SimpleNamespace(addresses=addresses, client=client, dialer=dialer)
    identity = takeover.identity_of(config)
    return asyncio.run(takeover.find(config, cast(ServerPool, pool), identity))


SUMMARY = SummaryEvent(
    steps=9,
    is_cut_short=False,
    loss=float("nan"),
    metrics={},
    parameters_sha256="00",
    hosts={},
    memory={},
)


def completed(**more: Any) -> pb.RecallResponse:
    """What a server answers that remembers a complete run of `small_job()`."""
    fields: dict[str, Any] = {
        "job": "job",
        "job_id": "a",
        "about": ABOUT.model_dump_json(),
        "summary": dumps(SUMMARY.to_json()),
        "identity": takeover.identity_of(small_job()),
        "ended_at": time.time(),
    }
    return pb.RecallResponse(completed=pb.CompletedRun(**{**fields, **more}))


def test_a_run_that_is_complete_is_found_if_it_is_what_was_asked_for() -> None:
    run = recalled(small_job(), pb.RecallResponse(), UnreachableError("gone"), completed())
    assert isinstance(run, CompletedRun)
    assert (run.job_id, run.summary.steps, run.summary.parameters_sha256) == ("a", 9, "00")
    assert recalled(small_job(steps=10), completed()) is None
    with_checkpoint = small_job(checkpoint={"dir": "x"})
    same = completed(identity=takeover.identity_of(with_checkpoint))
    assert recalled(with_checkpoint, same) is None
    assert recalled(small_job(), completed(job="another")) is None


def test_of_runs_that_are_complete_the_newest_counts_for_as_long_as_servers_keep_it() -> None:
    assert recalled(small_job(), completed(), completed()) is not None
    older = completed(job_id="b", ended_at=time.time() - 60)
    for answers in ((completed(), older), (older, completed())):
        found = recalled(small_job(), *answers)
        assert isinstance(found, CompletedRun)
        assert found.job_id == "a"
    long_ago = completed(ended_at=time.time() - 3600)
    assert recalled(small_job(), long_ago) is None  # a server that does not forget it
    few = completed(about=ABOUT.model_copy(update={"addresses": []}).model_dump_json())
    assert recalled(small_job(), few) is None


def test_another_file_beside_the_config_makes_another_run(tmp_path: Path) -> None:
    config = chain_of(2).with_folder(tmp_path)
    before = takeover.identity_of(config)
    assert takeover.identity_of(config.with_balance([1, 1])) != before
    (tmp_path / "net.py").write_text("x = 1")
    changed = takeover.identity_of(config)
    assert changed != before
    assert takeover.identity_of(config) == changed


def test_a_lost_job_is_newer_than_a_run_that_is_complete() -> None:
    assert isinstance(recalled(small_job(), completed(), answer(state(3))), LostJob)


@pytest.mark.parametrize(
    "broken", [{"about": "{}"}, {"summary": "[" * 100_000}, {"summary": "{}"}, {"summary": "1e308"}]
)
def test_a_complete_run_that_cannot_be_read_is_named(
    broken: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    assert recalled(small_job(), completed(**broken)) is None
    assert "what the server at 0 holds of job 'job' cannot be read" in caplog.text
    assert recalled(small_job(), completed(**broken), completed()) is not None


def test_servers_that_hold_nothing_have_no_job_to_take_over() -> None:
    assert find(pb.RecallResponse(), UnreachableError("gone")) is None
    assert find(answer(state(3), job="another")) is None


def test_states_of_all_servers_count() -> None:
    lost = find(answer(state(3), state(4)), UnreachableError("gone"), answer(state(4), state(5)))
    assert lost is not None
    assert (lost.job_id, lost.generation, lost.drivers) == ("a", 3, ["one"])
    assert lost.about == ABOUT
    assert sorted(lost.states) == [3, 4, 5]


def test_the_state_of_the_newest_generation_counts() -> None:
    undone, done = state(4, loss=0.1), state(4, loss=0.2)
    lost = find(answer(done, generation=5, driver_id="two"), answer(undone))
    assert lost is not None
    assert (lost.generation, lost.states, lost.drivers) == (5, {4: done}, ["one", "two"])


def test_a_server_that_was_restarted_meanwhile_holds_nothing_and_names_its_driver() -> None:
    empty = answer(driver_id="two", generation=4, about="")
    lost = find(answer(state(3)), empty)
    assert lost is not None
    assert (lost.generation, lost.drivers, list(lost.states)) == (4, ["one", "two"], [3])
    assert find(empty) is None


def test_a_job_that_was_ended_is_not_taken_over_and_ends_where_it_is_held() -> None:
    stopped: list[Any] = []
    ended = pb.RecallResponse(ended=[pb.EndedJob(job_id=each) for each in "ac"])
    foreign = answer(state(3), job="foreign", job_id="c")
    other, living = answer(state(9), job_id="b"), answer(state(3), has_driver=True)
    lost = find(ended, answer(state(3)), living, other, foreign, stopped=stopped)
    assert lost is not None
    assert lost.job_id == "b"
    assert stopped == [("1", "a", 3, "one")]


def test_a_server_that_does_not_end_a_job_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(list[Any]):
        def append(self, item: Any) -> None:
            raise UnreachableError("gone")

    ended = pb.RecallResponse(ended=[pb.EndedJob(job_id="a")])
    assert find(ended, answer(state(3)), stopped=Refusing()) is None
    assert "the server at 1 goes on holding job 'job', which was ended: gone" in caplog.text


def test_a_driver_that_is_alive_somewhere_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(takeover, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(takeover, "MORE_SECONDS", 0.2)
    alive = answer(state(3), has_driver=True)
    with pytest.raises(BusyError, match="1 is busy with job 'job', whose driver is at work"):
        find(answer(state(3)), alive)
    threading.Timer(0.05, lambda: alive.ClearField("has_driver")).start()
    assert find(answer(state(3)), alive) is not None


def test_of_two_jobs_of_that_name_the_one_that_has_come_further_is_taken() -> None:
    lost = find(answer(state(3)), answer(state(9), job_id="b"))
    assert lost is not None
    assert lost.job_id == "b"


@pytest.mark.parametrize(
    "broken",
    [
        {"about": "{}"},
        {"about": ABOUT.model_copy(update={"run_folder": "../../etc"}).model_dump_json()},
        {"states": [pb.DriverState(step=3, state="[")]},
        {"states": [pb.DriverState(step=3, state="3")]},
        {"states": [pb.DriverState(step=3, state='{"step": 4}')]},
        {"states": [pb.DriverState(step=3, state='{"step": 3, "best": {"step": 1}}')]},
        {"states": [pb.DriverState(step=3, state="[" * 100_000)]},
    ],
)
def test_what_cannot_be_read_is_named_and_not_used(
    broken: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    assert find(answer(state(3), **broken)) is None
    assert "what the server at 0 holds of job 'job' cannot be read" in caplog.text
    lost = find(answer(state(3), **broken), answer(state(4)))
    assert lost is not None
    assert list(lost.states) == [4]


def test_measured_layers_and_shares_are_those_of_the_lost_run() -> None:
    auto = chain_of(
        2,
        model={"layers": "m:layers", "balance": "auto", "num_stages": 2},
        stages=[{"replicas": 2}, {"replicas": 2, "shares": [1, 1]}],
        balance_replicas=True,
    )
    about = ABOUT.model_copy(update={"shares": {0: [3, 1], 1: [1, 3]}})
    config = about.apply_to(auto)
    assert config.model is not None
    assert config.model.balance == [2, 1]
    assert [stage.shares for stage in config.stages] == [[3, 1], [1, 1]]
    assert about.apply_to(chain_of(2)) == chain_of(2)
    more = auto.model_copy(update={"stages": [stage.model_copy() for stage in auto.stages]})
    unequal = about.model_copy(update={"shares": {0: [1, 1, 1]}})
    assert unequal.apply_to(more).stages[0].shares is None


def test_what_was_measured_for_other_stages_is_measured_anew() -> None:
    auto = chain_of(2, model={"layers": "m:layers", "balance": "auto", "num_stages": 2})
    about = ABOUT.model_copy(update={"layers": {"a": ["x"], "b": ["y"], "c": ["z"]}})
    assert about.apply_to(auto) is auto


def test_of_a_generation_what_knows_most_cuts_counts() -> None:
    """A server that did not hear of a move before the driver was lost comes last here."""
    cuts = [{"stage0": ["x", "y"], "stage1": ["z"]}, {"stage0": ["x"], "stage1": ["y", "z"]}]
    moved = ABOUT.model_copy(update={"layers": cuts[1], "cuts": cuts})
    late = ABOUT.model_copy(update={"cuts": cuts[:1]})
    lost = find(*(answer(state(4), about=each.model_dump_json()) for each in (moved, late)))
    assert lost is not None
    assert lost.about == moved


def test_a_run_goes_on_with_the_stages_that_it_had() -> None:
    config = small_job(rebalance="auto")
    layers = {"stage1": ["z"], "stage5": ["x"], "stage0": ["y"]}
    more = {"layers": layers, "addresses": ["a:1", "b:1", "c:1"], "numbers": [1, 5, 0]}
    about = ABOUT.model_copy(update=more)
    found = about.apply_to(config)
    assert found.stage_names == list(layers)
    assert about.places[1] == ("b:1", 5)
    assert about.apply_to(small_job()).stage_names == ["stage0", "stage1"]
