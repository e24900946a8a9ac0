"""What a plan is made for, and how its links are measured."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any, cast

import pytest

from rpcmp.config.job_sections import StageConfig
from rpcmp.config.schema import Config
from rpcmp.errors import ConfigError, JobError, NonFiniteLossError, SecurityError, UnreachableError
from rpcmp.pipelining.calibration import MeasuredSteps
from rpcmp.pipelining.planner import Planner, Timed
from rpcmp.process.fork_client import Forks
from rpcmp.server.client import StageClient
from rpcmp.server.link_speed import LinkSpeed
from rpcmp.tools import planning
from rpcmp.tools.planning import Wishes, rounds, stage_settings
from rpcmp.v1 import doctor_pb2
from tests.support.planning import hosts, planned_job, trained_on


@pytest.mark.parametrize("count", range(1, 9))
def test_each_pair_has_its_round_and_each_server_one_link_in_it(count: int) -> None:
    found = list(rounds(count))
    for pairs in found:
        ends = [end for pair in pairs for end in pair]
        assert len(ends) == len(set(ends))
    everything = sorted(pair for pairs in found for pair in pairs)
    assert everything == [(one, other) for one in range(count) for other in range(one + 1, count)]
    assert len(found) <= count


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (Wishes(use=["a:2"]), "--use a:2: no such server is given; did you mean 'a:1'"),
        (Wishes(without=["x"]), "--without x: no such server"),
        (Wishes(memory={"b:2": 1}), "--memory b:2: no such server is given; did you mean 'b:1'"),
        (Wishes(budgets={frozenset(("a:1", "c:1")): 1}), "--link-budget c:1: no such server"),
        (Wishes(use=["a:1"], without=["a:1"]), "a:1 is to take part, and not to"),
        (Wishes(without=["a:1", "b:1"]), "--without leaves no server"),
    ],
)
def test_wishes_about_servers_that_are_not_given_are_refused(wishes: Wishes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        wishes.require_known(["a:1", "b:1"])


def test_all_stages_of_a_plan_have_the_settings_that_a_configs_share() -> None:
    places: list[dict[str, Any]] = [
        {"addresses": ["a:1"], "memory": "1 GiB"},
        {"name": "last", "addresses": ["b:1"]},
    ]
    job = planned_job(stages=[{**place, "device": "auto", "threads": 2} for place in places])
    assert stage_settings(job) == StageConfig(device="auto", threads=2)
    assert stage_settings(planned_job()) == StageConfig()
    uneven = planned_job(stages=[{**place, "threads": 1 + i} for i, place in enumerate(places)])
    with pytest.raises(ConfigError, match="`threads` is not the same for all"):
        stage_settings(uneven)
    with pytest.raises(ConfigError, match=r"only a job with \[model\]"):
        stage_settings(planned_job(model=None, stages=[{"module": "zoo:Encoder"}]))


def planner_and_truth(*seconds: float) -> tuple[Planner, Planner]:
    """Return a planner for hosts of these speeds, and another one that knows what steps take."""
    made, truth = (Planner(planned_job(), StageConfig(), hosts(*seconds), {}) for _ in range(2))
    return made, truth


def timed_of(planner: Planner, job: Config) -> Timed:
    """Return the plan that a job was made from; the planner has to ask for it just now."""
    asked = filter(None, (planner.to_rehearse(), planner.to_rehearse_again()))
    return next(timed for own, timed in asked if own.addresses == job.addresses)


def test_a_rehearsal_that_diverges_leaves_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    async def diverge(*_: Any) -> None:
        raise NonFiniteLossError(math.inf, step=4, microbatch=2)

    monkeypatch.setattr(planning, "rehearse", diverge)
    planner = Planner(planned_job(), StageConfig(), hosts(0.01, 0.01), {})
    forks = cast(Forks, None)
    assert "the loss is inf" in asyncio.run(planning._rehearse(planner, forks))
    assert planner.estimates.rehearsed == {}
    slow = Planner(planned_job(), StageConfig(), hosts(60, 60), {})
    assert "a step would take about 1" in asyncio.run(planning._rehearse(slow, forks))


def test_rehearsals_end_when_all_plans_were_tried_or_it_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rehearsed(count: int) -> tuple[str, int]:
        planner, truth = planner_and_truth(*[0.01] * count)

        async def measure(job: Config, addresses: list[str], *_: Any) -> MeasuredSteps:
            assert job.addresses == addresses
            return trained_on(truth, timed_of(planner, job))

        monkeypatch.setattr(planning, "rehearse", measure)
        reason = asyncio.run(planning._rehearse(planner, cast(Forks, None)))
        return reason, len(planner.estimates.rehearsed)

    assert rehearsed(1) == ("", 1)
    assert rehearsed(3) == ("", 3)
    monkeypatch.setattr(planning, "MOST_REHEARSALS", 1)
    others = "each one that was tried has shown others that may be faster"
    assert rehearsed(3) == (others, 1)
    monkeypatch.setattr(planning, "REHEARSING_SECONDS", -1.0)
    assert rehearsed(3) == ("those that were took -1 s", 0)


def test_a_plan_that_cannot_be_rehearsed_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, truth = planner_and_truth(*[0.01] * 3)

    async def measure(job: Config, addresses: list[str], *_: Any) -> MeasuredSteps:
        if len(addresses) == 3:
            raise JobError("a step takes 15.0 s, too long to rehearse some")
        return trained_on(truth, timed_of(planner, job))

    monkeypatch.setattr(planning, "rehearse", measure)
    assert len(planner.plans()[0].stages) == 3
    reason = asyncio.run(planning._rehearse(planner, cast(Forks, None)))
    assert re.match(
        r"some steps of \[.*\] were rehearsed, and JobError: a step takes 15.0 s", reason
    )
    found = planner.plans()
    assert len(found[0].stages) == 2
    assert found[0].is_rehearsed


CLOSE = (0.01, 0.02, 0.04)
"""Speeds of hosts for which the best two plans are nearly equal."""


def test_the_best_two_are_rehearsed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    planner, truth = planner_and_truth(*CLOSE)
    trained = list[tuple[str, ...]]()

    async def measure(job: Config, addresses: list[str], *_: Any) -> MeasuredSteps:
        trained.append(tuple(addresses))
        return trained_on(truth, timed_of(planner, job))

    monkeypatch.setattr(planning, "rehearse", measure)
    assert asyncio.run(planning._rehearse(planner, cast(Forks, None))) == ""
    best = {tuple(stage.address for stage in plan.stages) for plan in planner.plans()[:2]}
    assert {each for each in trained if trained.count(each) == 2} == best
    assert max(map(trained.count, trained)) == 2


@pytest.mark.parametrize("kind", [JobError("too slow"), NonFiniteLossError(math.inf, 4, 2)])
def test_what_was_rehearsed_stands_if_it_cannot_be_once_more(
    monkeypatch: pytest.MonkeyPatch, kind: Exception
) -> None:
    planner, truth = planner_and_truth(*CLOSE)
    trained = list[list[str]]()

    async def measure(job: Config, addresses: list[str], *_: Any) -> MeasuredSteps:
        trained.append(addresses)
        if trained.count(addresses) == 2:
            raise kind
        return trained_on(truth, timed_of(planner, job))

    monkeypatch.setattr(planning, "rehearse", measure)
    assert asyncio.run(planning._rehearse(planner, cast(Forks, None))) == ""
    assert trained.count(trained[-1]) == 2
    assert [len(plan.stages) for plan in planner.plans()] == [3, 2, 1]
    assert planner.estimates.failed == set()


class End:
    """A server's client whose link to another one is known."""

    def __init__(self, address: str, speed: LinkSpeed | Exception) -> None:
        self.name = self.address = address
        self._speed = speed

    async def probe(self, request: doctor_pb2.ProbeRequest) -> LinkSpeed:
        assert request.address == "b:1"
        if isinstance(self._speed, Exception):
            raise self._speed
        return self._speed


def measured(speed: LinkSpeed | Exception) -> Any:
    ends = [cast(StageClient, End(address, speed)) for address in ("a:1", "b:1")]
    return asyncio.run(planning._measure_link(*ends))


def test_a_link_is_measured_from_one_end_for_both_directions() -> None:
    ways = measured(LinkSpeed(0.5, 0.0, there=10.0, back=20.0))
    assert {pair: tuple(vars(way).values()) for pair, way in ways.items()} == {
        ("a:1", "b:1"): (0.25, 10.0),
        ("b:1", "a:1"): (0.25, 20.0),
    }


@pytest.mark.parametrize("kind", [UnreachableError, SecurityError])
def test_a_link_that_is_down_is_named_by_both_ends(kind: type[Exception]) -> None:
    with pytest.raises(kind, match=r"the link from a:1 to b:1 is down: refused; .*--without b:1"):
        measured(kind("refused"))
